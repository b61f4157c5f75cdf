// The answer to a passed deadline: where each rank is, from its streams' marks and its threads' stacks.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "protocol/response.h"

namespace cppool::daemon {

enum class RankPhase {
  kWaiting,  // for the ranks to be clean
  kRunning,
  kReady,  // waiting for the other ranks before its first iteration
  kEnding,
  kDone
};

// The state of a rank that may be stuck, read from another thread.
struct RankSnapshot {
  RankPhase phase = RankPhase::kWaiting;
  std::string error;  // of its failure; empty: it has not failed
  std::vector<kernels::StreamProgress> streams;
  std::vector<int> awaits = {};  // of a rank that is ready: the ranks that are not
};

// One line on where a rank is: "forward/p2p step 2 of 4, waiting for recv from rank 0, 4.98 s". A stream that waits for another stream
// of the rank is described together with it.
std::string DescribeProgress(const std::vector<kernels::StreamProgress>& streams);

// The stage of the first stream, the main one first, that has work in a stage; else of the first that has been in one.
std::string StageOf(const std::vector<kernels::StreamProgress>& streams);

// The innermost frames of a thread that may be stuck: "poll [libc.so.6] < Load [mine.so]"; empty where they cannot be had. The text is
// there within 0.35 s.
std::string PlaceOfThread(pid_t thread) noexcept;

// A fatal result of kind `timeout`. Its rank is the one that the others wait for, where it is known. `threads` are the ranks' threads.
// `snapshot` is called for every rank on a thread of its own: one that gets stuck is left behind, and the result is there within 0.35 s.
protocol::RunResult TimeoutReport(const std::vector<pid_t>& threads,
                                  const std::function<RankSnapshot(int rank)>& snapshot,
                                  std::chrono::milliseconds deadline) noexcept;

}  // namespace cppool::daemon
