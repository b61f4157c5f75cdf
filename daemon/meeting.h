// Where the ranks of a run meet: what they decide together, and in what order they fail.
#pragma once

#include <cppool/runtime.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/sampling.h"
#include "kernels/backend.h"
#include "protocol/run_control.h"

namespace cppool::daemon {

// Called on the ranks' threads. The waits have no limit of their own: a rank that does not come is a matter
// of the deadline.
class Meeting {
 public:
  virtual ~Meeting() = default;

  // A rank has its clean state, or cannot have it. Waits for all ranks; true: all are clean, and may
  // communicate.
  virtual bool Begin(int rank, bool clean) = 0;

  struct Obstacle {
    int rank;  // which has failed before its first iteration
    cppool_status status;
  };
  // A rank has loaded and prepared. Waits until all have. Nothing: all of them begin; else none does, and all
  // get the same answer. A rank that cannot go on is then known before any collective is in flight, and
  // nothing must be aborted: after an abort NCCL's communicators cannot be used again.
  virtual std::optional<Obstacle> FirstIteration(int rank) = 0;
  // Any thread: the ranks that have not come to their first iteration and not left.
  virtual std::vector<int> NotReady() const = 0;

  // Before a rank's iteration `index`, from 0; what follows the last iteration counts as one more. False: the
  // run has been cancelled, and no rank begins this one. All ranks stop before the same iteration, so that
  // none communicates without the others.
  virtual bool MayBegin(std::int64_t index) = 0;

  // As Sampling's Start and Decide, of a run with `sampling`.
  virtual std::int64_t StartSampling() = 0;
  virtual std::int64_t NextDecision(const kernels::StageSamples& samples) = 0;

  // Around a rank's timed iterations. The profiler's range is from before any rank's first one to the end of
  // the last rank's last one.
  virtual void Profile(bool begin) = 0;

  struct FailureTime {
    int order;  // among the failures of all ranks, from 1
    bool after_abort;
  };
  // A rank has failed. Call it before anything else that takes time.
  virtual FailureTime Failed() = 0;

  // A rank has returned from the case with `status`: the others do not wait for it any more. With CPPOOL_OK
  // and CPPOOL_MISMATCH they begin their first iteration.
  virtual void Leave(int rank, cppool_status status) = 0;
};

// Ranks meet here when all are threads of this process.
class MemoryMeeting : public Meeting {
 public:
  // `profile` begins and ends the profiler's range. `control`: of the run.
  MemoryMeeting(int ranks, const std::optional<SamplingRule>& sampling,
                std::function<void(bool begin)> profile,
                std::shared_ptr<protocol::RunControl> control = std::make_shared<protocol::RunControl>());

  bool Begin(int rank, bool clean) override;
  std::optional<Obstacle> FirstIteration(int rank) override;
  std::vector<int> NotReady() const override;
  bool MayBegin(std::int64_t index) override { return control_->MayBegin(index); }
  std::int64_t StartSampling() override { return sampling_->Start(); }
  std::int64_t NextDecision(const kernels::StageSamples& samples) override {
    return sampling_->Decide(samples);
  }
  void Profile(bool begin) override;
  FailureTime Failed() override { return {++failures_, aborted_}; }
  void Leave(int rank, cppool_status status) override;

  // For who runs the case. What fails from here on probably fails because of the abort.
  void Abort() { aborted_ = true; }
  // Once no rank goes on: ends a range that a failed rank has left open.
  void EndProfile();
  // After the run, as Sampling's; empty without `sampling`.
  std::string stopped() const { return sampling_ ? sampling_->stopped() : ""; }

 private:
  const int ranks_;
  const std::shared_ptr<protocol::RunControl> control_;
  std::latch begun_;
  std::atomic<bool> unclean_{false};
  std::optional<Sampling> sampling_;
  std::atomic<int> failures_{0};
  std::atomic<bool> aborted_{false};

  const std::function<void(bool begin)> profile_;
  std::once_flag profile_begins_;
  std::atomic<bool> profile_begun_{false};
  std::atomic<int> profiles_ended_{0};  // ranks

  mutable std::mutex mutex_;  // for the first iteration
  std::condition_variable met_;
  std::vector<bool> here_;  // has come, or has left
  bool decided_ = false;
  std::optional<Obstacle> obstacle_;  // why no rank begins its first iteration
};

}  // namespace cppool::daemon
