// What the client's types are as JSON: in the C interface and in `cppool run --json`. Members that are not known are null or absent.
#pragma once

#include <cppool/pool_error.h>
#include <cppool/result.h>

namespace cppool::client {

Json Describe(const StartFailure& failure);  // protocol/schema/start.schema.json
Json Describe(const Crash& crash);           // {"error", "rank", "stage", "case", "library", "stack"}
Json Describe(const PoolError& error);       // of <cppool/client.h>, CPPOOL_CLIENT_NO_ANSWER

}  // namespace cppool::client
