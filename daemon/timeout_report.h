// The answer to a passed deadline: where each rank is, as its streams' marks and its thread's stack tell.
#pragma once

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

// One line on where a rank is, as its streams' marks tell: "forward/p2p step 2 of 4, waiting for recv from rank 0, 4.98 s".
std::string DescribeProgress(const std::vector<kernels::StreamProgress>& streams);

// The stage of the stream that has work, the main one first.
std::string StageOf(const std::vector<kernels::StreamProgress>& streams);

// Fatal, of the kind `timeout`. `look` is called for every rank, on threads of their own: one that gets stuck is left behind, and the
// answer is here in 0.3 s all the same.
protocol::RunResult TimeoutReport(int ranks, const std::function<RankNow(int rank)>& look,
                                  std::chrono::milliseconds deadline);

}  // namespace cppool::daemon
