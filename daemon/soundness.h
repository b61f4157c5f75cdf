// Warm or fresh? Whether a world can run another case after one has failed, decided by looking.
#pragma once

#include <chrono>
#include <string>

#include "daemon/world.h"

namespace cppool::daemon {

// What is not sound any more ("rank 2: a sum over the world is wrong: ..."); empty when the next case may run. Starts communication
// anew, then on every rank: a clean state, known sums and messages in every group, a synchronised device without error, healthy
// communicators. The ranks must be idle. When something hangs this returns at `limit` all the same, with ranks that are stuck: end the
// process then.
std::string FindUnsound(World& world, std::chrono::milliseconds limit);

}  // namespace cppool::daemon
