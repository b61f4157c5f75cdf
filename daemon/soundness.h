// The probe: whether a world can run another case after one has failed.
#pragma once

#include <chrono>
#include <string>

#include "daemon/world.h"

namespace cppool::daemon {

// Probes the world. Returns what is wrong ("rank 2: a sum over the world communicator is wrong: ..."), or nothing when the next case may run.
// Restarts communication, then on every rank: makes the clean state, exchanges known sums and messages in every group, synchronises,
// and checks the communicators. The ranks must be idle. If something hangs it returns at `limit`: then ranks are stuck, and the process
// must end.
std::string FindUnsound(World& world, std::chrono::milliseconds limit);

}  // namespace cppool::daemon
