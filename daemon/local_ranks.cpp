#include "daemon/local_ranks.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "daemon/ask_all.h"
#include "daemon/log.h"
#include "daemon/rank_output.h"
#include "daemon/soundness.h"
#include "daemon/stack_sampler.h"
#include "daemon/timeout_report.h"
#include "kernels/error.h"
#include "kernels/float_environment.h"

namespace cppool::daemon {
namespace {

using Clock = RankReports::Clock;

constexpr const char* kRunCase = "run case";  // on a rank's thread, in a trace

// From the call of Snapshots on: the reading of a stuck rank may get stuck.
constexpr std::chrono::milliseconds kReadLimit{150};

// The threads whose stacks are worth showing: the rank's own, and those that run a case's function on a
// stream.
std::vector<pid_t> ThreadsOf(const RankReport& report, pid_t own) {
  if (IsDone(report)) return {};
  std::vector<pid_t> threads = {own};
  for (const auto& stream : report.streams) {
    if (!stream.idle && stream.doing.empty() && stream.behind.empty() && stream.thread > 0)
      threads.push_back(stream.thread);
  }
  return threads;
}

// `own`: the threads of the ranks.
void AddStacks(std::vector<RankReport>& reports, const std::vector<pid_t>& own, Clock::time_point start) {
  std::vector<pid_t> all;
  std::vector<std::size_t> owner;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    for (const pid_t thread : ThreadsOf(reports[i], own[i])) {
      all.push_back(thread);
      owner.push_back(i);
    }
  }
  const auto stacks = SampleStacksInTime(all, start);
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto& of_rank = reports[owner[i]].stacks;
    if (stacks)
      of_rank.push_back((*stacks)[i]);
    else if (of_rank.empty())
      of_rank.push_back({"(no stack: the names of its functions were not found in time)"});
  }
}

}  // namespace

LocalRanks::LocalRanks(World& world, std::shared_ptr<const PreparedRun> prepared, std::string tag)
    : world_(world),
      prepared_(std::move(prepared)),
      tag_(std::move(tag)),
      snapshots_(static_cast<std::size_t>(world.place().ranks)) {
  for (int i = 0; i < place().ranks; ++i) {
    ranks_.push_back(std::make_unique<Rank>());
    ranks_.back()->report.rank = place().first + i;
    ranks_.back()->report.phase = RankPhase::kWaiting;
  }
}

void LocalRanks::Start(std::shared_ptr<Meeting> meeting, Sink sink) {
  meeting_ = std::move(meeting);
  sink_ = std::move(sink);
  world_.threads().Start([self = shared_from_this()](int rank) { self->RunRank(rank); });
}

void LocalRanks::StartProbe(std::shared_ptr<Meeting> meeting, std::uint64_t round, Sink sink) {
  world_.threads().Start(
      [&world = world_, meeting = std::move(meeting), round, sink = std::move(sink)](int rank) {
        const LogTags tags(rank, "");
        ProbeRank(world.rank(rank), rank, *meeting, round, sink);
      });
}

template <typename Function>
bool LocalRanks::Attempt(int index, Function&& function) {
  try {
    function();
    return true;
  } catch (const kernels::RuntimeError& error) {
    Fail(index, {error.status(), error.what(), error.culprit()});
  } catch (const std::exception& error) {
    Fail(index, {CPPOOL_INTERNAL, error.what()});
  }
  return false;
}

void LocalRanks::RunRank(int index) {
  const LogTags tags(index, tag_);
  Rank& rank = At(index);
  kernels::RankRuntime& runtime = world_.rank(index);
  std::vector<HostSlice>* const host = prepared_->options.trace.empty() ? nullptr : &rank.host;
  const bool clean = Attempt(index, [&] {
    const HostScope scope(host, "begin case");
    runtime.BeginCase();
    if (host) runtime.BeginTrace(kMostTraceSlices);
    if (prepared_->options.perturb) runtime.Perturb(*prepared_->options.perturb);
  });
  bool all_clean = false;
  {
    const HostScope scope(host, "wait for all ranks");
    all_clean = meeting_->Begin(index, clean);
  }
  if (all_clean) {
    const HostScope scope(host, kRunCase);
    SetPhase(index, RankPhase::kRunning);
    RunCase(index);
  } else {
    Fail(index, {CPPOOL_INTERNAL, "not started, since another rank could not begin",
                 kernels::RuntimeError::kElsewhere});
  }
  EndRank(index);
}

void LocalRanks::EndRank(int index) {
  Rank& rank = At(index);
  kernels::RankRuntime& runtime = world_.rank(index);
  // The calls of an open group have not been made, and would meet those of the next case. A rank that failed
  // between group_start and group_end has already reported why.
  const bool group_left_open = runtime.InGroup();
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    rank.report.needs_probe = group_left_open;
    failed = rank.report.failure.origin != FailureOrigin::kNone;
  }
  if (group_left_open && !failed)
    Fail(index, {CPPOOL_INTERNAL, "the case left a group of calls open (group_start without group_end)"});
  SetPhase(index, RankPhase::kEnding);
  kernels::LiveMemory leaks;
  kernels::StageTimes times;
  const bool ended = Attempt(index, [&] {
    const HostScope scope(prepared_->options.trace.empty() ? nullptr : &rank.host, "end case");
    if (InOrder(index))
      leaks = runtime.Live();  // after a failure, memory is left to the streams that may still use it
    times = runtime.EndCase();
  });
  if (!prepared_->options.trace.empty()) TakeTrace(index);
  EndLines(index);
  if (InOrder(index))
    world_.backend().Finished(index);  // the ranks that wait for a failed one are released by Abort instead
  RankReport report;
  {
    const std::lock_guard lock(mutex_);
    rank.report.phase = RankPhase::kDone;
    rank.report.needs_probe = rank.report.needs_probe || !ended;
    rank.report.leaks = leaks;
    rank.report.times = std::move(times);
    report = rank.report;
  }
  sink_(std::move(report));
}

void LocalRanks::TakeTrace(int index) {
  Rank& rank = At(index);
  Attempt(index, [&] {
    const HostScope scope(&rank.host, "take trace");
    rank.trace = world_.rank(index).TakeTrace();
  });
  // The rank's thread has enqueued nothing of the case after it returned.
  for (const HostSlice& run : rank.host) {
    if (run.name != kRunCase) continue;
    for (kernels::TraceSlice& slice : rank.trace.slices) {
      if (slice.kind == kernels::TraceSlice::Kind::kCall && slice.begin_ns <= run.end_ns)
        slice.end_ns = std::min(slice.end_ns, run.end_ns);
    }
  }
}

void LocalRanks::MoveTrace(RunTrace& trace) {
  for (std::size_t i = 0; i < ranks_.size(); ++i)
    trace.ranks.push_back(
        {world_.devices().at(i).name, "", std::move(ranks_[i]->host), std::move(ranks_[i]->trace)});
}

bool LocalRanks::InOrder(int index) const {
  const std::lock_guard lock(mutex_);
  const FailureOrigin origin = At(index).report.failure.origin;
  return origin == FailureOrigin::kNone || origin == FailureOrigin::kMismatch;
}

void LocalRanks::SetPhase(int index, RankPhase phase) {
  const std::lock_guard lock(mutex_);
  At(index).report.phase = phase;
}

void LocalRanks::RunCase(int index) {
  Rank& rank = At(index);
  CaseFailure failure;
  try {
    CaseContext& context = rank.context.emplace(*prepared_, world_.rank(index), *meeting_);
    context.before_iterations = [this, index] { return BeginIterations(index); };
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
  if (rank.context) {
    const std::lock_guard lock(mutex_);
    rank.report.checks = std::move(rank.context->checks);
    rank.report.samples = std::move(rank.context->samples);
    rank.report.work = std::move(rank.context->work);
    rank.report.extra = std::move(rank.context->extra);
  }
  if (failure.status != CPPOOL_OK) Fail(index, failure);
  meeting_->Leave(index, failure.status);
}

CaseFailure LocalRanks::BeginIterations(int index) {
  SetPhase(index, RankPhase::kReady);
  const auto obstacle = meeting_->FirstIteration(index);
  SetPhase(index, RankPhase::kRunning);
  if (!obstacle) return {};
  // The status of the rank that has failed: where that one is skipped, so is this one.
  return {
      obstacle->status,
      "no iteration was begun, since rank " + std::to_string(obstacle->rank) + " failed before its first one",
      obstacle->rank};
}

void LocalRanks::Fail(int index, const CaseFailure& failure) {
  const Meeting::FailureTime now = meeting_->Failed();
  const kernels::RankRuntime& runtime = world_.rank(index);
  const auto marked = runtime.FailedInStage();
  const RankFailure found{failure, marked ? *marked : StageOf(runtime.Progress()),
                          OriginOf(failure, now.after_abort), now.order};
  RankReport report;
  {
    const std::lock_guard lock(mutex_);
    Rank& rank = At(index);
    if (found.origin >= rank.report.failure.origin) return;  // the first of equal failures counts
    rank.report.failure = found;
    report = rank.report;
  }
  sink_(std::move(report));
  Log(failure.status == CPPOOL_CANCELLED ? LogLevel::kInfo : LogLevel::kWarning, failure.text);
}

RankReport LocalRanks::Snapshot(int index) const {
  // First, since it may take long: what the rank has reported meanwhile counts.
  std::vector<kernels::StreamProgress> streams = world_.rank(index).Progress();
  RankReport now;
  {
    const std::lock_guard lock(mutex_);
    now = At(index).report;
  }
  if (now.phase == RankPhase::kReady) now.awaits = meeting_->NotReady();
  now.streams = std::move(streams);
  return now;
}

std::vector<RankReport> LocalRanks::Snapshots(bool stacks) const {
  const auto start = Clock::now();
  const int first = place().first;
  const auto read = snapshots_.Ask([self = shared_from_this(), first](
                                       std::size_t i) { return self->Snapshot(first + static_cast<int>(i)); },
                                   start + kReadLimit);
  std::vector<RankReport> reports(read.size());
  for (std::size_t i = 0; i < reports.size(); ++i) {
    if (read[i])
      reports[i] = *read[i];
    else
      reports[i].rank = first + static_cast<int>(i);
  }
  try {
    if (stacks) AddStacks(reports, world_.threads().ids(), start);
  } catch (const std::exception&) {  // the reports have what there is
  }
  return reports;
}

CrashPlace LocalRanks::PlaceOf(pid_t thread) const {
  CrashPlace crashed;
  const std::vector<pid_t> ids = world_.threads().ids();
  const auto own = std::ranges::find(ids, thread);
  if (own != ids.end()) {
    crashed.rank = place().first + static_cast<int>(own - ids.begin());
    const auto& runtime = world_.rank(*crashed.rank);
    const auto marked = runtime.FailedInStage();  // the thread is ahead of its streams
    crashed.stage = marked && !marked->empty() ? *marked : StageOf(runtime.Progress());
    return crashed;
  }
  for (int rank = place().first; rank < place().first + place().ranks; ++rank) {
    for (const auto& stream : world_.rank(rank).Progress()) {
      if (stream.thread != thread) continue;
      crashed.rank = rank;
      crashed.stage = stream.stage;
      return crashed;
    }
  }
  return crashed;
}

}  // namespace cppool::daemon
