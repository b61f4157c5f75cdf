#include "client/src/result.h"

#include <limits>
#include <ostream>
#include <stdexcept>

#include "protocol/json_text.h"
#include "protocol/response.h"

namespace cppool {

std::string_view ToString(Status status) { return protocol::ToString(static_cast<protocol::Status>(status)); }

std::ostream& operator<<(std::ostream& out, Status status) { return out << ToString(status); }

namespace client {

static_assert(static_cast<int>(Status::kPassed) == static_cast<int>(protocol::Status::kPassed) &&
              static_cast<int>(Status::kFailed) == static_cast<int>(protocol::Status::kFailed) &&
              static_cast<int>(Status::kSkipped) == static_cast<int>(protocol::Status::kSkipped) &&
              static_cast<int>(Status::kError) == static_cast<int>(protocol::Status::kError));

namespace {

std::optional<double> RatioOf(const Json& check) {
  const auto ratio = check.find("ratio");
  if (ratio == check.end()) return std::nullopt;
  if (ratio->is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (!ratio->is_number())
    throw std::runtime_error("in the response, a check's ratio is no number: " +
                             protocol::Quoted(ratio->dump()));
  return ratio->get<double>();
}

}  // namespace

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
  for (std::size_t i = 0; i < read.checks.size(); ++i) {
    auto& check = read.checks[i];
    result.checks.push_back({std::move(check.tensor), std::move(check.against), check.rank, check.max_abs_err,
                             check.rel_err, check.tolerance, check.ok, RatioOf(json["checks"][i])});
  }
  result.tflops = std::move(read.tflops);
  result.wall_ms = read.wall_ms;
  result.seed = read.seed;
  result.json = std::move(json);
  return result;
}

Result ValidationFromJson(Json json) {
  const auto runs = json.find("runs");
  if (runs == json.end()) return ResultFromJson(std::move(json));
  if (*runs != true || json.value("ok", Json()) != true)
    throw std::runtime_error("in the response, \"runs\" is not true where \"ok\" is: " +
                             protocol::Quoted(json.dump()));
  Result result;
  result.status = Status::kPassed;
  result.json = std::move(json);
  return result;
}

}  // namespace client
}  // namespace cppool
