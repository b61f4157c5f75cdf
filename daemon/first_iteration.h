// Where the ranks of a run meet before their first iteration: all of them have loaded and prepared by then, or none begins. A rank that
// cannot go on is then known before any collective is in flight, and nothing must be aborted: after an abort NCCL's communicators
// cannot be used again.
#pragma once

#include <cppool/runtime.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

namespace cppool::daemon {

// Shared by the ranks' threads.
class FirstIteration {
 public:
  explicit FirstIteration(int ranks);

  struct Obstacle {
    int rank;  // which has failed before its first iteration
    cppool_status status;
  };
  // On the thread of a rank that is ready. Waits for the other ranks, without a limit of its own: a rank that does not come is a
  // matter of the deadline. Nothing: all ranks begin. All ranks that wait get the same answer.
  std::optional<Obstacle> Meet(int rank);

  // A rank has returned from the case with `status`. The others do not wait for it any more; with CPPOOL_OK and CPPOOL_MISMATCH they
  // begin.
  void Leave(int rank, cppool_status status);

  // Any thread: the ranks that have not come and not left.
  std::vector<int> Missing() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable met_;
  std::vector<bool> here_;  // has come, or has left
  bool decided_ = false;
  std::optional<Obstacle> obstacle_;  // of the decision
};

}  // namespace cppool::daemon
