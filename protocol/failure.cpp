#include "protocol/failure.h"

#include <array>
#include <utility>

namespace cppool::protocol {
namespace {

constexpr std::array<std::pair<FailureKind, std::string_view>, 11> kKinds = {{
    {FailureKind::kInvalidRequest, "invalid_request"},
    {FailureKind::kInapplicable, "inapplicable"},
    {FailureKind::kUnsupported, "unsupported"},
    {FailureKind::kMismatch, "mismatch"},
    {FailureKind::kOutOfMemory, "out_of_memory"},
    {FailureKind::kCuda, "cuda"},
    {FailureKind::kNccl, "nccl"},
    {FailureKind::kTimeout, "timeout"},
    {FailureKind::kCancelled, "cancelled"},
    {FailureKind::kPolluted, "polluted"},
    {FailureKind::kInternal, "internal"},
}};

}  // namespace

std::string_view ToString(FailureKind kind) {
  for (const auto& [value, word] : kKinds) {
    if (value == kind) return word;
  }
  return "internal";
}

std::optional<FailureKind> ParseFailureKind(std::string_view word) {
  for (const auto& [value, known] : kKinds) {
    if (known == word) return value;
  }
  return std::nullopt;
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
