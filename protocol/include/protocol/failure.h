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
  kUnsupported,
  kMismatch,
  kOutOfMemory,
  kCuda,
  kNccl,
  kTimeout,
  kInternal
};

std::string_view ToString(FailureKind kind);  // "invalid_request", ...
std::optional<FailureKind> ParseFailureKind(std::string_view word);

struct Failure {
  FailureKind kind = FailureKind::kInternal;
  std::optional<int> rank;  // absent (null in JSON) when no single rank failed
  std::string stage;        // empty (null in JSON) when unknown
  std::string detail;
};

Json ToJson(const Failure& failure);

}  // namespace cppool::protocol
