#include "daemon/process_runner.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

#include "daemon/log.h"
#include "daemon/process_frames.h"
#include "daemon/timeout_report.h"
#include "kernels/error.h"
#include "kernels/group_shape.h"

namespace cppool::daemon {
namespace {

using protocol::Json;
using Clock = RankProcess::Clock;

// Of Snapshots, 0.65 s with RankServer's kSignalLimit: for the answer of a rank, and of a machine that is
// busy.
constexpr std::chrono::milliseconds kAskLimit{300}, kWayLimit{200};
constexpr std::size_t kMostOfName = 1000;  // characters of a name in an error

Collective LastIn(const std::string& group, const std::vector<Collective>& collectives) {
  const auto found =
      std::ranges::find_if(collectives, [&](const Collective& each) { return each.group == group; });
  return found == collectives.end() ? Collective() : *found;
}

// Whether it may wait for the rank: for every one where its members are not known.
bool MayWaitFor(const Collective& collective, std::size_t rank) {
  return collective.ranks.empty() ||
         std::ranges::find(collective.ranks, static_cast<std::int64_t>(rank)) != collective.ranks.end();
}

}  // namespace

ProcessRunner::ProcessRunner(RankThreads& threads, std::shared_ptr<RankServer> server,
                             RankServer::Ranks ranks, std::vector<std::string> devices,
                             std::shared_ptr<const PreparedRun> prepared, std::uint64_t id, std::string tag)
    : threads_(threads),
      server_(std::move(server)),
      place_(static_cast<int>(ranks.size())),
      devices_(std::move(devices)),
      prepared_(std::move(prepared)),
      id_(id),
      tag_(std::move(tag)),
      ranks_(ranks.size()),
      questions_(ranks.size()) {
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    ranks_[i].process = std::move(ranks[i]);
    ranks_[i].report.rank = static_cast<int>(i);
    ranks_[i].report.node = ranks_[i].process->node();
    ranks_[i].report.phase = RankPhase::kWaiting;
  }
}

void ProcessRunner::Start(std::shared_ptr<Meeting> meeting, Sink sink) {
  meeting_ = std::move(meeting);
  sink_ = std::move(sink);
  threads_.Start([self = shared_from_this()](int rank) { self->RunRank(rank); });
}

void ProcessRunner::StartProbe(std::shared_ptr<Meeting>, std::uint64_t, Sink sink) {
  for (const Rank& rank : ranks_) {
    RankReport sound;
    sound.rank = rank.report.rank;
    sound.phase = RankPhase::kDone;
    sink(std::move(sound));
  }
}

void ProcessRunner::RunRank(int index) {
  const LogTags tags(index, tag_);
  At(index).process->BeginCase();
  const bool loaded = Load(index);
  const bool all = [&] {
    const HostScope scope(HostOf(index), "wait for all ranks");
    return meeting_->Begin(index, loaded);
  }();
  const int different = all ? FirstThatDiffers() : 0;
  if (all && different == 0) {
    SetPhase(index, RankPhase::kRunning);
    RunCase(index);
  } else if (all && different == index) {
    std::string text;
    try {
      text = DifferenceFromFirst(index);
    } catch (const std::exception& error) {
      text = error.what();
    }
    Fail(index, {{CPPOOL_INVALID_REQUEST, text}, "", FailureOrigin::kOwn}, "");
    difference_told_.count_down();
  } else if (loaded) {
    // A first failure gives the others little time. It comes at the latest when the deadline ends both ranks.
    if (all) difference_told_.wait();
    Fail(index,
         {{CPPOOL_INTERNAL, "not started, since another rank could not begin",
           kernels::RuntimeError::kElsewhere},
          "",
          FailureOrigin::kPropagated},
         "");
  }
  Done(index);
}

std::vector<HostSlice>* ProcessRunner::HostOf(int index) {
  return prepared_->options.trace.empty() ? nullptr : &At(index).host;
}

std::optional<Json> ProcessRunner::AskToLoad(int index, const char* wanted) {
  Json frame = prepared_->python;
  for (const char* of_run : {"kwargs", "argv", "nodeid", "next", "seed"}) frame.erase(of_run);
  frame["frame"] = "load";
  frame["id"] = id_;
  if (wanted != nullptr) frame[wanted] = true;
  RankProcess& process = *At(index).process;
  process.Send(frame);  // that it is lost shows as the end of the rank
  while (auto answer = process.Next())
    if (answer->value("id", Json()) == id_ && TextOf(*answer, "frame") == "report") return answer;
  return std::nullopt;
}

bool ProcessRunner::Load(int index) {
  const HostScope scope(HostOf(index), "load");
  Rank& rank = At(index);
  const auto answer = AskToLoad(index, server_->ComparesFiles() ? "digests" : nullptr);
  if (!answer) {
    FailEnded(index, "while it loaded the case");
    return false;
  }
  if (const std::string different = server_->DifferentFile(*rank.process, answer->value("files", Json()));
      !different.empty()) {
    Fail(index, {{CPPOOL_INVALID_REQUEST, different}, "", FailureOrigin::kOwn}, "");
    return false;
  }
  rank.items = TextOf(*answer, "digest");
  rank.collected = protocol::JsonText(answer->value("collected", Json()));
  {
    const std::lock_guard lock(mutex_);
    rank.report.replace = TextOf(*answer, "replace");
  }
  if (TextOf(*answer, "status") == "passed") return true;
  Fail(index, *answer);
  return false;
}

int ProcessRunner::FirstThatDiffers() const {
  const auto other = std::find_if(ranks_.begin(), ranks_.end(),
                                  [&](const Rank& rank) { return rank.items != ranks_.front().items; });
  return other == ranks_.end() ? 0 : static_cast<int>(other - ranks_.begin());
}

std::string ProcessRunner::DifferenceFromFirst(int index) {
  const auto names = [&](int rank) {
    const auto answer = AskToLoad(rank, "items");
    const Json items = answer ? answer->value("items", Json()) : Json();
    return items.is_array() ? items.get<std::vector<Json>>() : std::vector<Json>();
  };
  const std::vector<Json> here = names(index), there = names(0);
  const auto [own, first] = std::mismatch(here.begin(), here.end(), there.begin(), there.end());
  // A list may have been cut.
  const auto is_known = [](auto at, const std::vector<Json>& of, const std::string& count) {
    return at != of.end() || std::to_string(of.size()) == count;
  };
  const std::string &count = At(index).collected, &count_of_first = At(0).collected;
  std::string which;
  if (is_known(own, here, count) && is_known(first, there, count_of_first))
    which = "; number " + std::to_string(own - here.begin() + 1) + " is " +
            (own == here.end() ? "none" : protocol::JsonText(*own).substr(0, kMostOfName)) + " here and " +
            (first == there.end() ? "none" : protocol::JsonText(*first).substr(0, kMostOfName)) + " there";
  return "pytest has found " + count + " items on this rank and " +
         (count == count_of_first ? "as many" : count_of_first) + " on rank 0" + which +
         ": names of tests must not depend on the rank, nor on the order of a set";
}

void ProcessRunner::RunCase(int index) {
  const HostScope scope(HostOf(index), "run case");
  Rank& rank = At(index);
  {
    const std::lock_guard lock(mutex_);
    rank.begun = true;
  }
  const Json& python = prepared_->python;
  const RunOptions& options = prepared_->options;
  Json frame = {{"frame", "run"},
                {"id", id_ + 1},
                {"seed", python.value("seed", Json(0))},
                {"group", options.own_group ? "own" : "lent"},
                {"checks", options.checks},
                {"warmup", options.warmup},
                {"repeat", options.repeat},
                {"sampling", options.sampling.has_value()},
                {"trace", !options.trace.empty()},
                {"deadline_ms", options.deadline.count()}};
  for (const char* member : {"kwargs", "argv", "nodeid", "next", "env"})
    if (python.contains(member)) frame[member] = python.at(member);
  rank.process->Send(frame);
  while (const auto answer = rank.process->Next()) {
    if (answer->value("id", Json()) != id_ + 1) continue;
    const std::string name = TextOf(*answer, "frame");
    try {
      if (name == "report") return TakeReport(index, *answer);
      if (name != "mark") continue;
      if (answer->contains("status"))
        Fail(index, *answer);
      else
        Decide(index, *answer);
    } catch (const std::exception& error) {
      const std::string text = "sent a broken frame \"" + name + "\": " + error.what();
      return Fail(index, {{CPPOOL_INTERNAL, text}, "", FailureOrigin::kOwn}, "");
    }
  }
  FailEnded(index, "during the case");
}

void ProcessRunner::Decide(int index, const Json& mark) {
  const Json iteration = mark.value("iteration", Json());
  Json go = {{"frame", "go"}, {"id", id_ + 1}};
  if (iteration == 0) {
    SetPhase(index, RankPhase::kReady);
    const auto obstacle = meeting_->FirstIteration(index);
    SetPhase(index, RankPhase::kRunning);
    if (obstacle)
      go["stop"] = "no iteration was begun, since rank " + std::to_string(obstacle->rank) +
                   " failed before its first one";
    else if (!meeting_->MayBegin(0))
      go["stop"] = "cancelled";
    else
      go["until"] = prepared_->options.sampling ? meeting_->StartSampling() : prepared_->options.repeat;
  } else {
    go["until"] = meeting_->NextDecision(SamplesFrom(mark));
  }
  At(index).process->Send(go);
}

void ProcessRunner::TakeReport(int index, const Json& frame) {
  Rank& rank = At(index);
  RankReport report;
  {
    const std::lock_guard lock(mutex_);
    report = rank.report;
  }
  ReadReport(frame, place_, report);
  if (frame.contains("trace")) rank.trace = TraceFrom(frame.at("trace"));
  {
    const std::lock_guard lock(mutex_);
    rank.report = std::move(report);
  }
  if (TextOf(frame, "status") != "passed" && !failed(index)) Fail(index, frame);
}

void ProcessRunner::Fail(int index, const Json& frame) {
  Fail(index, FailureFrom(frame), TextOf(frame, "traceback"));
}

void ProcessRunner::Fail(int index, RankFailure failure, const std::string& traceback) {
  const Meeting::FailureTime now = meeting_->Failed();
  failure.order = now.order;
  if (now.after_abort) failure.origin = FailureOrigin::kAfterAbort;
  RankReport report;
  {
    const std::lock_guard lock(mutex_);
    Rank& rank = At(index);
    if (failure.origin >= rank.report.failure.origin) return;
    rank.report.failure = std::move(failure);
    rank.report.traceback = traceback;
    report = rank.report;
  }
  sink_(report);
  const bool asked =
      report.failure.status == CPPOOL_CANCELLED || report.failure.origin == FailureOrigin::kSkip;
  Log(asked ? LogLevel::kInfo : LogLevel::kWarning, report.failure.text);
}

void ProcessRunner::FailEnded(int index, const char* during) {
  Rank& rank = At(index);
  std::optional<RankReport> at_abort;
  std::string why_aborted;
  {
    const std::lock_guard lock(mutex_);
    why_aborted = why_aborted_;
    rank.lost = true;
    at_abort = rank.at_abort;
    rank.ended = !at_abort;
    if (at_abort) {
      rank.report.stacks = at_abort->stacks;
      rank.report.streams = at_abort->streams;
    }
  }
  RankFailure failure;
  failure.status = CPPOOL_INTERNAL;
  failure.stage = rank.process->Where().stage;
  failure.origin = FailureOrigin::kOwn;
  if (at_abort) {
    failure.text = "was killed, since " + why_aborted + "; it was " + DescribeRank(*at_abort);
    failure.culprit = kernels::RuntimeError::kElsewhere;
    failure.origin = FailureOrigin::kAfterAbort;
  } else {
    failure.text =
        std::string("the process ended ") + during + ": it " + rank.process->End().value_or("ended");
  }
  Fail(index, std::move(failure), at_abort ? "" : rank.process->Stacks());
}

void ProcessRunner::SetPhase(int index, RankPhase phase) {
  const std::lock_guard lock(mutex_);
  At(index).report.phase = phase;
}

bool ProcessRunner::failed(int index) const {
  const std::lock_guard lock(mutex_);
  return At(index).report.failure.origin != FailureOrigin::kNone;
}

bool ProcessRunner::lost() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.lost; });
}

bool ProcessRunner::begun() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.begun; });
}

bool ProcessRunner::ended_early() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::none_of(ranks_, [](const Rank& rank) { return rank.begun; }) &&
         std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.ended; });
}

void ProcessRunner::Done(int index) {
  RankReport report;
  {
    const std::lock_guard lock(mutex_);
    RankReport& own = At(index).report;
    own.phase = RankPhase::kDone;
    if (std::string left_out = At(index).process->LeftOut(); !left_out.empty())
      own.warnings.push_back(std::move(left_out));
    own.output = At(index).process->Output();
    report = own;
  }
  meeting_->Leave(index, report.failure.status);
  sink_(std::move(report));
}

void ProcessRunner::Cancel() {
  for (const Rank& rank : ranks_)
    for (const std::uint64_t id : {id_, id_ + 1}) rank.process->Send({{"frame", "cancel"}, {"id", id}});
}

void ProcessRunner::Abort(const std::string& reason) {
  const std::vector<RankReport> now = Snapshots(false);
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    {
      const std::lock_guard lock(mutex_);
      why_aborted_ = reason;
      if (IsDone(ranks_[i].report)) continue;
      ranks_[i].at_abort = now[i];
    }
    server_->Kill(*ranks_[i].process);
  }
}

std::vector<RankReport> ProcessRunner::Snapshots(bool stacks) const {
  std::vector<RankReport> reports;  // from before a signal, which may wake a rank
  {
    const std::lock_guard lock(mutex_);
    for (const Rank& rank : ranks_) reports.push_back(rank.report);
  }
  const auto limit = Clock::now() + kAskLimit;
  const auto self = shared_from_this();
  const auto answers = questions_.Ask(
      [self, stacks, limit](std::size_t i) {
        return self->server_->LookAt(*self->ranks_[i].process, stacks, limit);
      },
      limit + (stacks ? RankServer::kSignalLimit + kWayLimit : std::chrono::milliseconds(20)));
  for (std::size_t i = 0; i < reports.size(); ++i) {
    RankReport& report = reports[i];
    if (!IsDone(report) && (answers[i] ? !answers[i]->known : !report.node.empty())) {
      report.phase = RankPhase::kUnknown;
      continue;
    }
    const RankProcess::Place place = answers[i] ? answers[i]->place : ranks_[i].process->Where();
    if (report.phase == RankPhase::kReady) report.awaits = meeting_->NotReady();
    report.iterations = place.iterations;
    kernels::StreamProgress main;
    main.stream = "main";
    main.stage = place.stage;
    main.seconds = place.seconds;
    main.idle = IsDone(report);
    main.thread = 0;
    if (place.phase == RankProcess::Phase::kLoad) main.doing = "loading its code";
    if (place.phase == RankProcess::Phase::kReset) main.doing = "putting the state back";
    if (!answers[i] || !answers[i]->answered) {
      const std::string state = answers[i] ? answers[i]->state : "";
      main.doing = state.empty() ? "it does not answer (C code holds the GIL?)" : state;
    } else {
      for (const Collective& own : CollectivesOf(answers[i]->stacks)) {
        if (own.over) continue;
        std::set<int> missing;
        for (std::size_t other = 0; other < answers.size(); ++other) {
          if (other == i || !MayWaitFor(own, other)) continue;
          if (!answers[other] || !answers[other]->answered ||
              LastIn(own.group, CollectivesOf(answers[other]->stacks)).number < own.number)
            missing.insert(static_cast<int>(other));
        }
        // A collective that others have not entered says more than one that they have.
        if (missing.empty() && !main.doing.empty()) continue;
        main.doing =
            "in " + own.name + " (number " + std::to_string(own.number) + " of group " + own.group + ")";
        if (!missing.empty())
          main.doing += ", which " + kernels::RankList({missing.begin(), missing.end()}) +
                        (missing.size() == 1 ? " has" : " have") + " not entered";
        main.awaits.assign(missing.begin(), missing.end());
        if (!missing.empty()) break;
      }
    }
    report.streams = {main};
    if (IsDone(report) || !answers[i]) continue;
    if (answers[i]->answered)
      report.stacks = StacksOf(answers[i]->stacks);
    else if (!answers[i]->text.empty())
      report.stacks = StacksFrom(answers[i]->text);
  }
  return reports;
}

void ProcessRunner::MoveTrace(RunTrace& trace) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const std::string node = ranks_[i].process->node();
    if (const auto clock = trace.clocks.find(node); clock != trace.clocks.end())
      for (HostSlice& slice : ranks_[i].host) {  // of the thread of this process that stands for the rank
        slice.begin_ns += clock->second.offset_ns;
        slice.end_ns += clock->second.offset_ns;
      }
    trace.ranks.push_back({devices_.at(i), node, std::move(ranks_[i].host), std::move(ranks_[i].trace)});
  }
}

}  // namespace cppool::daemon
