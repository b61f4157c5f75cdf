// What a Pool is asked for, as the request that its daemon is sent.
#pragma once

#include <cppool/pool.h>
#include "protocol/request.h"

namespace cppool::client {

// Throws std::invalid_argument for options out of range and for what JSON cannot say. Folders become absolute: the daemon's own is the one that
// this process had when it spawned it.
protocol::RunRequest ToRequest(const Json& params, const RunOptions& options);

}  // namespace cppool::client
