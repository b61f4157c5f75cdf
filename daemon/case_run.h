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
#include "kernels/error.h"
#include "protocol/response.h"

namespace cppool::daemon {

// After one rank has failed: how long the others may take to finish by themselves, then to come back from an abort, and how long a
// look at the world may take. Together the answer is there within a second, or hardly more when all of them run out.
struct FailureLimits {
  std::chrono::milliseconds grace{200};
  std::chrono::milliseconds abort{600};
  std::chrono::milliseconds look{500};
};

class CaseRun : public std::enable_shared_from_this<CaseRun> {
 public:
  // `world` must outlive every thread that runs the case; `tag` names the request in log lines. Made by make_shared.
  CaseRun(World& world, std::shared_ptr<const PreparedRun> prepared, std::string tag,
          FailureLimits limits = {});

  // On the thread that starts jobs; the ranks must be idle. Returns when every rank has come back, or, with `fatal`, when one did not.
  // After an error, with `fatal` also when the world is not sound any more.
  // Without a failing rank it waits for as long as the case takes: the watchdog has the deadline.
  protocol::RunResult Execute();

  // How many allocations the case left behind, over all ranks. After Execute.
  std::size_t leaked_allocations() const { return leaked_; }

  // Any thread, while Execute is stuck: what a passed deadline answers, with where each rank is.
  protocol::RunResult TimedOut(std::chrono::milliseconds deadline) const;

 private:
  // How well a failure explains those of the other ranks: the best first.
  enum class Standing {
    kOwn,          // an error of the rank's
    kUnsupported,  // it does not go on, and has not failed
    kIndirect,     // points at another rank, or is what a communicator says
    kMismatch,     // stops nobody
    kReleased,     // came after the release of the ranks, probably from it
    kNone
  };

  struct Rank {
    explicit Rank(const PreparedRun& run, kernels::RankRuntime& runtime) : context(run, runtime) {}
    CaseContext context;
    std::atomic<RankPhase> phase{RankPhase::kWaiting};
    // Its failure; the better explanation when there are two. Under `mutex_`.
    CaseFailure failure;
    std::string stage;  // where it was when it failed
    Standing standing = Standing::kNone;
    int order = 0;  // in which the ranks failed
    kernels::StageTimes times;
  };

  void RunRank(int rank);
  void RunCase(int index);
  void LookForOpenGroup(int index);
  bool InOrder(const Rank& rank) const;  // it has not failed; a check may have
  void Fail(int rank, const CaseFailure& failure);
  void WaitForRanks();
  protocol::RunResult Gather();
  bool NeedsLook() const;
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
  std::atomic<bool> group_left_open_{false};
  std::atomic<bool> end_failed_{false};  // whatever the rank had said before

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> failures_{0};
  int errors_ = 0;  // failures that are no mismatch: others may wait for such a rank
  int done_ = 0;
  bool aborted_ = false;
  std::atomic<std::size_t> leaked_{0};
};

}  // namespace cppool::daemon
