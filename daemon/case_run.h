// One run of a case on all ranks: starts it, releases the ranks that wait for a failed one, and makes one answer of all reports.
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
#include "daemon/crash_reporter.h"
#include "daemon/first_iteration.h"
#include "daemon/prepare.h"
#include "daemon/sampling.h"
#include "daemon/timeout_report.h"
#include "daemon/trace_file.h"
#include "daemon/world.h"
#include "kernels/error.h"
#include "protocol/response.h"

namespace cppool::daemon {

// Limits after a rank has failed: for the others to finish by themselves, then to return from an abort, then for the probe of the
// world (soundness.h). The answer is there after at most their sum and a little.
struct FailureLimits {
  std::chrono::milliseconds grace{200};
  std::chrono::milliseconds abort{600};
  std::chrono::milliseconds probe{500};
};

class CaseRun : public std::enable_shared_from_this<CaseRun> {
 public:
  // `world` must outlive every thread that runs the case. `tag` names the request in log lines. Use make_shared.
  CaseRun(World& world, std::shared_ptr<const PreparedRun> prepared, std::string tag,
          FailureLimits limits = {});

  // On the thread that starts jobs; the ranks must be idle. Returns when every rank has returned, or when one has not returned within
  // the limits: then the result is fatal. After an error the world is probed; the result is fatal if it is not sound.
  // Without a failure it waits as long as the case takes: the watchdog enforces the deadline. `host`: receives the parts of
  // this call, for a trace; NULL: none was asked for.
  protocol::RunResult Execute(std::vector<HostSlice>* host = nullptr);

  // After Execute, of a run with `trace`: moves what the ranks have recorded to `trace`. False: a rank has not returned.
  bool MoveTrace(RunTrace& trace);

  // Any thread, when the process has crashed on `thread`. May get stuck.
  CrashPlace PlaceOf(pid_t thread) const;

  // Any thread, while Execute is stuck: the answer to a passed deadline, with the place where each rank is.
  protocol::RunResult TimedOut(std::chrono::milliseconds deadline) const;

 private:
  // How well a failure explains the failures of other ranks, best first.
  enum class Standing {
    kOwn,       // caused by the rank itself
    kSkipped,   // inapplicable or unsupported: the rank stopped without an error
    kIndirect,  // caused by another rank, or reported by a communicator
    kMismatch,  // a check did not hold: no other rank is affected
    kReleased,  // came after the abort, so probably caused by it
    kNone       // no failure
  };

  struct Rank {
    Rank(const PreparedRun& run, kernels::RankRuntime& runtime, Sampling* sampling)
        : context(run, runtime, sampling) {}
    CaseContext context;
    std::atomic<RankPhase> phase{RankPhase::kWaiting};
    // Under `mutex_`: its failure; of two the better explanation.
    CaseFailure failure;
    std::string stage;  // in which it failed
    Standing standing = Standing::kNone;
    int order = 0;  // of the failure among all ranks' failures
    kernels::StageTimes times;
    kernels::LiveMemory left;     // at its end in order
    std::vector<HostSlice> host;  // with `trace`, as the next one
    kernels::RankTrace trace;
  };

  void Profile(bool begin);
  void RunRank(int rank);
  void RunCase(int index);
  CaseFailure BeginIterations(int index);
  void TakeTrace(int index);
  void CheckOpenGroup(int index);
  bool InOrder(const Rank& rank) const;  // no failure but a failed check
  void Fail(int rank, const CaseFailure& failure);
  void WaitForRanks();
  protocol::RunResult Gather();
  bool NeedsProbe() const;
  void Judge(protocol::RunResult& result) const;
  const Rank* Cause() const;
  void AddTflops(protocol::RunResult& result) const;
  RankSnapshot Snapshot(int rank) const;  // may block while the rank is stuck

  World& world_;
  const std::shared_ptr<const PreparedRun> prepared_;
  const std::string tag_;
  const FailureLimits limits_;
  std::optional<Sampling> sampling_;  // where the request asks for it
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::latch begun_;
  FirstIteration first_iteration_;
  std::atomic<bool> begin_failed_{false};
  std::atomic<bool> group_left_open_{false};
  std::atomic<bool> end_failed_{false};  // EndCase of a rank failed, after whatever failure

  std::once_flag profile_begins_;
  std::atomic<bool> profile_begun_{false};
  std::atomic<int> profiled_ended_{0};  // ranks

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> failures_{0};
  int errors_ = 0;  // failures other than a mismatch: other ranks may wait for that rank
  int done_ = 0;
  bool aborted_ = false;
};

}  // namespace cppool::daemon
