#include "daemon/case_run.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "base/file_cache.h"
#include "daemon/judge.h"
#include "daemon/log.h"
#include "daemon/soundness.h"
#include "daemon/timeout_report.h"

namespace cppool::daemon {
namespace {

using protocol::RunResult;

// For ranks to return from an abort at a passed deadline when a node does not answer: the client is told in
// time.
constexpr std::chrono::milliseconds kSilentLimit{500};

std::shared_ptr<MemoryMeeting> MakeMeeting(const RankRunners& runners, const PreparedRun& run,
                                           std::shared_ptr<protocol::RunControl> control) {
  std::optional<SamplingRule> rule;
  if (const auto& wanted = run.options.sampling)
    rule = SamplingRule{wanted->precision, wanted->limit, wanted->most};
  const std::vector<std::weak_ptr<RankRunner>> places(runners.begin(),
                                                      runners.end());  // they own the meeting
  const auto profile = [places](bool begin) {
    for (const auto& place : places)
      if (const auto runner = place.lock()) runner->Profile(begin);
  };
  return std::make_shared<MemoryMeeting>(RanksOf(runners), rule, profile, std::move(control));
}

}  // namespace

CaseRun::CaseRun(RankRunners runners, std::shared_ptr<const PreparedRun> prepared,
                 std::shared_ptr<protocol::RunControl> control, FailureLimits limits)
    : runners_(std::move(runners)),
      prepared_(std::move(prepared)),
      control_(std::move(control)),
      limits_(limits),
      meeting_(MakeMeeting(runners_, *prepared_, control_)),
      reports_(std::make_shared<RankReports>(RanksOf(runners_))) {}

RunResult CaseRun::Execute(std::vector<HostSlice>* host,
                           std::optional<RankReports::Clock::time_point> until) {
  bool aborted = false;
  std::optional<RunResult> late;
  {
    const HostScope scope(host, "run on all ranks");
    for (const auto& runner : runners_)
      runner->Start(meeting_, [reports = reports_](RankReport report) { reports->Take(std::move(report)); });
    control_->OnCancel([reports = reports_, runners = runners_] {
      for (const auto& runner : runners) runner->Cancel();
      reports->Interrupt();
    });
    aborted = WaitForRanks(until.value_or(RankReports::Clock::time_point::max()), late);
    control_->OnCancel({});
  }
  const HostScope scope(host, "gather the answer");
  const std::vector<RankReport> reports = Collect();
  meeting_->EndProfile();
  std::string unsound;
  if (all_done_) {
    for (const auto& runner : runners_) runner->Wait();  // short: all ranks have reported
    if (NeedsProbe(reports, aborted)) unsound = FindUnsound(runners_, limits_.probe);
  }
  if (late) {
    late->fatal = !all_done_;
    return *late;
  }
  RunResult result = Judge(*prepared_, reports, meeting_->stopped(), unsound);
  for (std::size_t i = prepared_->warnings.size(); i < result.warnings.size(); ++i)
    Log(LogLevel::kWarning, "case '" + prepared_->registered.name + "': " + result.warnings[i]);
  return result;
}

bool CaseRun::WaitForRanks(RankReports::Clock::time_point until, std::optional<RunResult>& late) {
  using Clock = RankReports::Clock;
  if (reports_->WaitForEnd(until)) return false;
  auto abort_limit = limits_.abort;
  if (!reports_->interrupted()) {
    const std::vector<RankReport> ranks = WhereNow();
    late = Late(ranks, prepared_->options.deadline);
    if (!SilentNode(ranks).empty()) abort_limit = std::min(abort_limit, kSilentLimit);
  } else {
    if (reports_->WaitUntil(Clock::now() + limits_.grace)) return false;
    // A skip must hide no failure of another rank, which may come a little later.
    const std::vector<RankReport> reports = reports_->Get();
    const RankReport* const cause = Cause(reports);
    const auto limit = Clock::now() + limits_.report;
    if (cause && cause->failure.origin == FailureOrigin::kSkip) {
      if (reports_->WaitUntil(limit)) return false;
    } else {
      reports_->WaitForFailed(limit);
    }
  }
  const std::vector<RankReport> reports = reports_->Get();
  const RankReport* cause = Cause(reports);
  meeting_->Abort();
  for (const auto& runner : runners_)
    runner->Abort(cause  ? "rank " + std::to_string(cause->rank) + " failed first: " + cause->failure.text
                  : late ? "the deadline has passed"
                         : "the request was cancelled");
  reports_->WaitUntil(Clock::now() + abort_limit);
  return true;
}

std::vector<RankReport> CaseRun::Collect() {
  std::vector<RankReport> reports = reports_->Get();
  const auto all_done = [&] { return std::ranges::all_of(reports, IsDone); };
  if (!all_done()) {
    const std::vector<RankReport> now = SnapshotsOf(runners_, false);
    for (std::size_t i = 0; i < reports.size(); ++i) {
      if (IsDone(reports[i])) continue;
      if (now[i].phase != RankPhase::kUnknown)
        reports[i] = now[i];
      else
        reports[i].phase = RankPhase::kUnknown;  // with the failure that it has reported
    }
  }
  all_done_ = all_done();
  return reports;
}

void CaseRun::SaveTrace(RunTrace& trace, RunResult& result) {
  if (!all_done_) return;  // a rank still writes to its part; the answer is fatal
  for (const auto& runner : runners_) runner->MoveTrace(trace);
  std::string why;
  try {
    WriteTrace(prepared_->options.trace, trace);
    if (std::string lacks = DescribeDropped(trace); !lacks.empty())
      result.warnings.push_back(std::move(lacks));
    return;
  } catch (const base::FileError& error) {
    why = std::string("trace: ") + error.what();
  }
  Log(LogLevel::kWarning, why);
  if (result.status != protocol::Status::kPassed) return result.warnings.push_back(std::move(why));
  result.status = protocol::Status::kError;
  result.error = why;
  result.failure = protocol::Failure{protocol::FailureKind::kInternal, std::nullopt, "", why};
}

CrashPlace CaseRun::PlaceOf(pid_t thread) const {
  CrashPlace place;
  for (const auto& runner : runners_) {
    place = runner->PlaceOf(thread);
    if (place.rank) break;
  }
  place.library = prepared_->registered.library;
  return place;
}

protocol::Json CaseRun::Where() const { return WhereRanksAre(SnapshotsOf(runners_, false)); }

// Asked often: it does not wait a second time for a rank that could not be read.
RankReport CaseRun::FirstRank() const {
  if (first_is_stuck_) return {};
  RankReport first = SnapshotsOf({runners_.front()}, false).front();
  first_is_stuck_ = first.phase == RankPhase::kUnknown;
  return first;
}

std::vector<RankReport> CaseRun::WhereNow() const {
  std::vector<RankReport> ranks = SnapshotsOf(runners_, true);
  const std::vector<RankReport> reported = reports_->Get();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].phase != RankPhase::kUnknown) continue;
    // It did not say in time; what it has reported holds.
    if (IsDone(reported[i]))
      ranks[i] = reported[i];
    else
      ranks[i].failure = reported[i].failure;
  }
  return ranks;
}

RunResult CaseRun::Late(const std::vector<RankReport>& ranks, std::chrono::milliseconds deadline) const {
  RunResult result = TimeoutReport(ranks, deadline);
  result.seed = prepared_->seed;
  result.kernels = prepared_->kernels;
  return result;
}

}  // namespace cppool::daemon
