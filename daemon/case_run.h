// One run of a case on all ranks of a world, wherever they are: starts them, releases those that wait for a
// failed one or do not stop when the run is cancelled, probes the world after an error, and has the reports
// judged.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/crash_reporter.h"
#include "daemon/meeting.h"
#include "daemon/prepare.h"
#include "daemon/rank_runner.h"
#include "daemon/trace_file.h"
#include "protocol/response.h"
#include "protocol/run_control.h"

namespace cppool::daemon {

// Limits after a rank has failed, or the run was cancelled: for the others to finish by themselves, then to
// return from an abort, then for the probe of the world (soundness.h); and before the abort, for those that
// have failed to report everything. The answer is there after at most their sum and a little.
struct FailureLimits {
  std::chrono::milliseconds grace{200};
  std::chrono::milliseconds abort{600};
  std::chrono::milliseconds probe{500};
  std::chrono::milliseconds report{0};
};

class CaseRun {
 public:
  CaseRun(RankRunners runners, std::shared_ptr<const PreparedRun> prepared,
          std::shared_ptr<protocol::RunControl> control, FailureLimits limits = {});

  // On the thread that starts jobs; the ranks must be idle. Returns when every rank has returned, or when one
  // has not returned within the limits: then the result is fatal. After an error the world is probed; the
  // result is fatal if it is not sound. Without a failure or a cancel it waits as long as the case takes: the
  // watchdog enforces the deadline, unless there is `until`: then it aborts the ranks, and returns where they
  // were; the result is fatal if one has not returned. `host`: receives the parts of this call, for a trace;
  // NULL: none was asked for.
  protocol::RunResult Execute(std::vector<HostSlice>* host = nullptr,
                              std::optional<RankReports::Clock::time_point> until = std::nullopt);

  std::vector<RankReport> Reports() const { return reports_->Get(); }  // after Execute, by rank

  // After Execute, of a run with `trace`: adds to `trace` what the ranks have recorded, and writes the file,
  // unless a rank has not returned. A run that passed, and cannot have its trace, is an error; others get a
  // warning.
  void SaveTrace(RunTrace& trace, protocol::RunResult& result);

  // Any thread, when the process has crashed on `thread`. May get stuck.
  CrashPlace PlaceOf(pid_t thread) const;

  // Any thread, also while a rank is stuck: the members of the answer to `status` on where each rank is; and
  // where rank 0 is, kUnknown once it could not be read.
  protocol::Json Where() const;
  RankReport FirstRank() const;

  // Any thread, while Execute is stuck: the answer to a passed deadline, with the place where each rank is.
  protocol::RunResult TimedOut(std::chrono::milliseconds deadline) const {
    return Late(WhereNow(), deadline);
  }

 private:
  // True: they had to be aborted. `late`: of a run whose time was over: where they were.
  bool WaitForRanks(RankReports::Clock::time_point until, std::optional<protocol::RunResult>& late);
  std::vector<RankReport> WhereNow() const;  // with stacks
  protocol::RunResult Late(const std::vector<RankReport>& ranks, std::chrono::milliseconds deadline) const;
  // The last reports: of ranks that are not done, where they are.
  std::vector<RankReport> Collect();

  const RankRunners runners_;
  const std::shared_ptr<const PreparedRun> prepared_;
  const std::shared_ptr<protocol::RunControl> control_;
  const FailureLimits limits_;
  // Shared with the ranks, of which some may never return.
  const std::shared_ptr<MemoryMeeting> meeting_;
  const std::shared_ptr<RankReports> reports_;
  bool all_done_ = false;  // after Execute
  mutable std::atomic<bool> first_is_stuck_{false};
};

}  // namespace cppool::daemon
