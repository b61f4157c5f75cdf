// What runs a part of the ranks of a run, and the reports that come from it. No pointer into a rank leaves a
// runner: what others know of its ranks is in reports.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "daemon/crash_reporter.h"
#include "daemon/meeting.h"
#include "daemon/rank_report.h"
#include "daemon/trace_file.h"
#include "kernels/backend.h"

namespace cppool::daemon {

// The latest report of each rank of a world. Any thread.
class RankReports {
 public:
  using Clock = std::chrono::steady_clock;

  explicit RankReports(int ranks);

  void Take(RankReport report);
  // True: all ranks are done. False: one has failed, with anything but a check that does not hold, for which
  // no other rank waits; or Interrupt was called; or `limit` has come.
  bool WaitForEnd(Clock::time_point limit = Clock::time_point::max());
  bool interrupted() const;
  void Interrupt();
  bool WaitUntil(Clock::time_point limit);
  void WaitForFailed(Clock::time_point limit);  // until those that have failed are done
  std::vector<RankReport> Get() const;          // by rank

 private:
  bool AllDone() const;  // mutex_ held

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<RankReport> reports_;
  bool interrupted_ = false;  // by an error, too
};

// Runs one run's ranks. The thread that starts jobs calls all but Snapshots and PlaceOf.
class RankRunner {
 public:
  using Sink = std::function<void(RankReport)>;  // called on any thread, and does not throw

  virtual ~RankRunner() = default;
  virtual const kernels::Place& place() const = 0;

  // Starts the ranks, which must be idle, and returns. Each of them reports each of its failures at once, and
  // everything with kDone.
  virtual void Start(std::shared_ptr<Meeting> meeting, Sink sink) = 0;
  // The same for the probe (soundness.h), after Recover. A failure is what the rank has found wrong.
  virtual void StartProbe(std::shared_ptr<Meeting> meeting, std::uint64_t round, Sink sink) = 0;
  virtual void Recover(std::chrono::milliseconds limit) = 0;  // as Backend's
  virtual void Abort(const std::string& reason) = 0;          // likewise
  // Any thread: the run has been cancelled. Ranks that do not ask Meeting::MayBegin are asked to stop.
  virtual void Cancel() {}
  virtual void Profile(bool begin) = 0;  // likewise
  // After all reports have come: until the ranks are idle.
  virtual void Wait() = 0;

  // Any thread: where each of its ranks is, with stacks if they are asked for, within 0.35 s whatever the
  // ranks are stuck in. A rank that could not be read is kUnknown.
  virtual std::vector<RankReport> Snapshots(bool stacks) const = 0;
  // Any thread, when the process has crashed on `thread`. Nothing: the thread is none of these ranks'. May
  // get stuck.
  virtual CrashPlace PlaceOf(pid_t thread) const = 0;

  // After a run with `trace` in which all ranks are done: moves what they have recorded to `trace`.
  virtual void MoveTrace(RunTrace& trace) = 0;
};

using RankRunners = std::vector<std::shared_ptr<RankRunner>>;  // all ranks of a world, in their order

int RanksOf(const RankRunners& runners);

// All of Snapshots(), by rank: of a runner alone on this thread, so that nothing it has read is lost; of
// several on a thread each.
std::vector<RankReport> SnapshotsOf(const RankRunners& runners, bool stacks);

}  // namespace cppool::daemon
