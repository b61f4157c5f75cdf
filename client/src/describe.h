// What the client's types are as JSON, in the C interface and in `cppool run --json`, and as text. Members that are not known are null
// or absent.
#pragma once

#include <string>

#include <cppool/pool.h>

namespace cppool::client {

Json Describe(const StartFailure& failure);  // protocol/schema/start.schema.json
Json Describe(const Crash& crash);           // {"error", "rank", "stage", "case", "library", "stack"}
Json Describe(const PoolError& error);       // of <cppool/client.h>, CPPOOL_CLIENT_NO_ANSWER
Json Describe(const LostAttempt& attempt);   // {"kind", "error", "stderr_tail", "crash" where it is known}

std::string Text(
    const Crash& crash);  // its error, and what that does not have of the stage, the library and the stack

std::string FlakyAt(Status status, int attempt);  // "flaky (passed at attempt 2)"
std::string FlakyOf(int failed, int of);          // "flaky (failed 1 of 4)"

}  // namespace cppool::client
