// When to stop timing: decided for all ranks at once, so that none iterates without the others.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>

#include "kernels/backend.h"

namespace cppool::daemon {

struct SamplingRule {
  double precision = 0;  // see base::MedianPrecision
  std::chrono::milliseconds most_time{0};
  std::int64_t most_iterations = 0;
};

// The slowest rank's time counts for each iteration. The run is over when the median of every stage is
// precise enough, or at a limit. Decisions are after 1, 6, 8, 12, 16, 24, 32, 48, ... iterations, earlier
// where the time would run out. Shared by the ranks' threads.
class Sampling {
 public:
  using Clock = std::chrono::steady_clock;

  Sampling(const SamplingRule& rule, int ranks);

  // Before a rank's first timed iteration: the time counts from the first call. Returns the number of
  // iterations at the first decision.
  std::int64_t Start();

  // A rank has timed the iterations up to the last decision: `samples` are all of its times so far. Waits for
  // the other ranks' calls, without a limit of its own: a rank that does not come is a matter of the
  // deadline. Returns the number of iterations at the next decision; the same as before: stop.
  std::int64_t Decide(const kernels::StageSamples& samples);

  // A rank has returned from the case: the others do not wait for it, and stop.
  void Leave();

  // After the run, "precision", "max_ms" or "repeat"; empty when no decision has ended it.
  std::string stopped() const;

 private:
  void Merge(const kernels::StageSamples& samples);
  void Conclude();  // all ranks have come, or one has left
  bool IsPrecise() const;

  const SamplingRule rule_;
  const int ranks_;

  mutable std::mutex mutex_;
  std::condition_variable decided_;
  Clock::time_point start_ = Clock::time_point::max();
  std::int64_t until_ = 1;  // the iterations at the next decision
  int come_ = 0;
  bool left_ = false;
  std::uint64_t decisions_ = 0;
  kernels::StageSamples slowest_;  // among the ranks that have come to the next decision
  std::string stopped_;
};

}  // namespace cppool::daemon
