#include "daemon/dispatcher.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <variant>
#include <vector>

#include "base/file_cache.h"
#include "daemon/failure_kind.h"
#include "daemon/library.h"
#include "daemon/log.h"
#include "daemon/prepare.h"
#include "daemon/process.h"
#include "daemon/start_error.h"
#include "kernels/error.h"
#include "protocol/features.h"
#include "protocol/kernel_words.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;
using protocol::Status;

constexpr std::size_t kLongestTag = 40;
constexpr std::chrono::seconds kListLimit{30};  // for the libraries of `list`, which has no deadline
// Before the deadline: to answer that a library did not open, or what a case has left.
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
      leftovers_(world) {}

std::optional<Answer> Dispatcher::Handle(const protocol::LineReader::Line& line) {
  const auto taken_up = Clock::now();
  ++counts_.requests;
  std::optional<protocol::Request> parsed;
  try {
    if (line.overlong) {
      throw protocol::RequestError("a request line has at most " +
                                       std::to_string(protocol::kMaxRequestBytes) + " bytes; this one has " +
                                       std::to_string(line.text.size() + line.dropped),
                                   std::nullopt);
    }
    parsed = protocol::ParseRequest(line.text);
  } catch (const protocol::RequestError& error) {
    ++counts_.errors;
    return Finish(
        protocol::ErrorResponse({FailureKind::kInvalidRequest, std::nullopt, "", error.what()}, error.id));
  }
  const protocol::Request& request = *parsed;
  if (const auto* run = std::get_if<protocol::RunRequest>(&request.operation))
    return Run(request, *run, false, taken_up);
  if (const auto* validate = std::get_if<protocol::ValidateRequest>(&request.operation))
    return Run(request, validate->run, true, taken_up);
  if (std::holds_alternative<protocol::HelloRequest>(request.operation))
    return Finish(protocol::OkResponse(Hello(), request.id));
  if (const auto* list = std::get_if<protocol::ListRequest>(&request.operation))
    return List(*list, request.id, taken_up);
  if (std::holds_alternative<protocol::StatsRequest>(request.operation)) return AnswerStats(request.id);
  Answer answer = Finish(protocol::OkResponse(Json::object(), request.id));
  answer.shutdown = true;
  return answer;
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
  for (const auto& feature : protocol::kFeatures) {
    if (feature.name != protocol::kFaultFeature || options_.allow_faults) features.push_back(feature.name);
  }
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
  try {
    for (const auto& [name, registered] :
         CasesWith(LoadAll(request.load, LibraryKind::kCases, taken_up + kListLimit, {})).all()) {
      Json parameters = Json::array();
      for (const auto& spec : registered.schema) parameters.push_back(protocol::ToJson(spec));
      cases.push_back({{"name", name}, {"doc", registered.doc}, {"parameters", std::move(parameters)}});
    }
  } catch (const Refusal& refusal) {
    ++counts_.errors;
    return Finish(protocol::ErrorResponse({refusal.kind(), std::nullopt, "", refusal.what()}, id));
  }
  return Finish(protocol::OkResponse({{"cases", std::move(cases)}}, id));
}

std::vector<const LoadedLibrary*> Dispatcher::LoadAll(const std::vector<std::string>& files, LibraryKind kind,
                                                      Clock::time_point until,
                                                      const std::map<std::string, std::string>& digests) {
  if (files.empty()) return {};
  libraries_opened_ = true;
  world_.FinishTrim();  // no rank works while code is loaded
  if (beside_pools_.empty()) beside_pools_ = MemoryBesidePools();
  std::vector<const LoadedLibrary*> libraries;
  try {
    for (const std::string& file : files) {
      const auto wanted = digests.find(file);
      libraries.push_back(
          &libraries_.Load(file, kind, until - kAnswerTime, wanted == digests.end() ? "" : wanted->second));
    }
  } catch (const LibraryError& error) {
    throw Refusal(FailureKind::kInvalidRequest, error.what());
  }
  return libraries;
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
    std::size_t pools = 0;  // of all ranks on this device
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
  return {{"requests", counts_.requests},
          {"passed", counts_.passed},
          {"failed", counts_.failed},
          {"skipped", counts_.skipped},
          {"errors", counts_.errors},
          {"memory", std::move(memory)},
          {"leaked_allocations", counts_.leaked_allocations},
          {"resident_bytes", usage.resident_bytes},
          {"threads", usage.threads},
          {"fds", usage.fds},
          {"uptime_s", Milliseconds(Clock::now() - options_.started) / 1000}};
}

std::optional<Answer> Dispatcher::Run(const protocol::Request& request, const protocol::RunRequest& run,
                                      bool only_validate, Clock::time_point taken_up) {
  const std::string tag = TagOf(request.id, counts_.requests);
  const LogTags tags(-1, tag);
  {
    const std::lock_guard lock(under_way_mutex_);
    under_way_ = {
        request.id,    std::chrono::milliseconds(run.deadline_ms),
        run.case_name, protocol::ParseKernels(run.kernels.empty() ? options_.kernels : run.kernels).path,
        gettid(),      nullptr};
  }
  const auto deadline = taken_up + std::chrono::milliseconds(run.deadline_ms);
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
    trace->host.push_back({"parse", trace->begin_ns, kernels::TraceClockNs()});
  }
  RunResult result = Answered([&] {
    if (!only_validate) return RunOnRanks(run, tag, deadline, trace ? &*trace : nullptr);
    PrepareRun(run, deadline);
    RunResult would_run;
    would_run.status = Status::kPassed;
    return would_run;
  });
  if (watchdog_ && !watchdog_->Disarm()) return std::nullopt;
  {
    const std::lock_guard lock(under_way_mutex_);
    under_way_.case_name.clear();
  }
  result.wall_ms = Milliseconds(Clock::now() - taken_up);
  if (only_validate && result.status == Status::kPassed)
    return Finish(protocol::OkResponse({{"runs", true}}, request.id));
  if (!only_validate) Count(result.status);
  if (Logs(LogLevel::kDebug))
    Log(LogLevel::kDebug, std::string(protocol::ToString(result.status)) + " in " +
                              Rounded(result.wall_ms, 2) + " ms" + (result.error.empty() ? "" : ": ") +
                              result.error);
  Answer answer = Finish(protocol::ToJson(result, request.id));
  answer.fatal = result.fatal;
  return answer;
}

std::shared_ptr<const PreparedRun> Dispatcher::PrepareRun(const protocol::RunRequest& request,
                                                          Clock::time_point until,
                                                          std::vector<HostSlice>* host) {
  const HostScope scope(host, "prepare");
  std::vector<const LoadedLibrary*> libraries;
  WantedKernels kernels;
  const LoadedLibrary* of_kernels = nullptr;
  const CaseRegistry* cases = nullptr;
  {
    const HostScope libraries_scope(host, "open libraries");
    libraries = LoadAll(request.load, LibraryKind::kCases, until, request.digests);
    cases = &CasesWith(libraries);
    const RegisteredCase* found = cases->Find(request.case_name);
    if (found && (found->features & CPPOOL_CASE_CHOOSES_KERNELS)) {
      kernels.words = request.kernels.empty() ? options_.kernels : request.kernels;
      if (const std::string path = protocol::ParseKernels(kernels.words).path; !path.empty()) {
        of_kernels = LoadAll({path}, LibraryKind::kKernels, until, request.digests).front();
        kernels.copy = of_kernels->copy;
      }
    }
  }
  std::shared_ptr<PreparedRun> prepared;
  {
    const HostScope check_scope(host, "check parameters");
    prepared = Prepare(*cases, request, world_.backend().name(), world_.size(), MeansOfFaults(), kernels);
  }
  for (std::size_t i = 0; i < libraries.size(); ++i)
    prepared->libraries.push_back({request.load[i], libraries[i]->digest});
  if (of_kernels && prepared->kernels.contains("file")) {
    prepared->kernels["file"] = protocol::ParseKernels(kernels.words).path;
    prepared->kernels["digest"] = of_kernels->digest;
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

RunResult Dispatcher::RunOnRanks(const protocol::RunRequest& request, const std::string& tag,
                                 Clock::time_point until, RunTrace* trace) {
  const auto prepared = PrepareRun(request, until, trace ? &trace->host : nullptr);
  const auto run = std::make_shared<CaseRun>(world_, prepared, tag, options_.limits);
  {
    const std::lock_guard lock(under_way_mutex_);
    under_way_.run = run;
  }
  if (std::exchange(libraries_opened_, false)) leftovers_.Forget();  // also by requests before this one
  RunResult result = run->Execute(trace ? &trace->host : nullptr);
  if (trace) SaveTrace(prepared->trace, *run, *trace, result);
  counts_.leaked_allocations += result.leaks.allocations;
  if (!result.fatal)
    leftovers_.Tell(prepared->registered.definition, until - kAnswerTime, result.leaks, result.warnings);
  trim_due_ = !result.fatal;
  result.libraries = prepared->libraries;
  if (!result.fatal && (!request.load.empty() || !prepared->kernels_copy.empty()))
    result.respawn = WhyRespawn();
  const std::lock_guard lock(under_way_mutex_);
  under_way_.run.reset();
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
  UnderWay under_way;
  {
    const std::lock_guard lock(under_way_mutex_);
    under_way = under_way_;
  }
  CrashPlace place = under_way.run ? under_way.run->PlaceOf(thread) : CrashPlace{};
  place.case_name = under_way.case_name;
  if (std::string opened = libraries_.BeingOpened(); !opened.empty()) place.library = std::move(opened);
  return place;
}

std::string Dispatcher::TimeoutAnswer() const {
  UnderWay under_way;
  {
    const std::lock_guard lock(under_way_mutex_);
    under_way = under_way_;
  }
  RunResult result;
  if (under_way.run) {
    result = under_way.run->TimedOut(under_way.deadline);
  } else {
    const std::string opened = libraries_.BeingOpened();
    std::string text = "not finished after " + std::to_string(under_way.deadline.count()) +
                       " ms: the ranks had not started, ";
    text += opened.empty() ? "or had just returned" : "and " + opened + " was being loaded";
    if (opened.empty() && !under_way.kernels.empty())
      text += "; supports of the kernels of " + under_way.kernels + " may not have returned";
    if (const std::string place = PlaceOfThread(under_way.thread); !place.empty()) text += ", in " + place;
    result = NotRun(FailureKind::kTimeout, text);
    result.fatal = true;
  }
  result.wall_ms = static_cast<double>(under_way.deadline.count());
  return protocol::SerializeResponse(protocol::ToJson(result, under_way.id), options_.sentinel);
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

Answer Dispatcher::Finish(const Json& response) const {
  Answer answer;
  answer.text = protocol::SerializeResponse(response, options_.sentinel);
  return answer;
}

}  // namespace cppool::daemon
