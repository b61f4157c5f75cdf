// Writes the client's types as JSON, for the C interface and `cppool run --json`, and as text, and reads the
// daemon's answers. Members that are not known are null or absent.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <cppool/pool.h>

#include "protocol/failure.h"

namespace cppool::client {

Json Describe(const Crash& crash);      // {"error", "rank", "stage", "case", "library", "stack"}
Json Describe(const PoolError& error);  // as <cppool/client.h> has it at CPPOOL_CLIENT_NO_ANSWER
inline constexpr const char* kTailTitle = "the end of its stderr:";  // a line of what()
std::string WithoutTail(const PoolError& error);                     // what() without the tail of stderr
// What is answered for a request for which this was thrown.
protocol::Failure FailureOf(const PoolError& error);
// Sets "flaky" and "lost", a list of {"kind", "error", "stderr_tail", "crash" where it is known}, unless they
// are empty.
void AddLost(const std::string& flaky, const std::vector<LostAttempt>& lost, Json* json);

// Result::Describe() with this command.
std::string DescribeResult(const Result& result, const std::string& command);
// What a rank reports, without what failed first: the ranks that waited for it have that, too.
std::string ErrorOfRank(const Rank& rank, const Result& result);
// Whether the text is on one of its checks, which say more.
bool NamesFailedCheck(const std::string& error, const Result& result);

// All throw std::runtime_error that says which member of the daemon's answer is wrong.
Result ResultFromJson(Json json);
Result ValidationFromJson(Json json);  // reads {"ok": true, "runs": true}, or what `run` would answer
std::vector<std::string> FeaturesFromJson(const Json& hello);  // empty when `hello` has none

std::string Text(
    const Crash& crash);  // its error, and what that does not have of the stage, the library and the stack

// A line of PoolOptions::log that is one on a run's progress; else nothing.
std::optional<Json> ProgressOf(std::string_view line);

std::string FlakyAt(std::string_view end, int attempt);  // "flaky (passed at attempt 2)"
std::string FlakyOf(int failed, int of);                 // "flaky (failed 1 of 4)"

}  // namespace cppool::client
