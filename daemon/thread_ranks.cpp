#include "daemon/thread_ranks.h"

#include <algorithm>
#include <utility>

#include "base/file_cache.h"
#include "daemon/library.h"
#include "daemon/local_ranks.h"
#include "daemon/log.h"
#include "daemon/start_error.h"
#include "protocol/features.h"
#include "protocol/run_record.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;
using protocol::Status;

// The end of the time to the deadline is for the answer: no library is tried in it, and no thread that a case
// has left is waited for.
constexpr std::chrono::milliseconds kAnswerTime{250};

}  // namespace

ThreadRanks::ThreadRanks(World& world, const CaseRegistry& registry, UnderWay& under_way, Options options)
    : world_(world),
      registry_(registry),
      under_way_(under_way),
      options_(std::move(options)),
      libraries_(options_.libraries),
      leftovers_(world) {}

Json ThreadRanks::Hello() const {
  Json devices = Json::array();
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto& device = world_.devices().at(rank);
    devices.push_back({{"rank", RankAt(rank)},
                       {"name", device.name},
                       {"ordinal", device.ordinal},
                       {"uuid", device.uuid},
                       {"capability", device.capability},
                       {"total_bytes", device.total_bytes}});
  }
  return {{"world_size", world_.size()},
          {"backend", world_.backend().name()},
          {"transport", world_.backend().transport()},
          {"devices", std::move(devices)},
          {"ranks", "threads"}};
}

std::vector<std::string_view> ThreadRanks::Features() const {
  std::vector<std::string_view> features;
  protocol::ForEach(protocol::kRunMembers, [&](const auto& member) {
    const bool allowed = options_.faults || std::string_view(member.name) != "fault";
    const bool other = std::ranges::count(protocol::kOfProcesses, member.name) > 0;
    if (member.sent == protocol::Sent::kUnlessDefault && allowed && !other) features.push_back(member.name);
  });
  return features;
}

Json ThreadRanks::CasesOf(const std::vector<std::string>& load,
                          const std::map<std::string, std::string>& digests, Clock::time_point until) {
  Json cases = Json::array();
  for (const auto& [name, registered] : CasesWith(LoadAll(load, LibraryKind::kCases, until, digests)).all()) {
    Json parameters = Json::array();
    for (const auto& spec : registered.schema) parameters.push_back(protocol::ToJson(spec));
    cases.push_back({{"name", name}, {"doc", registered.doc}, {"parameters", std::move(parameters)}});
  }
  return cases;
}

void ThreadRanks::WhileIdle() {
  if (!std::exchange(trim_due_, false)) return;
  world_.StartTrim();  // only the next run waits for it
}

Json ThreadRanks::Memory() {
  // Memory is counted after trimming, which takes milliseconds; if a device is stuck, as it is.
  WhileIdle();
  world_.threads().WaitUntil(Clock::now() + std::chrono::seconds(5));
  Json memory = Json::array();
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto info = world_.rank(RankAt(rank)).Memory();
    memory.push_back({{"rank", RankAt(rank)},
                      {"device", world_.devices().at(rank).ordinal},
                      {"held_bytes", info.held_bytes},
                      {"free_bytes", info.free_bytes}});
  }
  return memory;
}

std::vector<const LoadedLibrary*> ThreadRanks::LoadAll(const std::vector<std::string>& files,
                                                       LibraryKind kind, Clock::time_point until,
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
      loaded_.push_back({kind, file, libraries.back()->digest});
    }
  } catch (const LibraryError& error) {
    throw Refusal(FailureKind::kInvalidRequest, error.what());
  }
  return libraries;
}

WantedKernels ThreadRanks::LoadKernels(const protocol::RunRequest& request, Clock::time_point until) {
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
      loaded_.push_back({LibraryKind::kKernels, cudnn.path, cudnn.digest});
      return &cudnn.kernels->Find("cudnn", world_.backend().name());
    };
  }
  return wanted;
}

const CaseRegistry& ThreadRanks::CasesWith(const std::vector<const LoadedLibrary*>& libraries) {
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

std::vector<std::size_t> ThreadRanks::MemoryBesidePools() const {
  std::vector<std::size_t> bytes;
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (world_.devices().at(rank).ordinal < 0) return {};
    const auto info = world_.rank(RankAt(rank)).Memory();
    std::size_t pools = 0;  // the bytes in pools of all ranks on this device
    for (int other = 0; other < world_.size(); ++other) {
      if (world_.devices().at(other).ordinal == world_.devices().at(rank).ordinal)
        pools += world_.rank(RankAt(other)).Memory().held_bytes;
    }
    const std::size_t known = info.free_bytes + pools, total = world_.devices().at(rank).total_bytes;
    bytes.push_back(total > known ? total - known : 0);
  }
  return bytes;
}

std::string ThreadRanks::WhyRespawn() const {
  if (libraries_.full())
    return std::to_string(libraries_.size()) +
           " libraries are loaded, as many as may be; a loaded library cannot be unloaded";
  if (beside_pools_.empty()) return "";
  const std::vector<std::size_t> now = MemoryBesidePools();
  for (std::size_t rank = 0; rank < now.size(); ++rank) {
    if (now[rank] > beside_pools_[rank] + options_.most_library_bytes)
      return "since the first library was loaded, " +
             std::to_string((now[rank] - beside_pools_[rank]) >> 20) + " MiB of the memory of rank " +
             std::to_string(RankAt(static_cast<int>(rank))) +
             "'s device were taken beside the cases' allocations; a loaded library cannot be unloaded";
  }
  return "";
}

std::shared_ptr<const PreparedRun> ThreadRanks::PrepareRun(const protocol::RunRequest& request,
                                                           Clock::time_point until,
                                                           std::vector<HostSlice>* host) {
  const HostScope scope(host, "prepare");
  if (!request.python.empty())
    throw Refusal(FailureKind::kInvalidRequest,
                  "the ranks of this daemon are threads: a case in Python needs a daemon with --python "
                  "(PoolOptions::python)");
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
    prepared = Prepare(
        *cases, request, world_.backend().name(), world_.place().world_size, options_.faults,
        [&] {
          const HostScope libraries_scope(host, "open libraries");
          return LoadKernels(request, until);
        },
        [&](double bytes_per_rank) {
          world_.FinishTrim();
          return HasRoom(bytes_per_rank, world_);
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

RunResult ThreadRanks::Run(const protocol::RequestQueue::Entry& incoming, const std::string& tag,
                           Clock::time_point until, RunTrace* trace) {
  const protocol::RunRequest& request = *incoming->run();
  CheckTrace(request.trace);
  if (trace) {
    trace->backend = world_.backend().name();
    trace->transport = world_.backend().transport();
  }
  const auto prepared = PrepareRun(request, until, trace ? &trace->host : nullptr);
  if (incoming->control.cancelled()) throw Refusal(FailureKind::kCancelled, "");
  const auto run = std::make_shared<CaseRun>(
      RankRunners{std::make_shared<LocalRanks>(world_, prepared, tag)}, prepared,
      std::shared_ptr<protocol::RunControl>(incoming, &incoming->control), options_.limits);
  under_way_.OnRanks(run);
  BeginRun();
  RunResult result = run->Execute(trace ? &trace->host : nullptr);
  if (trace) run->SaveTrace(*trace, result);
  if (!result.fatal) EndRun(*prepared, until, result);
  loaded_.clear();
  under_way_.OnRanks(nullptr);
  return result;
}

void ThreadRanks::EndRun(const PreparedRun& prepared, Clock::time_point until, RunResult& result) {
  leftovers_.Report(prepared.registered.definition, until - kAnswerTime, result.leaks, result.warnings);
  trim_due_ = true;
  if (!prepared.options.load.empty() || prepared.wanted_kernels.library) result.respawn = WhyRespawn();
}

}  // namespace cppool::daemon
