// The kinds of failure, as the words of `failure.kind`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace cppool::protocol {

using Json = nlohmann::json;

enum class FailureKind {
  kInvalidRequest,
  kInapplicable,
  kUnsupported,
  kMismatch,
  kOutOfMemory,
  kCuda,
  kNccl,
  kTimeout,
  kCancelled,
  kPolluted,  // failed on used ranks, passed on fresh ones
  kInternal
};

std::string_view ToString(FailureKind kind);  // "invalid_request", ...
std::optional<FailureKind> ParseFailureKind(std::string_view word);

// Whether the request was meaningful and did nothing wrong: it is answered with `skipped`.
constexpr bool IsSkip(FailureKind kind) {
  return kind == FailureKind::kInapplicable || kind == FailureKind::kUnsupported;
}

struct Failure {
  FailureKind kind = FailureKind::kInternal;
  std::optional<int> rank;  // absent (null in JSON) when no single rank failed
  std::string stage;        // empty (null in JSON) when unknown
  std::string detail;
  std::string unknown_kind =
      {};                 // from a newer daemon: a word that FailureKind does not have, in place of `kind`
  std::string node = {};  // of the rank, where ranks are on several; empty: they are not, or it is not known
};

std::string_view KindOf(const Failure& failure);  // the word of its kind
Json ToJson(const Failure& failure);

}  // namespace cppool::protocol
