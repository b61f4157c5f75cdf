#include "daemon/machines/agent_runner.h"

#include <stdexcept>
#include <utility>

#include "kernels/error.h"

namespace cppool::daemon {
namespace {

using protocol::Json;
using Clock = AgentLink::Clock;

constexpr std::chrono::milliseconds kSnapshotLimit{350};
constexpr std::chrono::seconds kTraceLimit{10};

// The answer to a frame `meet`, which the rank waits for.
Json Meet(Meeting& meeting, int rank, const Json& frame) {
  const std::string what = frame.at("what");
  if (what == "begin") return meeting.Begin(rank, frame.at("clean"));
  if (what == "first_iteration") {
    const auto obstacle = meeting.FirstIteration(rank);
    return obstacle ? Json::array({obstacle->rank, static_cast<int>(obstacle->status)}) : Json();
  }
  if (what == "may_begin") return meeting.MayBegin(frame.at("index"));
  if (what == "start_sampling") return meeting.StartSampling();
  if (what == "next_decision") {
    kernels::StageSamples samples;
    for (const Json& stage : frame.at("samples"))
      samples.emplace_back(stage.at(0).get<std::string>(), stage.at(1).get<std::vector<double>>());
    return meeting.NextDecision(samples);
  }
  if (what == "profile") {
    meeting.Profile(frame.at("begin"));
    return true;
  }
  if (what == "failed") {
    const auto time = meeting.Failed();
    return Json::array({time.order, time.after_abort});
  }
  if (what == "leave") {
    meeting.Leave(rank, static_cast<cppool_status>(frame.at("status").get<int>()));
    return true;
  }
  throw std::runtime_error("it asked for " + what + ", which is nothing that ranks meet for");
}

}  // namespace

void AgentRunner::Start(std::shared_ptr<Meeting> meeting, Sink sink) {
  meeting_ = meeting;
  StartRanks({{"frame", "run"}}, number_, std::move(meeting), std::move(sink));
}

void AgentRunner::StartProbe(std::shared_ptr<Meeting> meeting, std::uint64_t round, Sink sink) {
  StartRanks({{"frame", "probe"}, {"round", round}}, number_ + 1, std::move(meeting), std::move(sink));
}

void AgentRunner::StartRanks(Json frame, std::uint64_t number, std::shared_ptr<Meeting> meeting, Sink sink) {
  agent_.BeginRun(number);
  frame["run"] = number;
  agent_.Send(frame);
  agent_.threads().Start([self = shared_from_this(), number, meeting = std::move(meeting),
                          sink = std::move(sink)](int rank) { self->Serve(rank, number, *meeting, sink); });
}

void AgentRunner::Serve(int rank, std::uint64_t number, Meeting& meeting, const Sink& sink) {
  bool begun = false;
  try {
    while (const auto frame = agent_.NextOf(rank)) {
      if (frame->at("frame") == "report") {
        RankReport report = RankReportFrom(frame->at("report"), place());
        if (report.rank != rank) throw std::runtime_error("a report is of another rank");
        report.node = agent_.node();
        const bool done = IsDone(report);
        sink(std::move(report));
        if (done) return;
        continue;
      }
      begun = begun || frame->at("what") == "begin";
      agent_.Send(
          {{"frame", "met"}, {"run", number}, {"rank", rank}, {"result", Meet(meeting, rank, *frame)}});
    }
  } catch (const std::exception&) {
    agent_.Shut();  // what it says cannot be trusted any more
  }
  RankReport lost = LostReport(rank, meeting);
  sink(lost);
  if (!begun) meeting.Begin(rank, false);
  meeting.Leave(rank, lost.failure.status);
  // The cause is told first: the grace for those that only felt it does not wait for the launcher.
  if (const auto launcher = agents_.launcher().Ended(Clock::now() + Agents::kLauncherTime))
    lost.failure.text += "; the launcher " + agents_.launcher().name() + " " + *launcher;
  lost.phase = RankPhase::kDone;
  lost.needs_probe = true;
  sink(std::move(lost));
}

RankReport AgentRunner::LostReport(int rank, Meeting& meeting) const {
  const Meeting::FailureTime now = meeting.Failed();
  RankReport report;
  report.rank = rank;
  report.node = agent_.node();
  report.phase = RankPhase::kRunning;
  report.failure.status = CPPOOL_INTERNAL;
  report.failure.order = now.order;
  report.failure.origin = now.after_abort ? FailureOrigin::kAfterAbort : FailureOrigin::kOwn;
  const auto crash = agent_.Crash();
  report.failure.text = "the process of " + agent_.Name() +
                        " is lost: " + (crash ? crash->value("text", "it crashed") : agent_.Gone());
  if (crash && crash->value("rank", Json()).is_number_integer()) {
    if (crash->at("rank") == rank)
      report.failure.stage = crash->value("stage", "");
    else
      report.failure.culprit = crash->at("rank"), report.failure.origin = FailureOrigin::kPropagated;
  }
  return report;
}

void AgentRunner::Recover(std::chrono::milliseconds limit) {
  const auto answer = agent_.Ask({{"frame", "recover"}, {"limit_ms", limit.count()}},
                                 Clock::now() + limit + Agents::kAnswerTime);
  if (!answer) throw std::runtime_error(agent_.Name() + " did not recover");
  if (const std::string error = answer->value("error", ""); !error.empty()) throw std::runtime_error(error);
}

void AgentRunner::Abort(const std::string& reason) { agent_.Send({{"frame", "abort"}, {"reason", reason}}); }

void AgentRunner::Profile(bool begin) { agent_.Send({{"frame", "profile"}, {"begin", begin}}); }

void AgentRunner::MoveTrace(RunTrace& trace) {
  for (int i = 0; i < place().ranks; ++i) {
    const auto answer =
        agent_.Ask({{"frame", "trace"}, {"rank", place().first + i}}, Clock::now() + kTraceLimit);
    if (!answer) agents_.ThrowLost(agent_, "has not sent its trace");
    if (!answer->contains("trace"))
      throw std::runtime_error(agent_.Name() + " has no trace: " + answer->value("error", ""));
    trace.ranks.push_back(TraceRankFrom(answer->at("trace")));
    trace.ranks.back().node = agent_.node();
  }
}

std::vector<RankReport> AgentRunner::Snapshots(bool stacks) const {
  std::vector<RankReport> reports(static_cast<std::size_t>(place().ranks));
  const auto answer = agent_.Ask({{"frame", "snapshot"}, {"stacks", stacks}}, Clock::now() + kSnapshotLimit);
  for (std::size_t i = 0; i < reports.size(); ++i) {
    try {
      if (answer) reports[i] = RankReportFrom(answer->at("reports").at(i), place());
    } catch (const std::exception&) {
      reports[i] = {};
    }
    reports[i].rank = place().first + static_cast<int>(i);
    reports[i].node = agent_.node();
    if (reports[i].phase == RankPhase::kReady && meeting_) reports[i].awaits = meeting_->NotReady();
  }
  return reports;
}

}  // namespace cppool::daemon
