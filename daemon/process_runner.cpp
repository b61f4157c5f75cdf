#include "daemon/process_runner.h"

#include <signal.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "daemon/failure_kind.h"
#include "daemon/log.h"
#include "daemon/timeout_report.h"
#include "kernels/error.h"
#include "kernels/group_shape.h"

namespace cppool::daemon {
namespace {

using protocol::Json;
using Clock = RankProcess::Clock;

constexpr std::chrono::milliseconds kAskLimit{120}, kSignalLimit{150};  // of Snapshots: 0.35 s with both
constexpr std::size_t kMostStackLines = 200;

std::string Text(const Json& json, const char* member) {
  const auto found = json.find(member);
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

// The members of a report that are the same in a report of the daemon.
void CopyReport(const Json& frame, const kernels::Place& place, RankReport& report) {
  Json json = ToJson(report);
  for (const char* same : {"checks", "gpu_ms", "samples", "warnings"})
    if (frame.contains(same)) json[same] = frame.at(same);
  for (const char* state : {"differed", "left"})
    if (frame.contains(state)) json[state] = frame.at(state);
  json["traceback"] = Text(frame, "traceback");
  RankReport read = RankReportFrom(json, place);
  read.failure = report.failure;
  const Json results = frame.value("results", Json::object());
  for (const auto& [name, value] : results.items()) read.extra[name] = value;
  for (const char* own : {"rank", "ok", "error", "gpu_ms", "samples", "traceback", "output", "stack"})
    if (read.extra.erase(own) > 0)
      read.warnings.push_back(std::string("the result '") + own +
                              "' is left out: the answer has a member of that name");
  for (const char* more : {"value", "pytest", "memory", "reset_ms"})
    if (frame.contains(more)) read.extra[more] = frame.at(more);
  report = std::move(read);
}

// Throws Json::exception.
kernels::RankTrace TraceFrom(const Json& json) {
  kernels::RankTrace trace;
  trace.streams = {"main"};
  trace.names = json.at("names").get<std::vector<std::string>>();
  trace.dropped = json.at("dropped");
  trace.clock_error_us = json.at("clock_error_us");
  const auto add = [&](const char* member, kernels::TraceSlice::Kind kind) {
    for (const Json& each : json.at(member)) {
      kernels::TraceSlice slice;
      slice.kind = kind;
      slice.name = each.at(0);
      slice.iteration = each.at(1);
      slice.begin_ns = each.at(2);
      slice.end_ns = each.at(3);
      trace.names.at(static_cast<std::size_t>(slice.name));
      trace.slices.push_back(slice);
    }
  };
  add("host", kernels::TraceSlice::Kind::kCall);
  add("stream", kernels::TraceSlice::Kind::kStage);
  return trace;
}

// "stopped", "in a wait of the kernel that nothing interrupts"; empty: neither.
std::string StateOf(pid_t pid) {
  std::string text;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), text);
  const std::size_t after = text.rfind(") ");
  const char state = after == std::string::npos ? '?' : text[after + 2];
  if (state == 'T' || state == 't') return "it is stopped";
  return state == 'D' ? "it is in a wait of the kernel that nothing interrupts" : "";
}

// The stacks that faulthandler has written, the main thread's first, without the frames of the ranks' own
// code.
std::vector<std::vector<std::string>> StacksFrom(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::vector<std::string>> stacks;
  for (std::string line; std::getline(in, line);) {
    const std::size_t file = line.find("File \""), end = line.find("\", line ");
    if (line.find("hread 0x") != std::string::npos) stacks.emplace(stacks.begin());
    if (file == std::string::npos || end == std::string::npos || stacks.empty()) continue;
    const std::string path = line.substr(file + 6, end - file - 6),
                      rest = line.substr(end + 8);  // "12 in name"
    const std::size_t in_function = rest.find(" in ");
    if (path.find("/cppool/_ranks/") != std::string::npos || in_function == std::string::npos ||
        path.starts_with("<frozen"))
      continue;
    if (stacks.front().size() < kMostStackLines)
      stacks.front().push_back(path + ":" + rest.substr(0, in_function) + " " + rest.substr(in_function + 4));
  }
  std::erase_if(stacks, [](const auto& stack) { return stack.empty(); });
  return stacks;
}

// The stacks of its Python threads, the main one first.
std::vector<std::vector<std::string>> StacksOf(const Json& answer) {
  std::vector<std::vector<std::string>> stacks;
  for (const Json& thread : answer.value("threads", Json::array())) {
    std::vector<std::string> frames;
    for (const Json& frame : thread.value("frames", Json::array()))
      if (frame.is_string()) frames.push_back(frame);
    if (frames.empty()) continue;
    stacks.insert(Text(thread, "name") == "MainThread" ? stacks.begin() : stacks.end(), std::move(frames));
  }
  return stacks;
}

struct Collective {
  std::int64_t number = -1;
  std::string name;
  bool over = true;
};

// The last one that the rank has entered in a group.
Collective LastIn(const std::string& group, const Json& answer) {
  for (const Json& each : answer.value("collectives", Json::array())) {
    if (Text(each, "group") != group) continue;
    const auto number = each.find("number");
    return {number != each.end() && number->is_number_integer() ? number->get<std::int64_t>() : -1,
            Text(each, "name"), Text(each, "state") == "completed"};
  }
  return {};
}

}  // namespace

ProcessRunner::ProcessRunner(RankThreads& threads, std::shared_ptr<ForkServer> server,
                             std::vector<std::shared_ptr<RankProcess>> ranks,
                             std::vector<std::string> devices, std::shared_ptr<const PreparedRun> prepared,
                             std::uint64_t id, std::string tag)
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
  if (all && HasSameItems(index)) {
    SetPhase(index, RankPhase::kRunning);
    RunCase(index);
  } else if (all) {
    Fail(index,
         {{CPPOOL_INVALID_REQUEST, "pytest has found other items on this rank than on rank 0"},
          "",
          FailureOrigin::kOwn},
         "");
  } else if (loaded) {
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

bool ProcessRunner::Load(int index) {
  const HostScope scope(HostOf(index), "load");
  Rank& rank = At(index);
  Json frame = prepared_->python;
  for (const char* of_run : {"kwargs", "argv", "nodeid", "next", "seed"}) frame.erase(of_run);
  frame["frame"] = "load";
  frame["id"] = id_;
  rank.process->Send(frame);  // that it is lost shows as the end of the rank
  while (const auto answer = rank.process->Next()) {
    if (answer->value("id", Json()) != id_ || Text(*answer, "frame") != "report") continue;
    rank.items = Text(*answer, "digest");
    {
      const std::lock_guard lock(mutex_);
      rank.report.replace = Text(*answer, "replace");
    }
    if (Text(*answer, "status") == "passed") return true;
    Fail(index, *answer);
    return false;
  }
  FailEnded(index, "while it loaded the case");
  return false;
}

bool ProcessRunner::HasSameItems(int index) const { return At(index).items == At(0).items; }

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
    const std::string name = Text(*answer, "frame");
    if (name == "report") return TakeReport(index, *answer);
    if (name != "mark") continue;
    if (answer->contains("status"))
      Fail(index, *answer);
    else
      Decide(index, *answer);
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
    kernels::StageSamples samples;
    for (const Json& stage : mark.value("samples", Json::array()))
      samples.emplace_back(stage.at(0).get<std::string>(), stage.at(1).get<std::vector<double>>());
    go["until"] = meeting_->NextDecision(samples);
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
  try {
    CopyReport(frame, place_, report);
    if (frame.contains("trace")) rank.trace = TraceFrom(frame.at("trace"));
  } catch (const std::exception& error) {
    return Fail(index, {{CPPOOL_INTERNAL, error.what()}, "", FailureOrigin::kOwn}, "");
  }
  {
    const std::lock_guard lock(mutex_);
    rank.report = std::move(report);
  }
  if (Text(frame, "status") != "passed" && !failed(index)) Fail(index, frame);
}

void ProcessRunner::Fail(int index, const Json& frame) {
  RankFailure failure;
  failure.text = Text(frame, "error");
  failure.stage = Text(frame, "stage");
  failure.status =
      StatusOf(protocol::ParseFailureKind(Text(frame, "kind")).value_or(protocol::FailureKind::kInternal));
  failure.gave_reason = true;
  const bool own = frame.contains("culprit") && frame.at("culprit").is_number_integer();
  if (!own) failure.culprit = kernels::RuntimeError::kElsewhere;
  const Json checks = frame.value("checks", Json::array());
  const bool by_check =
      std::any_of(checks.begin(), checks.end(), [](const Json& check) { return !check.value("ok", true); });
  failure.origin = !own                                            ? FailureOrigin::kPropagated
                   : Text(frame, "status") == "skipped"            ? FailureOrigin::kSkip
                   : failure.status == CPPOOL_MISMATCH && by_check ? FailureOrigin::kMismatch
                                                                   : FailureOrigin::kOwn;
  Fail(index, std::move(failure), Text(frame, "traceback"));
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
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.lost; });
}

bool ProcessRunner::begun() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.begun; });
}

void ProcessRunner::Done(int index) {
  RankReport report;
  {
    const std::lock_guard lock(mutex_);
    RankReport& own = At(index).report;
    own.phase = RankPhase::kDone;
    if (own.failure.origin != FailureOrigin::kNone) own.output = At(index).process->Output();
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
    server_->Kill(*ranks_[i].process, SIGKILL);
  }
}

ProcessRunner::Answer ProcessRunner::Ask(std::size_t index, bool stacks, Clock::time_point limit) const {
  RankProcess& process = *ranks_[index].process;
  Answer answer;
  answer.place = process.Where();  // before a signal, which may wake it
  if (auto told = process.AskStacks(limit)) {
    answer.asked = true;
    answer.stacks = std::move(*told);
  } else if (stacks) {
    server_->Kill(process, ForkServer::kStacksSignal);
    answer.text = process.WaitForStacks(Clock::now() + kSignalLimit);
  }
  return answer;
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
      [self, stacks, limit](std::size_t i) { return self->Ask(i, stacks, limit); },
      limit + (stacks ? kSignalLimit + std::chrono::milliseconds(50) : std::chrono::milliseconds(20)));
  for (std::size_t i = 0; i < reports.size(); ++i) {
    RankReport& report = reports[i];
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
    if (!answers[i] || !answers[i]->asked) {
      const std::string state = StateOf(ranks_[i].process->pid());
      main.doing = state.empty() ? "it does not answer (C code holds the GIL?)" : state;
    } else {
      for (const Json& each : answers[i]->stacks.value("collectives", Json::array())) {
        const std::string group = Text(each, "group");
        const Collective own = LastIn(group, answers[i]->stacks);
        if (own.over) continue;
        std::set<int> missing;
        for (std::size_t other = 0; other < answers.size(); ++other) {
          if (other == i) continue;
          if (!answers[other] || !answers[other]->asked ||
              LastIn(group, answers[other]->stacks).number < own.number)
            missing.insert(static_cast<int>(other));
        }
        // A collective that others have not entered says more than one that they have.
        if (missing.empty() && !main.doing.empty()) continue;
        main.doing = "in " + own.name + " (number " + std::to_string(own.number) + " of group " + group + ")";
        if (!missing.empty())
          main.doing += ", which " + kernels::RankList({missing.begin(), missing.end()}) + " has not entered";
        main.awaits.assign(missing.begin(), missing.end());
        if (!missing.empty()) break;
      }
    }
    report.streams = {main};
    if (IsDone(report) || !answers[i]) continue;
    if (answers[i]->asked)
      report.stacks = StacksOf(answers[i]->stacks);
    else if (!answers[i]->text.empty())
      report.stacks = StacksFrom(answers[i]->text);
  }
  return reports;
}

void ProcessRunner::MoveTrace(RunTrace& trace) {
  for (std::size_t i = 0; i < ranks_.size(); ++i)
    trace.ranks.push_back({devices_.at(i), std::move(ranks_[i].host), std::move(ranks_[i].trace)});
}

}  // namespace cppool::daemon
