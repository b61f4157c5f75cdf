#include "protocol/failure.h"

#include <algorithm>
#include <array>

namespace cppool::protocol {
namespace {

// In the order of FailureKind.
constexpr auto kKinds = std::to_array<std::string_view>({"invalid_request", "inapplicable", "unsupported",
                                                         "mismatch", "out_of_memory", "cuda", "nccl",
                                                         "timeout", "cancelled", "polluted", "internal"});
static_assert(kKinds.size() == static_cast<std::size_t>(FailureKind::kInternal) + 1);

}  // namespace

std::string_view ToString(FailureKind kind) { return kKinds.at(static_cast<std::size_t>(kind)); }

std::optional<FailureKind> ParseFailureKind(std::string_view word) {
  const auto found = std::ranges::find(kKinds, word);
  if (found == kKinds.end()) return std::nullopt;
  return static_cast<FailureKind>(found - kKinds.begin());
}

std::string_view KindOf(const Failure& failure) {
  return failure.unknown_kind.empty() ? ToString(failure.kind) : std::string_view(failure.unknown_kind);
}

Json ToJson(const Failure& failure) {
  Json json = {{"kind", KindOf(failure)},
               {"rank", failure.rank ? Json(*failure.rank) : Json()},
               {"stage", failure.stage.empty() ? Json() : Json(failure.stage)},
               {"detail", failure.detail}};
  if (!failure.node.empty()) json["node"] = failure.node;
  return json;
}

}  // namespace cppool::protocol
