#include "daemon/dispatcher.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>
#include <variant>
#include <vector>

#include "base/file_cache.h"
#include "daemon/failure_kind.h"
#include "daemon/library.h"
#include "daemon/local_ranks.h"
#include "daemon/log.h"
#include "daemon/process.h"
#include "daemon/start_error.h"
#include "kernels/error.h"
#include "protocol/features.h"
#include "protocol/run_record.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;
using protocol::Status;

constexpr std::size_t kLongestTag = 40;
constexpr std::chrono::seconds kListLimit{30};  // for the libraries of `list`, which has no deadline
// The end of the time to the deadline is for the answer: no library is tried in it, and no thread that a case
// has left is waited for.
constexpr std::chrono::milliseconds kAnswerTime{250};

std::int64_t TraceTime(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

double Milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// The name of a request in log lines: its id, or its number.
std::string TagOf(const std::optional<Json>& id, std::uint64_t number) {
  if (!id) return "#" + std::to_string(number);
  return id->dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, kLongestTag);
}

// The result of a run that did not reach the ranks.
RunResult NotRun(FailureKind kind, const std::string& detail) {
  RunResult result;
  result.status = IsSkip(kind) ? Status::kSkipped : Status::kError;
  result.error = detail;
  result.failure = protocol::Failure{kind, std::nullopt, "", detail};
  return result;
}

// A device or communicator that fails outside of a case is not probed: the process must end.
bool IsLost(FailureKind kind) { return kind == FailureKind::kCuda || kind == FailureKind::kNccl; }

// The result of `function`, or the one for its exception.
template <typename Function>
RunResult Answered(Function&& function) {
  try {
    return function();
  } catch (const Refusal& refusal) {
    return NotRun(refusal.kind(), refusal.what());
  } catch (const protocol::InvalidRequest& error) {
    return NotRun(FailureKind::kInvalidRequest, error.what());
  } catch (const kernels::RuntimeError& error) {
    RunResult result = NotRun(ToFailureKind(error.status()), error.what());
    result.fatal = IsLost(result.failure->kind);
    return result;
  } catch (const std::exception& error) {
    return NotRun(FailureKind::kInternal, error.what());
  }
}

}  // namespace

Dispatcher::Dispatcher(World& world, const CaseRegistry& registry, Watchdog* watchdog, Options options)
    : world_(world),
      registry_(registry),
      watchdog_(watchdog),
      options_(std::move(options)),
      libraries_(options_.libraries),
      leftovers_(world) {
  if (!world.place().whole()) throw std::invalid_argument("a dispatcher needs all ranks of its world");
}

std::optional<Answer> Dispatcher::Handle(const protocol::RequestQueue::Entry& incoming) {
  const auto taken_up = Clock::now();
  ++counts_.requests;
  if (!incoming->request()) {
    ++counts_.errors;
    const auto& error = std::get<protocol::RequestError>(incoming->content);
    return Finish(
        protocol::ErrorResponse({FailureKind::kInvalidRequest, std::nullopt, "", error.what()}, error.id));
  }
  const protocol::Request& request = *incoming->request();
  if (incoming->run()) return Run(incoming, taken_up);
  if (std::holds_alternative<protocol::HelloRequest>(request.operation))
    return Finish(protocol::OkResponse(Hello(), request.id));
  if (const auto* list = std::get_if<protocol::ListRequest>(&request.operation))
    return List(*list, request.id, taken_up);
  if (std::holds_alternative<protocol::StatsRequest>(request.operation)) return AnswerStats(request.id);
  Answer answer = Finish(protocol::OkResponse(Json::object(), request.id));
  answer.shutdown = true;
  return answer;
}

std::string Dispatcher::Overtake(const protocol::IncomingRequest& incoming, protocol::RequestQueue& queue) {
  ++counts_.requests;
  const protocol::Request& request = *incoming.request();
  const auto* cancel = std::get_if<protocol::CancelRequest>(&request.operation);
  if (!cancel) {
    Json members = under_way_.Status(libraries_.BeingOpened());
    members["waiting"] = queue.waiting();
    return Finish(protocol::OkResponse(std::move(members), request.id)).text;
  }
  const auto cancelled = queue.Cancel(cancel->cancels);
  if (!cancelled.error.empty()) {
    ++counts_.errors;
    return Finish(protocol::ErrorResponse({FailureKind::kInvalidRequest, std::nullopt, "", cancelled.error},
                                          request.id))
        .text;
  }
  const std::string own = Finish(protocol::OkResponse(Json::object(), request.id)).text;
  return cancelled.waited ? AnswerCancelled(*cancelled.waited).text + own : own;
}

Answer Dispatcher::AnswerCancelled(const protocol::IncomingRequest& request) {
  ++counts_.requests;
  if (std::holds_alternative<protocol::RunRequest>(request.request()->operation)) ++counts_.errors;
  RunResult result;
  MarkCancelled(result, request);
  return Finish(protocol::ToJson(result, request.id()));
}

void Dispatcher::Progress(const std::function<void(std::string_view line)>& write) {
  under_way_.Progress([&](const Json& line) { write(Finish(line).text); });
}

void Dispatcher::WhileIdle() {
  if (!std::exchange(trim_due_, false)) return;
  world_.StartTrim();  // only the next run waits for it
}

Json Dispatcher::Hello() const {
  Json devices = Json::array();
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto& device = world_.devices().at(rank);
    devices.push_back({{"rank", rank},
                       {"name", device.name},
                       {"ordinal", device.ordinal},
                       {"uuid", device.uuid},
                       {"capability", device.capability},
                       {"total_bytes", device.total_bytes}});
  }
  Json features = Json::array();
  for (const std::string_view feature : protocol::kFeatures) features.push_back(feature);
  protocol::ForEach(protocol::kRunMembers, [&](const auto& member) {
    const bool allowed = options_.allow_faults || std::string_view(member.name) != "fault";
    if (member.sent == protocol::Sent::kUnlessDefault && allowed) features.push_back(member.name);
  });
  return {{"protocol", protocol::kProtocolVersion},
          {"protocol_minor", protocol::kProtocolMinor},
          {"features", std::move(features)},
          {"version", options_.version},
          {"pid", getpid()},
          {"world_size", world_.size()},
          {"backend", world_.backend().name()},
          {"transport", world_.backend().transport()},
          {"devices", std::move(devices)},
          {"init_ms", options_.init_ms}};
}

Answer Dispatcher::List(const protocol::ListRequest& request, const std::optional<Json>& id,
                        Clock::time_point taken_up) {
  Json cases = Json::array();
  under_way_.BeginList();
  try {
    for (const auto& [name, registered] :
         CasesWith(LoadAll(request.load, LibraryKind::kCases, taken_up + kListLimit, {})).all()) {
      Json parameters = Json::array();
      for (const auto& spec : registered.schema) parameters.push_back(protocol::ToJson(spec));
      cases.push_back({{"name", name}, {"doc", registered.doc}, {"parameters", std::move(parameters)}});
    }
  } catch (const Refusal& refusal) {
    ++counts_.errors;
    return FinishLoaded(protocol::ErrorResponse({refusal.kind(), std::nullopt, "", refusal.what()}, id));
  }
  return FinishLoaded(protocol::OkResponse({{"cases", std::move(cases)}}, id));
}

std::vector<const LoadedLibrary*> Dispatcher::LoadAll(const std::vector<std::string>& files, LibraryKind kind,
                                                      Clock::time_point until,
                                                      const std::map<std::string, std::string>& digests) {
  if (files.empty()) return {};
  world_.FinishTrim();  // no rank works while code is loaded
  if (beside_pools_.empty()) beside_pools_ = MemoryBesidePools();
  std::vector<const LoadedLibrary*> libraries;
  try {
    for (const std::string& file : files) {
      const auto wanted = digests.find(file);
      libraries.push_back(
          &libraries_.Load(file, kind, until - kAnswerTime, wanted == digests.end() ? "" : wanted->second));
      under_way_.Loaded(kind, file, libraries.back()->digest);
    }
  } catch (const LibraryError& error) {
    throw Refusal(FailureKind::kInvalidRequest, error.what());
  }
  return libraries;
}

WantedKernels Dispatcher::LoadKernels(const protocol::RunRequest& request, Clock::time_point until) {
  using From = protocol::KernelChoice::From;
  const protocol::KernelChoice& choice = request.choice.named() ? request.choice : options_.kernels;
  WantedKernels wanted;
  wanted.words = choice.Words();
  if (choice.from == From::kLibrary) {
    wanted.library = LoadAll({choice.path}, LibraryKind::kKernels, until, request.digests).front();
    wanted.find = [this, library = wanted.library, name = choice.name] {
      return &library->kernels->Find(name, world_.backend().name());
    };
  } else if (choice.from == From::kCudnn) {
    wanted.find = [this] {
      const LoadedLibrary& cudnn = libraries_.LoadCudnn();
      under_way_.Loaded(LibraryKind::kKernels, cudnn.path, cudnn.digest);
      return &cudnn.kernels->Find("cudnn", world_.backend().name());
    };
  }
  return wanted;
}

const CaseRegistry& Dispatcher::CasesWith(const std::vector<const LoadedLibrary*>& libraries) {
  if (libraries.empty()) return registry_;
  if (joined_ && joined_with_ == libraries) return *joined_;
  try {
    CaseRegistry named;
    for (auto at = libraries.begin(); at != libraries.end(); ++at) {
      if (std::find(libraries.begin(), at, *at) == at)  // a library that is named twice counts once
        named.AddLibrary((*at)->handle, (*at)->path, (*at)->path);
    }
    joined_ = named.With(registry_);
    joined_with_ = libraries;
    return *joined_;
  } catch (const StartError& error) {
    throw Refusal(FailureKind::kInvalidRequest, error.what());
  }
}

std::vector<std::size_t> Dispatcher::MemoryBesidePools() const {
  std::vector<std::size_t> bytes;
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (world_.devices().at(rank).ordinal < 0) return {};
    const auto info = world_.rank(rank).Memory();
    std::size_t pools = 0;  // the bytes in pools of all ranks on this device
    for (int other = 0; other < world_.size(); ++other) {
      if (world_.devices().at(other).ordinal == world_.devices().at(rank).ordinal)
        pools += world_.rank(other).Memory().held_bytes;
    }
    const std::size_t known = info.free_bytes + pools, total = world_.devices().at(rank).total_bytes;
    bytes.push_back(total > known ? total - known : 0);
  }
  return bytes;
}

std::string Dispatcher::WhyRespawn() const {
  if (libraries_.full())
    return std::to_string(libraries_.size()) +
           " libraries are loaded, as many as may be; a loaded library cannot be unloaded";
  if (beside_pools_.empty()) return "";
  const std::vector<std::size_t> now = MemoryBesidePools();
  for (std::size_t rank = 0; rank < now.size(); ++rank) {
    if (now[rank] > beside_pools_[rank] + options_.most_library_bytes)
      return "since the first library was loaded, " +
             std::to_string((now[rank] - beside_pools_[rank]) >> 20) + " MiB of the memory of rank " +
             std::to_string(rank) +
             "'s device were taken beside the cases' allocations; a loaded library cannot be unloaded";
  }
  return "";
}

Answer Dispatcher::AnswerStats(const std::optional<Json>& id) {
  try {
    return Finish(protocol::OkResponse(Stats(), id));
  } catch (const kernels::RuntimeError& error) {
    const FailureKind kind = ToFailureKind(error.status());
    Answer answer = Finish(protocol::ErrorResponse({kind, std::nullopt, "", error.what()}, id, IsLost(kind)));
    answer.fatal = IsLost(kind);
    return answer;
  }
}

Json Dispatcher::Stats() {
  // Memory is counted after trimming, which takes milliseconds; if a device is stuck, as it is.
  WhileIdle();
  world_.threads().WaitUntil(Clock::now() + std::chrono::seconds(5));
  Json memory = Json::array();
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto info = world_.rank(rank).Memory();
    memory.push_back({{"rank", rank},
                      {"device", world_.devices().at(rank).ordinal},
                      {"held_bytes", info.held_bytes},
                      {"free_bytes", info.free_bytes}});
  }
  const Usage usage = OwnUsage();
  return {{"requests", counts_.requests.load()},
          {"passed", counts_.passed.load()},
          {"failed", counts_.failed.load()},
          {"skipped", counts_.skipped.load()},
          {"errors", counts_.errors.load()},
          {"memory", std::move(memory)},
          {"leaked_allocations", counts_.leaked_allocations},
          {"resident_bytes", usage.resident_bytes},
          {"threads", usage.threads},
          {"fds", usage.fds},
          {"uptime_s", Milliseconds(Clock::now() - options_.started) / 1000}};
}

std::optional<Answer> Dispatcher::Run(const protocol::RequestQueue::Entry& request,
                                      Clock::time_point taken_up) {
  const protocol::RunRequest& run = *request->run();
  const bool only_validate = std::holds_alternative<protocol::ValidateRequest>(request->request()->operation);
  const std::string tag = TagOf(request->id(), counts_.requests);
  const LogTags tags(-1, tag);
  under_way_.Begin(request, taken_up);
  const auto deadline = taken_up + run.deadline;
  if (watchdog_) watchdog_->Arm(deadline);
  std::optional<RunTrace> trace;
  if (!run.trace.empty()) {
    trace.emplace();
    trace->version = options_.version;
    trace->request = tag;
    trace->case_name = run.case_name;
    trace->backend = world_.backend().name();
    trace->transport = world_.backend().transport();
    trace->begin_ns = TraceTime(taken_up);
  }
  RunResult result = Answered([&] {
    if (!only_validate) return RunOnRanks(request, tag, deadline, trace ? &*trace : nullptr);
    PrepareRun(run, deadline);
    RunResult would_run;
    would_run.status = Status::kPassed;
    return would_run;
  });
  if (watchdog_ && !watchdog_->Disarm()) return std::nullopt;
  if (request->control.Close()) MarkCancelled(result, *request);
  result.wall_ms = Milliseconds(Clock::now() - taken_up);
  const bool would_run = only_validate && result.status == Status::kPassed;
  if (!only_validate) Count(result.status);
  if (Logs(LogLevel::kDebug) && !would_run)
    Log(LogLevel::kDebug, std::string(protocol::ToString(result.status)) + " in " +
                              Rounded(result.wall_ms, 2) + " ms" + (result.error.empty() ? "" : ": ") +
                              result.error);
  Answer answer = FinishLoaded(would_run ? protocol::OkResponse({{"runs", true}}, request->id())
                                         : protocol::ToJson(result, request->id()));
  answer.fatal = result.fatal;
  under_way_.End();
  return answer;
}

std::shared_ptr<const PreparedRun> Dispatcher::PrepareRun(const protocol::RunRequest& request,
                                                          Clock::time_point until,
                                                          std::vector<HostSlice>* host) {
  const HostScope scope(host, "prepare");
  std::vector<const LoadedLibrary*> libraries;
  const CaseRegistry* cases = nullptr;
  {
    const HostScope libraries_scope(host, "open libraries");
    libraries = LoadAll(request.load, LibraryKind::kCases, until, request.digests);
    cases = &CasesWith(libraries);
  }
  std::shared_ptr<PreparedRun> prepared;
  {
    const HostScope check_scope(host, "check parameters");
    prepared = Prepare(*cases, request, world_.backend().name(), world_.size(), MeansOfFaults(), [&] {
      const HostScope libraries_scope(host, "open libraries");
      return LoadKernels(request, until);
    });
  }
  const HostScope memory_scope(host, "check memory");
  world_.FinishTrim();
  if (trim_due_ && !FitsInPieces(*prepared, world_)) {
    WhileIdle();
    world_.FinishTrim();
  }
  CheckMemory(*prepared, world_);
  return prepared;
}

std::optional<FaultMeans> Dispatcher::MeansOfFaults() const {
  if (!options_.allow_faults) return std::nullopt;
  return FaultMeans{options_.sentinel + "{\"ok\": true, \"status\": \"pas", options_.allow_faults};
}

RunResult Dispatcher::RunOnRanks(const protocol::RequestQueue::Entry& incoming, const std::string& tag,
                                 Clock::time_point until, RunTrace* trace) {
  const protocol::RunRequest& request = *incoming->run();
  const auto prepared = PrepareRun(request, until, trace ? &trace->host : nullptr);
  if (incoming->control.cancelled()) return NotRun(FailureKind::kCancelled, "");
  const auto run = std::make_shared<CaseRun>(
      RankRunners{std::make_shared<LocalRanks>(world_, prepared, tag)}, prepared,
      std::shared_ptr<protocol::RunControl>(incoming, &incoming->control), options_.limits);
  under_way_.OnRanks(run);
  leftovers_.BeginRun(libraries_.opened());
  RunResult result = run->Execute(trace ? &trace->host : nullptr);
  if (trace) SaveTrace(prepared->options.trace, *run, *trace, result);
  counts_.leaked_allocations += result.leaks.allocations;
  if (!result.fatal)
    leftovers_.Report(prepared->registered.definition, until - kAnswerTime, result.leaks, result.warnings);
  trim_due_ = !result.fatal;
  if (!result.fatal && (!request.load.empty() || prepared->wanted_kernels.library))
    result.respawn = WhyRespawn();
  under_way_.OnRanks(nullptr);
  return result;
}

void Dispatcher::SaveTrace(const std::string& file, CaseRun& run, RunTrace& trace, RunResult& result) const {
  if (!run.MoveTrace(trace)) return;  // a rank still writes to its part; the answer is fatal
  std::string why;
  try {
    WriteTrace(file, trace);
    if (std::string lacks = DescribeDropped(trace); !lacks.empty())
      result.warnings.push_back(std::move(lacks));
    return;
  } catch (const base::FileError& error) {
    why = std::string("trace: ") + error.what();
  }
  Log(LogLevel::kWarning, why);
  if (result.status != Status::kPassed) return result.warnings.push_back(std::move(why));
  result.status = Status::kError;
  result.error = why;
  result.failure = protocol::Failure{FailureKind::kInternal, std::nullopt, "", why};
}

CrashPlace Dispatcher::PlaceOf(pid_t thread) const {
  CrashPlace place = under_way_.PlaceOf(thread);
  if (std::string opened = libraries_.BeingOpened(); !opened.empty()) place.library = std::move(opened);
  return place;
}

std::string Dispatcher::TimeoutAnswer() const {
  return Finish(under_way_.TimedOut(libraries_.BeingOpened())).text;
}

void Dispatcher::Count(Status status) {
  switch (status) {
    case Status::kPassed:
      ++counts_.passed;
      break;
    case Status::kFailed:
      ++counts_.failed;
      break;
    case Status::kSkipped:
      ++counts_.skipped;
      break;
    case Status::kError:
      ++counts_.errors;
      break;
  }
}

Answer Dispatcher::FinishLoaded(Json response) const {
  return Finish(under_way_.WithLoaded(std::move(response)));
}

Answer Dispatcher::Finish(const Json& response) const {
  Answer answer;
  answer.text = protocol::SerializeResponse(response, options_.sentinel);
  return answer;
}

}  // namespace cppool::daemon
