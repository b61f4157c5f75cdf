// The probe: whether a world can run another case after one has failed.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "daemon/meeting.h"
#include "daemon/rank_runner.h"

namespace cppool::daemon {

// Probes the world. Returns what is wrong ("rank 2: a sum over the world communicator is wrong: ..."), or
// nothing when the next case may run. Restarts communication, then on every rank: makes the clean state,
// exchanges known sums and messages in every group, synchronises, and checks the communicators. The ranks
// must be idle. If something hangs it returns at `limit`: then ranks are stuck, and the process must end.
std::string FindUnsound(const RankRunners& runners, std::chrono::milliseconds limit);

// The part of one rank, on its thread. It reports what is wrong as soon as it is found. `round`: a new number
// for each probe.
void ProbeRank(kernels::RankRuntime& runtime, int rank, Meeting& meeting, std::uint64_t round,
               const RankRunner::Sink& sink);

}  // namespace cppool::daemon
