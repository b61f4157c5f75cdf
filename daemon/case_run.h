// One run of a case on all ranks: starts it, watches it, releases ranks that wait for one that has failed, gathers what came of it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/case_context.h"
#include "daemon/prepare.h"
#include "daemon/timeout_report.h"
#include "daemon/world.h"
#include "protocol/response.h"

namespace cppool::daemon {

// After one rank has failed: how long the others may take to finish by themselves, and then to come back from an abort.
struct FailureLimits {
  std::chrono::milliseconds grace{200};
  std::chrono::milliseconds abort{5000};
};

class CaseRun : public std::enable_shared_from_this<CaseRun> {
 public:
  // `world` must outlive every thread that runs the case; `tag` names the request in log lines. Made by make_shared.
  CaseRun(World& world, std::shared_ptr<const PreparedRun> prepared, std::string tag,
          FailureLimits limits = {});

  // On the thread that starts jobs; the ranks must be idle. Returns when every rank has come back, or, with `fatal`, when one did not.
  // Without a failing rank it waits for as long as the case takes: the watchdog has the deadline.
  protocol::RunResult Execute();

  // How many allocations the case left behind, over all ranks. After Execute.
  std::size_t leaked_allocations() const { return leaked_; }

  // Any thread, while Execute is stuck: what a passed deadline answers, with where each rank is.
  protocol::RunResult TimedOut(std::chrono::milliseconds deadline) const;

 private:
  struct Rank {
    explicit Rank(const PreparedRun& run, kernels::RankRuntime& runtime) : context(run, runtime) {}
    CaseContext context;
    std::atomic<RankPhase> phase{RankPhase::kWaiting};
    // Written by the rank's thread, read by others only under `mutex_` once `failed` or the phase says so.
    cppool_status status = CPPOOL_OK;
    std::string error;
    std::string stage;  // where it was when it failed
    int order = 0;      // of the failures, from 1; 0: none
    kernels::StageTimes times;
  };

  void RunRank(int rank);
  void RunCase(int index);
  void Fail(int rank, cppool_status status, const std::string& error);
  bool WaitForRanks();
  protocol::RunResult Gather(bool all_back);
  void Judge(protocol::RunResult& result) const;
  const Rank* Cause() const;
  void AddTflops(protocol::RunResult& result) const;
  RankNow LookAt(int rank) const;  // may get stuck with the rank

  World& world_;
  const std::shared_ptr<const PreparedRun> prepared_;
  const std::string tag_;
  const FailureLimits limits_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::latch begun_;
  std::atomic<bool> begin_failed_{false};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int failures_ = 0;
  int errors_ = 0;  // failures that are no mismatch: others may wait for such a rank
  int done_ = 0;
  bool aborted_ = false;
  std::atomic<std::size_t> leaked_{0};
};
}  // namespace cppool::daemon
