// The answer to a passed deadline: where each rank is, as its streams' marks and its threads' stacks tell.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "protocol/response.h"

namespace cppool::daemon {

enum class RankPhase { kWaiting, kRunning, kEnding, kDone };

// What a run knows about a rank that may be stuck.
struct RankNow {
  RankPhase phase = RankPhase::kWaiting;
  std::string error;  // it has failed; empty: it has not
  std::vector<kernels::StreamProgress> streams;
};

// One line on where a rank is, as its streams tell: "forward/p2p step 2 of 4, waiting for recv from rank 0, 4.98 s". A stream that
// waits for another one of the rank is told with that one.
std::string DescribeProgress(const std::vector<kernels::StreamProgress>& streams);

// The stage of the first stream that is in one and has work, the main one first; else of the first that has been in one.
std::string StageOf(const std::vector<kernels::StreamProgress>& streams);

// Fatal, of the kind `timeout`; its rank is the one that the others wait for, where that is known. `threads` are the ranks', and `look`
// is called for every rank, on threads of their own: what gets stuck is left behind, and the answer is here in 0.35 s all the same.
// Does not throw.
protocol::RunResult TimeoutReport(const std::vector<pid_t>& threads,
                                  const std::function<RankNow(int rank)>& look,
                                  std::chrono::milliseconds deadline) noexcept;

}  // namespace cppool::daemon
