// Responses as types: what the daemon answers and the client reads. Members that a response does not have are
// left out of its JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/result.h>

#include "protocol/failure.h"

namespace cppool::protocol {

using cppool::Check;
using cppool::Leaks;
using cppool::Rank;
using cppool::Status;
using cppool::ToString;
std::optional<Status> ParseStatus(std::string_view word);

struct RunResult {
  Status status = Status::kError;
  std::string error;               // for people; empty when passed
  std::optional<Failure> failure;  // present when not passed
  bool fatal = false;              // the daemon exits right after this response
  std::vector<Rank> ranks;
  std::vector<Check> checks;
  std::vector<std::pair<std::string, double>> tflops;  // per GPU, by stage
  double wall_ms = 0;
  std::optional<std::uint64_t> seed;
  std::string respawn;  // why the daemon should be replaced after this answer; empty: it should not
  // With `sampling`, which of its limits ended it: "precision", "max_ms" or "repeat"; empty: without.
  std::string stopped;
  Json kernels;  // an object: the kernels that ran, "name", "version", "family"; null: the case has not named
                 // them
  std::vector<std::string> warnings;  // for people: what makes the result less than it seems
  Leaks leaks;
  // Of a case in Python. Why its ranks were replaced by fresh ones; empty: they were not. State that it has
  // changed, by group, as lists of names: what has been put back, and what could not be; null: none.
  std::string replaced;
  Json differed, left;
};

// {"ok": ..., "id": ..., "status": ...}. Without an id there is no such member; numbers that are not finite
// are null.
Json ToJson(const RunResult& result, const std::optional<Json>& id);
// Throws std::runtime_error with the path of a member that is missing or of the wrong type. Stages are in the
// order of their names.
RunResult RunResultFromJson(const Json& json);

// Throws std::runtime_error, as RunResultFromJson does, when a digest in `libraries` or `kernels` is none: a
// later request could not be sent with it.
void CheckDigests(const Json& response);

// A check's members, with `number` for those that may not be finite.
Json ToJson(const Check& check, Json (*number)(double));

// The answer to another operation: `members` with ok = true and the id.
Json OkResponse(Json members, const std::optional<Json>& id);
// A refused request: ok = false, status "error", error, failure.
Json ErrorResponse(const Failure& failure, const std::optional<Json>& id, bool fatal = false);
// Whether it is a list or an object of integers, as the index of a Worst.
bool IsIndex(const Json& index);
// Replaces the id; without one the answer has no such member.
void SetId(Json& answer, const std::optional<Json>& id);
bool FailedWith(const Json& answer, FailureKind kind);

// Sentinel, JSON, newline. Bytes in strings that are not UTF-8 are replaced.
std::string SerializeResponse(const Json& response, std::string_view sentinel);

}  // namespace cppool::protocol
