#include "result.h"

#include <ostream>

#include "protocol/response.h"

namespace cppool {

std::string_view ToString(Status status) { return protocol::ToString(static_cast<protocol::Status>(status)); }

std::ostream& operator<<(std::ostream& out, Status status) { return out << ToString(status); }

namespace internal {

static_assert(static_cast<int>(Status::kPassed) == static_cast<int>(protocol::Status::kPassed) &&
              static_cast<int>(Status::kFailed) == static_cast<int>(protocol::Status::kFailed) &&
              static_cast<int>(Status::kSkipped) == static_cast<int>(protocol::Status::kSkipped) &&
              static_cast<int>(Status::kError) == static_cast<int>(protocol::Status::kError));

Result ResultFromJson(Json json) {
  protocol::RunResult read = protocol::RunResultFromJson(json);
  Result result;
  result.status = static_cast<Status>(read.status);
  result.error = std::move(read.error);
  if (read.failure)
    result.failure = {std::string(protocol::ToString(read.failure->kind)), read.failure->rank,
                      read.failure->stage, read.failure->detail};
  result.fatal = read.fatal;
  for (auto& rank : read.ranks)
    result.ranks.push_back({rank.rank, rank.ok, std::move(rank.error), std::move(rank.gpu_ms)});
  for (auto& check : read.checks)
    result.checks.push_back({std::move(check.tensor), std::move(check.against), check.rank, check.max_abs_err,
                             check.rel_err, check.tolerance, check.ok});
  result.tflops = std::move(read.tflops);
  result.wall_ms = read.wall_ms;
  result.seed = read.seed;
  result.json = std::move(json);
  return result;
}

}  // namespace internal
}  // namespace cppool
