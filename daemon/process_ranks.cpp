#include "daemon/process_ranks.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "daemon/log.h"
#include "daemon/start_error.h"
#include "protocol/run_record.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;
using protocol::Status;

constexpr std::chrono::seconds kKillLimit{5};
constexpr std::chrono::seconds kAnswerLimit{5};    // of a fork server that is asked
constexpr std::chrono::seconds kMemoryLimit{1};    // of a rank that is asked
constexpr std::chrono::seconds kIdleLimit{60};     // for ranks that are started before they are needed
constexpr std::chrono::seconds kVerdictLimit{10};  // a case that takes longer is not run again

double Milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// The names of both, by group.
void Merge(Json& into, const Json& state) {
  for (const auto& [group, names] : state.items()) {
    Json& list = into[group];
    if (list.is_null()) list = Json::array();
    for (const Json& name : names)
      if (std::ranges::find(list, name) == list.end()) list.push_back(name);
  }
}

// "environment (A, B); default dtype (float16)"
std::string Listed(const Json& state) {
  std::string text;
  for (const auto& [group, names] : state.items()) {
    text += (text.empty() ? "" : "; ") + group;
    std::string list;
    for (const Json& name : names)
      list += (list.empty() ? "" : ", ") + (name.is_string() ? name.get<std::string>() : name.dump());
    if (!list.empty()) text += " (" + list + ")";
  }
  return text;
}

}  // namespace

ProcessRanks::ProcessRanks(UnderWay& under_way, Options options, Clock::time_point deadline)
    : under_way_(under_way), options_(std::move(options)), threads_(options_.world_size) {
  const auto start = Clock::now();
  StartServer(deadline);
  const auto forks = Clock::now();
  world_ = server_->Fork(options_.world_size, options_.backend, deadline);
  server_ms_ = Milliseconds(forks - start);
  ranks_ms_ = Milliseconds(Clock::now() - forks);
  ready_ = true;
}

ProcessRanks::~ProcessRanks() = default;

void ProcessRanks::StartServer(Clock::time_point deadline) {
  server_ = options_.start(deadline);
  info_ = server_->info();
}

void ProcessRanks::Close() {
  world_ = {};
  server_.reset();
}

Json ProcessRanks::init_ms() const {
  Json times = {{"fork server", server_ms_}, {"ranks", ranks_ms_}};
  for (const auto& [module, ms] : info_.import_ms) times["import " + module] = ms;
  return times;
}

Json ProcessRanks::Hello() const {
  Json devices = Json::array();
  bool on_gpus = false;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    Json device = world_.ready.at(static_cast<std::size_t>(rank)).value("device", Json());
    if (device.is_object()) {
      on_gpus = true;
    } else {
      device = {{"name", "host"},
                {"ordinal", -1},
                {"uuid", ""},
                {"capability", ""},
                {"total_bytes", world_.ready[static_cast<std::size_t>(rank)].value("host_bytes", 0ULL)}};
    }
    device["rank"] = rank;
    if (const std::string node = world_.ranks[static_cast<std::size_t>(rank)]->node(); !node.empty())
      device["node"] = node;
    devices.push_back(std::move(device));
  }
  Json deferred = Json::array();
  for (const auto& [module, why] : info_.deferred) deferred.push_back({{"module", module}, {"why", why}});
  const std::string group = world_.ready.front().value("backend", "none");
  return {{"world_size", options_.world_size},
          {"backend", on_gpus ? "cuda" : "host"},
          {"transport", group.find("nccl") != std::string::npos ? "nccl" : group},
          {"devices", std::move(devices)},
          {"ranks", "processes"},
          {"python",
           {{"path", options_.python},
            {"version", info_.python},
            {"torch", info_.torch.empty() ? Json() : Json(info_.torch)},
            {"preloaded", info_.preloaded},
            {"deferred", std::move(deferred)}}}};
}

std::vector<std::string_view> ProcessRanks::Features() const {
  std::vector<std::string_view> features(protocol::kOfProcesses.begin(), protocol::kOfProcesses.end());
  features.insert(features.end(), {"sampling", "progress", "trace"});
  return features;
}

Json ProcessRanks::Cases(const protocol::ListRequest& request, Clock::time_point) {
  if (!request.load.empty())
    throw Refusal(FailureKind::kInvalidRequest,
                  "the ranks of this daemon are Python processes (--python), which load no libraries");
  return Json::array();
}

void ProcessRanks::Validate(const protocol::RunRequest& request, Clock::time_point) {
  if (request.python.empty())
    throw Refusal(FailureKind::kInvalidRequest,
                  "the ranks of this daemon are Python processes (--python): it runs requests with "
                  "\"python\"; cases such as '" +
                      request.case_name + "' need a daemon that was started without --python");
  const Json python = protocol::ParsePythonCase(request.python);
  std::string file;
  if (python.contains("script")) file = python.at("script");
  if (python.contains("function")) {
    file = python.at("function");
    file.resize(file.rfind(':'));
  }
  std::error_code error;
  if (!file.empty() && !std::filesystem::is_regular_file(file, error))
    throw Refusal(FailureKind::kInvalidRequest, "there is no file " + file);
  CheckTrace(request.trace);
}

Json ProcessRanks::Memory() {
  Json memory = Json::array();
  if (!server_) return memory;  // it could not be started again
  for (const auto& rank : world_.ranks) {
    const Json answer = server_->LookAt(*rank, false, Clock::now() + kMemoryLimit).stacks;
    if (!answer.contains("memory") || !answer.at("memory").is_object()) continue;
    Json held = answer.at("memory");
    held["rank"] = rank->rank();
    memory.push_back(std::move(held));
  }
  return memory;
}

void ProcessRanks::Replace() { ready_ = false; }

std::string ProcessRanks::DescribeBefore() const {
  std::string text =
      before_.count == 1 ? before_.last : std::to_string(before_.count) + " cases, last " + before_.last;
  if (before_.changes.is_object() && !before_.changes.empty())
    text += ", which changed " + Listed(before_.changes);
  return text;
}

void ProcessRanks::Ensure(Clock::time_point until) {
  if (ready_ && std::ranges::all_of(world_.ranks, [](const auto& rank) { return !rank->End(); })) return;
  try {
    if (server_) {
      if (!server_->KillAll(world_.ranks, std::min(until, Clock::now() + kKillLimit)))
        Log(LogLevel::kError, "a rank has not ended after SIGKILL: what it holds is lost");
      if (const auto why = server_->Changed(std::min(until, Clock::now() + kAnswerLimit)); !why.empty()) {
        Log(LogLevel::kInfo, "another fork server is started: " + why.front());
        server_.reset();
      }
    }
    if (!server_) StartServer(until);
    world_ = server_->Fork(options_.world_size, options_.backend, until);
  } catch (const StartError& error) {
    ready_ = false;
    throw Refusal(error.kind(), std::string("no fresh ranks: ") + error.what());
  }
  ready_ = true;
  before_ = {};
}

void ProcessRanks::WhileIdle() {
  if (ready_ || !server_) return;
  try {
    Ensure(Clock::now() + kIdleLimit);
  } catch (const Refusal& error) {  // the next run tries again, and says it
    Log(LogLevel::kError, error.what());
  }
}

ProcessRanks::Once ProcessRanks::RunOnce(const protocol::RequestQueue::Entry& incoming,
                                         std::shared_ptr<const PreparedRun> prepared, const std::string& tag,
                                         Clock::time_point until, const RunTrace* trace) {
  Once once;
  std::vector<std::string> devices;
  for (const Json& ready : world_.ready) {
    const Json device = ready.value("device", Json());
    devices.push_back(device.is_object() ? device.value("name", "") : "host");
  }
  const auto runner = std::make_shared<ProcessRunner>(threads_, server_, world_.ranks, std::move(devices),
                                                      prepared, next_id_, tag);
  next_id_ += 2;
  const auto run = std::make_shared<CaseRun>(
      RankRunners{runner}, prepared, std::shared_ptr<protocol::RunControl>(incoming, &incoming->control),
      options_.limits);
  under_way_.OnRanks(run);
  std::optional<RunTrace> traced;
  if (trace) traced = *trace;
  RunResult& result = once.result = run->Execute(traced ? &traced->host : nullptr, until);
  if (traced) run->SaveTrace(*traced, result);
  under_way_.OnRanks(nullptr);
  if (runner->begun()) {
    ++before_.count;
    before_.last = prepared->registered.name;
  }
  for (const RankReport& report : run->Reports()) {
    if (once.reload.empty()) once.reload = report.replace;
    Merge(result.differed, report.differed);
    Merge(result.left, report.left);
  }
  // Killed while it waited, or by what it loaded: fresh ranks tell.
  if (runner->ended_early()) once.reload = "before the case began, " + result.error.substr(0, 300);
  Merge(before_.changes, result.differed);
  Merge(before_.changes, result.left);
  if (!server_->Lost().empty()) {
    result.fatal = true;
    once.reload.clear();
    return once;
  }
  const bool passed = result.status == Status::kPassed || result.status == Status::kSkipped;
  const bool by_check = result.status == Status::kFailed &&
                        std::ranges::any_of(result.checks, [](const auto& check) { return !check.ok; });
  if (runner->lost() || (runner->begun() && !passed && !by_check))
    once.replace = result.failure && result.failure->kind == FailureKind::kTimeout ? "the deadline has passed"
                   : result.failure && result.failure->kind == FailureKind::kCancelled
                       ? "the run was cancelled"
                       : "the case failed: " + result.error.substr(0, 300);
  else if (!result.left.is_null())
    once.replace = "the case left what cannot be put back: " + Listed(result.left);
  if (!once.replace.empty()) Replace();
  return once;
}

RunResult ProcessRanks::Run(const protocol::RequestQueue::Entry& incoming, const std::string& tag,
                            Clock::time_point until, RunTrace* trace) {
  const auto begin = Clock::now();
  const protocol::RunRequest& request = *incoming->run();
  Validate(request, until);
  if (trace) {
    const Json hello = Hello();
    trace->backend = hello.at("backend");
    trace->transport = hello.at("transport");
    trace->limit = kMostProcessSlices;
  }
  auto prepared = std::make_shared<PreparedRun>();
  prepared->registered.name = request.case_name;
  prepared->options = request;
  prepared->python = protocol::ParsePythonCase(request.python);
  if (prepared->python.contains("seed")) prepared->seed = prepared->python.at("seed").get<std::uint64_t>();
  if (incoming->control.cancelled()) throw Refusal(FailureKind::kCancelled, "");

  std::string replaced;
  for (const auto& rank : world_.ranks)
    if (const auto end = rank->End(); end && ready_)
      replaced = "before the case, rank " + std::to_string(rank->rank()) + " " + *end;
  if (request.fresh && before_.count > 0) {
    replaced = "fresh ranks were asked for";
    Replace();
  }
  Ensure(until);
  bool used = before_.count > 0;
  std::string before = DescribeBefore();
  Once once = RunOnce(incoming, prepared, tag, until, trace);
  if (!once.reload.empty()) {
    replaced = once.reload;
    Replace();
    Ensure(until);
    used = false;
    once = RunOnce(incoming, prepared, tag, until, trace);
  }
  const RunResult& result = once.result;
  const bool may_be_polluted =
      request.verdict && used && !incoming->control.cancelled() && result.failure &&
      (result.status == Status::kFailed || result.status == Status::kError) &&
      result.failure->kind != FailureKind::kTimeout && result.failure->kind != FailureKind::kCancelled &&
      result.failure->kind != FailureKind::kInvalidRequest && Clock::now() - begin < kVerdictLimit &&
      Clock::now() + (Clock::now() - begin) < until && !result.fatal;
  if (may_be_polluted) {
    Replace();
    Ensure(until);
    Once again = RunOnce(incoming, prepared, tag, until, trace);
    if (again.result.status == Status::kPassed) {
      protocol::Failure& failure = *once.result.failure;
      failure.kind = FailureKind::kPolluted;
      once.result.status = Status::kFailed;
      once.result.error += " (polluted: it passes on fresh ranks; these had run " + before + ")";
      failure.detail += " (polluted: it passes on fresh ranks)";
    } else {
      once = std::move(again);
    }
    replaced = "to see whether the case fails on fresh ranks, too";
  }
  if (!once.replace.empty()) replaced = once.replace;
  once.result.replaced = replaced;
  if (!once.result.left.is_null())
    once.result.warnings.push_back("the case left what cannot be put back, so that its ranks are replaced: " +
                                   Listed(once.result.left));
  return std::move(once.result);
}

}  // namespace cppool::daemon
