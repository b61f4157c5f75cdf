#include "daemon/case_run.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "daemon/failure_kind.h"
#include "daemon/log.h"
#include "daemon/rank_output.h"
#include "daemon/soundness.h"
#include "kernels/error.h"
#include "kernels/float_environment.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::RunResult;
using protocol::Status;

constexpr const char* kRunCase = "run case";  // on a rank's thread, in a trace

}  // namespace

CaseRun::CaseRun(World& world, std::shared_ptr<const PreparedRun> prepared, std::string tag,
                 FailureLimits limits)
    : world_(world),
      prepared_(std::move(prepared)),
      tag_(std::move(tag)),
      limits_(limits),
      begun_(world.size()),
      first_iteration_(world.size()) {
  if (const auto& wanted = prepared_->sampling) {
    sampling_.emplace(
        SamplingRule{wanted->precision, std::chrono::milliseconds(wanted->max_ms), prepared_->repeat},
        world.size());
  }
  for (int rank = 0; rank < world.size(); ++rank) {
    ranks_.push_back(std::make_unique<Rank>(*prepared_, world.rank(rank), sampling_ ? &*sampling_ : nullptr));
    ranks_.back()->context.before_iterations = [this, rank] { return BeginIterations(rank); };
    if (prepared_->profile)
      ranks_.back()->context.on_timed_iterations = [this](bool begin) { Profile(begin); };
  }
}

// The range is from before any rank's first timed iteration to the last rank's last one.
void CaseRun::Profile(bool begin) {
  if (begin) {
    std::call_once(profile_begins_, [this] {
      world_.backend().Profile(true);
      profile_begun_ = true;
    });
  } else if (++profiled_ended_ == world_.size()) {
    world_.backend().Profile(false);
  }
}

RunResult CaseRun::Execute(std::vector<HostSlice>* host) {
  {
    const HostScope scope(host, "run on all ranks");
    // The job owns a reference: a rank that never returns must not outlive this object.
    world_.threads().Start([self = shared_from_this()](int rank) { self->RunRank(rank); });
    WaitForRanks();
  }
  const HostScope scope(host, "gather the answer");
  return Gather();
}

void CaseRun::RunRank(int index) {
  const LogTags tags(index, tag_);
  Rank& rank = *ranks_[index];
  kernels::RankRuntime& runtime = world_.rank(index);
  std::vector<HostSlice>* const host = prepared_->trace.empty() ? nullptr : &rank.host;
  try {
    const HostScope scope(host, "begin case");
    runtime.BeginCase();
    if (host) runtime.BeginTrace(kMostTraceSlices);
    if (prepared_->perturb) runtime.Perturb(*prepared_->perturb);
  } catch (const kernels::RuntimeError& error) {
    begin_failed_ = true;
    Fail(index, {error.status(), error.what(), error.culprit()});
  } catch (const std::exception& error) {
    begin_failed_ = true;
    Fail(index, {CPPOOL_INTERNAL, error.what()});
  }
  {
    // No rank communicates before all are clean; the watchdog enforces the deadline.
    const HostScope scope(host, "wait for all ranks");
    begun_.arrive_and_wait();
  }
  if (!begin_failed_) {
    const HostScope scope(host, kRunCase);
    rank.phase = RankPhase::kRunning;
    RunCase(index);
  } else {
    Fail(index, {CPPOOL_INTERNAL, "not started, since another rank could not begin",
                 kernels::RuntimeError::kElsewhere});
  }
  CheckOpenGroup(index);
  rank.phase = RankPhase::kEnding;
  try {
    const HostScope scope(host, "end case");
    if (InOrder(rank))
      rank.left = runtime.Live();  // after a failure, memory is left to the streams that may still use it
    rank.times = runtime.EndCase();
  } catch (const kernels::RuntimeError& error) {
    end_failed_ = true;
    Fail(index, {error.status(), error.what(), error.culprit()});
  } catch (const std::exception& error) {
    end_failed_ = true;
    Fail(index, {CPPOOL_INTERNAL, error.what()});
  }
  if (host) TakeTrace(index);
  EndLines(index);
  if (InOrder(rank))
    world_.backend().Finished(index);  // the ranks that wait for a failed one are released by Abort instead
  const std::lock_guard lock(mutex_);
  rank.phase = RankPhase::kDone;
  ++done_;
  changed_.notify_all();
}

void CaseRun::TakeTrace(int index) {
  Rank& rank = *ranks_[index];
  try {
    const HostScope scope(&rank.host, "take trace");
    rank.trace = world_.rank(index).TakeTrace();
  } catch (const kernels::RuntimeError& error) {
    Fail(index, {error.status(), error.what(), error.culprit()});
  } catch (const std::exception& error) {
    Fail(index, {CPPOOL_INTERNAL, error.what()});
  }
  // The rank's thread has enqueued nothing of the case after it returned.
  for (const HostSlice& run : rank.host) {
    if (run.name != kRunCase) continue;
    for (kernels::TraceSlice& slice : rank.trace.slices) {
      if (slice.kind == kernels::TraceSlice::Kind::kCall && slice.begin_ns <= run.end_ns)
        slice.end_ns = std::min(slice.end_ns, run.end_ns);
    }
  }
}

bool CaseRun::MoveTrace(RunTrace& trace) {
  {
    const std::lock_guard lock(mutex_);
    if (done_ != world_.size()) return false;
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    trace.ranks.push_back(
        {world_.devices().at(i).name, std::move(ranks_[i]->host), std::move(ranks_[i]->trace)});
  }
  return true;
}

// The calls of an open group have not been made, and would meet those of the next case. A rank that failed between
// group_start and group_end has already reported why.
void CaseRun::CheckOpenGroup(int index) {
  if (!world_.rank(index).InGroup()) return;
  group_left_open_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (ranks_[index]->standing != Standing::kNone) return;
  }
  Fail(index, {CPPOOL_INTERNAL, "the case left a group of calls open (group_start without group_end)"});
}

bool CaseRun::InOrder(const Rank& rank) const {
  const std::lock_guard lock(mutex_);
  return rank.standing == Standing::kNone || rank.standing == Standing::kMismatch;
}

void CaseRun::RunCase(int index) {
  CaseContext& context = ranks_[index]->context;
  CaseFailure failure;
  try {
    const kernels::FloatEnvironment kept;
    failure = context.Outcome(prepared_->registered.definition->run(context.get()));
  } catch (const kernels::RuntimeError& thrown) {
    failure = {thrown.status(), thrown.what(), thrown.culprit()};
    if (failure.status == CPPOOL_OK) failure.status = CPPOOL_INTERNAL;
  } catch (const std::exception& thrown) {
    failure = {CPPOOL_INTERNAL, std::string("the case threw: ") + thrown.what()};
  } catch (...) {
    failure = {CPPOOL_INTERNAL, "the case threw something that is not a std::exception"};
  }
  if (failure.status != CPPOOL_OK) Fail(index, failure);
  first_iteration_.Leave(index, failure.status);
  if (sampling_) sampling_->Leave();
}

CaseFailure CaseRun::BeginIterations(int index) {
  ranks_[index]->phase = RankPhase::kReady;
  const auto obstacle = first_iteration_.Meet(index);
  ranks_[index]->phase = RankPhase::kRunning;
  if (!obstacle) return {};
  // The status of the rank that has failed: where that one is skipped, so is this one.
  return {
      obstacle->status,
      "no iteration was begun, since rank " + std::to_string(obstacle->rank) + " failed before its first one",
      obstacle->rank};
}

void CaseRun::Fail(int index, const CaseFailure& failure) {
  Rank& rank = *ranks_[index];
  const int order = ++failures_;  // before the steps below, which take time
  const kernels::RankRuntime& runtime = world_.rank(index);
  const auto marked = runtime.FailedInStage();
  const std::string stage = marked ? *marked : StageOf(runtime.Progress());
  {
    const std::lock_guard lock(mutex_);
    const bool indirect = failure.culprit != kernels::RuntimeError::kOwn || failure.status == CPPOOL_NCCL;
    const Standing standing = failure.status == CPPOOL_MISMATCH       ? Standing::kMismatch
                              : aborted_                              ? Standing::kReleased
                              : indirect                              ? Standing::kIndirect
                              : IsSkip(ToFailureKind(failure.status)) ? Standing::kSkipped
                                                                      : Standing::kOwn;
    if (standing >= rank.standing) return;  // of equals the first counts
    rank.failure = failure;
    rank.stage = stage;
    rank.standing = standing;
    rank.order = order;
    if (failure.status != CPPOOL_MISMATCH) ++errors_;
    changed_.notify_all();
  }
  Log(LogLevel::kWarning, failure.text);
}

void CaseRun::WaitForRanks() {
  std::unique_lock lock(mutex_);
  const auto all_done = [&] { return done_ == world_.size(); };
  changed_.wait(lock, [&] { return all_done() || errors_ > 0; });
  if (changed_.wait_for(lock, all_done() ? std::chrono::milliseconds(0) : limits_.grace, all_done)) return;
  const Rank* cause = Cause();
  const std::string reason =
      "rank " + std::to_string(cause->context.rank()) + " failed first: " + cause->failure.text;
  aborted_ = true;
  lock.unlock();
  world_.backend().Abort(reason);
  lock.lock();
  changed_.wait_for(lock, limits_.abort, all_done);
}

// The failure that explains the others. Under `mutex_`, or with all ranks done.
const CaseRun::Rank* CaseRun::Cause() const {
  const auto weight = [](const Rank& rank) { return std::pair(rank.standing, rank.order); };
  const Rank* cause = nullptr;
  for (const auto& rank : ranks_) {
    if (rank->standing != Standing::kNone && (!cause || weight(*rank) < weight(*cause))) cause = rank.get();
  }
  // A failure of the culprit that it names explains it better.
  if (cause && cause->failure.culprit >= 0 && cause->failure.culprit < world_.size()) {
    const Rank& culprit = *ranks_[cause->failure.culprit];
    if (culprit.standing <= Standing::kMismatch && culprit.failure.culprit < 0) cause = &culprit;
  }
  return cause;
}

// After a failed check or a skipped case the world is as before, provided that no group was left open and EndCase
// succeeded on every rank. After everything else it must be probed.
bool CaseRun::NeedsProbe() const {
  return aborted_ || group_left_open_ || end_failed_ ||
         std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
           return rank->failure.status != CPPOOL_OK && rank->failure.status != CPPOOL_MISMATCH &&
                  !IsSkip(ToFailureKind(rank->failure.status));
         });
}

RunResult CaseRun::Gather() {
  RunResult result;
  std::string unsound;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const Rank& rank = *ranks_[i];
      protocol::Rank entry;
      entry.rank = static_cast<int>(i);
      entry.error = rank.failure.text;
      if (rank.phase == RankPhase::kDone) {  // otherwise its thread may still write these
        entry.gpu_ms = rank.times;
        entry.samples = rank.context.samples;
        entry.extra = rank.context.extra;
        result.leaks.allocations += rank.left.allocations;
        result.leaks.device_bytes += rank.left.device_bytes;
        result.leaks.host_bytes += rank.left.host_bytes;
        const auto& checks = rank.context.checks;
        result.checks.insert(result.checks.end(), checks.begin(), checks.end());
        const auto failed =
            std::find_if(checks.begin(), checks.end(), [](const auto& check) { return !check.ok; });
        if (entry.error.empty() && failed != checks.end()) {
          entry.error = "the check of " + failed->tensor + " against " + failed->against + " does not hold";
        }
        entry.ok = entry.error.empty();
      } else if (entry.error.empty()) {
        entry.error = "did not return after another rank's failure: " +
                      DescribeProgress(world_.rank(entry.rank).Progress());
      } else {
        entry.error += " (and did not return)";
      }
      if (rank.phase != RankPhase::kDone) {
        unsound += (unsound.empty() ? "rank " : ", rank ") + std::to_string(i);
      }
      result.ranks.push_back(std::move(entry));
    }
    Judge(result);
  }
  if (profile_begun_ && profiled_ended_ < world_.size()) world_.backend().Profile(false);  // after a failure
  if (unsound.empty()) {      // otherwise a rank may still be adding to its work
    world_.threads().Wait();  // short: all ranks have reported
    AddTflops(result);
  }
  result.seed = prepared_->seed;
  result.kernels = prepared_->kernels;
  result.warnings = prepared_->warnings;
  if (sampling_) result.stopped = sampling_->stopped();
  if (result.status == Status::kPassed && prepared_->checks && result.checks.empty()) {
    result.warnings.push_back("no check was reported, so nothing was compared (\"checks\" is true)");
    Log(LogLevel::kWarning, "case '" + prepared_->registered.name + "': " + result.warnings.back());
  }
  if (!unsound.empty()) {
    unsound += " did not return";
  } else if (NeedsProbe()) {
    unsound = FindUnsound(world_, limits_.probe);
  }
  result.fatal = !unsound.empty();
  if (result.fatal) result.error += "; not sound afterwards: " + unsound;
  return result;
}

void CaseRun::Judge(RunResult& result) const {
  const Rank* cause = Cause();
  const auto failed_check =
      std::find_if(result.checks.begin(), result.checks.end(), [](const auto& check) { return !check.ok; });
  const int cause_rank = cause ? cause->context.rank() : -1;
  // A failed check explains more than the status that its rank returned; another rank's own error more than a check.
  if (failed_check != result.checks.end() &&
      (!cause || cause->failure.status == CPPOOL_MISMATCH || !cause->context.checks_hold())) {
    // Rather the words of the rank whose check it is.
    const Rank* reason = nullptr;
    for (const Rank* rank : {cause, static_cast<const Rank*>(ranks_[failed_check->rank].get())}) {
      if (rank && rank->failure.status == CPPOOL_MISMATCH && rank->context.gave_reason()) reason = rank;
    }
    char numbers[160];
    std::snprintf(numbers, sizeof(numbers), "max_abs_err %.4g, rel_err %.4g, tolerance %.4g",
                  failed_check->max_abs_err, failed_check->rel_err, failed_check->tolerance);
    const auto failed = std::count_if(result.checks.begin(), result.checks.end(),
                                      [](const auto& check) { return !check.ok; });
    result.status = Status::kFailed;
    result.error =
        "rank " + std::to_string(failed_check->rank) + ": " + failed_check->tensor + " against " +
        failed_check->against + ": " + numbers +
        (failed_check->max_abs_err <= failed_check->tolerance && !reason ? " (holds: see rel_err)" : "") +
        " (" + std::to_string(failed) + " of " + std::to_string(result.checks.size()) +
        " checks do not hold)";
    if (reason) result.error += ": " + reason->failure.text;
    result.failure = protocol::Failure{FailureKind::kMismatch, failed_check->rank, "", result.error};
  } else if (cause) {
    const FailureKind kind = ToFailureKind(cause->failure.status);
    result.status = kind == FailureKind::kMismatch ? Status::kFailed
                    : IsSkip(kind)                 ? Status::kSkipped
                                                   : Status::kError;
    const bool names_another = cause->failure.culprit >= 0;  // then its text names that rank
    result.error = names_another ? cause->failure.text
                                 : "rank " + std::to_string(cause_rank) + ": " + cause->failure.text;
    result.failure = protocol::Failure{kind, names_another ? cause->failure.culprit : cause_rank,
                                       cause->stage, cause->failure.text};
  } else {
    result.status = Status::kPassed;
  }
}

void CaseRun::AddTflops(RunResult& result) const {
  if (result.status != Status::kPassed && result.status != Status::kFailed) return;
  std::vector<std::pair<std::string, double>> total;  // floating-point operations of all ranks
  for (const auto& rank : ranks_) {
    for (const auto& [stage, flops] : rank->context.work) {
      const auto known = std::find_if(total.begin(), total.end(),
                                      [&name = stage](const auto& t) { return t.first == name; });
      if (known == total.end()) {
        total.emplace_back(stage, flops);
      } else {
        known->second += flops;
      }
    }
  }
  for (const auto& [stage, flops] : total) {
    double slowest_ms = 0;
    for (const auto& rank : ranks_) {
      for (const auto& [name, ms] : rank->times) {
        if (name == stage) slowest_ms = std::max(slowest_ms, ms);
      }
    }
    if (slowest_ms > 0)
      result.tflops.emplace_back(stage, flops / world_.size() / (slowest_ms * 1e-3) * 1e-12);
  }
}

RankSnapshot CaseRun::Snapshot(int index) const {
  RankSnapshot now;
  {
    const std::lock_guard lock(mutex_);
    now.phase = ranks_[index]->phase;
    now.error = ranks_[index]->failure.text;
  }
  if (now.phase == RankPhase::kReady) now.awaits = first_iteration_.Missing();
  now.streams = world_.rank(index).Progress();
  return now;
}

CrashPlace CaseRun::PlaceOf(pid_t thread) const {
  CrashPlace place;
  place.library = prepared_->registered.library;
  const std::vector<pid_t> ids = world_.threads().ids();
  const auto own = std::find(ids.begin(), ids.end(), thread);
  if (own != ids.end()) {
    place.rank = static_cast<int>(own - ids.begin());
    const auto& runtime = world_.rank(*place.rank);
    const auto marked = runtime.FailedInStage();  // the thread is ahead of its streams
    place.stage = marked && !marked->empty() ? *marked : StageOf(runtime.Progress());
    return place;
  }
  for (int rank = 0; rank < world_.size(); ++rank) {
    for (const auto& stream : world_.rank(rank).Progress()) {
      if (stream.thread != thread) continue;
      place.rank = rank;
      place.stage = stream.stage;
      return place;
    }
  }
  return place;
}

RunResult CaseRun::TimedOut(std::chrono::milliseconds deadline) const {
  RunResult result = TimeoutReport(
      world_.threads().ids(), [self = shared_from_this()](int rank) { return self->Snapshot(rank); },
      deadline);
  result.seed = prepared_->seed;
  result.kernels = prepared_->kernels;
  return result;
}

}  // namespace cppool::daemon
