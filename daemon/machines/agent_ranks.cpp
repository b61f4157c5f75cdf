#include "daemon/machines/agent_ranks.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <future>
#include <optional>

#include "daemon/failure_kind.h"
#include "daemon/prepare.h"
#include "daemon/start_error.h"
#include "kernels/error.h"
#include "protocol/run_record.h"

namespace cppool::daemon {
namespace {

using namespace std::chrono_literals;
using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;

constexpr std::chrono::seconds kMemoryLimit{12};  // more than FrameSocket::kSilence
constexpr std::chrono::milliseconds kBeforeDeadline{100}, kWayBack{20};

// When an agent that has not answered is named, before the watchdog answers.
AgentRanks::Clock::time_point ShortlyBefore(AgentRanks::Clock::time_point deadline) {
  const auto left = deadline - AgentRanks::Clock::now();
  return deadline - std::min<AgentRanks::Clock::duration>(kBeforeDeadline, left / 8);
}

}  // namespace

AgentRanks::AgentRanks(UnderWay& under_way, Agents& agents, Options options, Clock::time_point limit)
    : under_way_(under_way), agents_(agents), options_(std::move(options)) {
  Open(limit);
  try {
    protocol::ListRequest given;
    given.load = options_.case_files;
    case_digests_ = libraries_.Send(given.load, {}, agents_, limit);
    if (!given.load.empty()) Cases(given, limit);
  } catch (const Refusal& refusal) {
    throw StartError(std::string("--case ") + refusal.what(), refusal.kind());
  }
  agents_.Opened();
}

void AgentRanks::Open(Clock::time_point limit) {
  const auto& agents = agents_.links();
  agents_.SendPlaces(options_.agent);
  std::vector<Json> frames;
  for (const auto& agent : agents) frames.push_back(agents_.NextOfStart(*agent, limit));
  const auto kind = [](const Json& frame) { return std::pair(frame.at("frame"), frame.value("what", "")); };
  for (const Json& frame : frames)
    if (kind(frame) != kind(frames.front()))
      throw StartError("the nodes have different backends: name one with --backend");
  if (frames.front().at("frame") == "exchange") {
    Json all = Json::array();
    for (const Json& frame : frames) all.push_back(frame.at("data"));
    for (const auto& agent : agents) agent->Send({{"frame", "exchanged"}, {"all", all}});
    for (std::size_t i = 0; i < agents.size(); ++i) frames[i] = agents_.NextOfStart(*agents[i], limit);
  }
  backend_ = frames.front().at("backend");
  transport_ = frames.front().at("transport");
  for (std::size_t i = 0; i < agents.size(); ++i) try {
      if (frames[i].at("backend") != backend_ || frames[i].at("transport") != transport_)
        throw StartError("the nodes have different backends: " + backend_ + " on " + agents.front()->node() +
                         ", " + frames[i].at("backend").get<std::string>() + " on " + agents[i]->node() +
                         ": name one with --backend");
      for (Json device : frames[i].at("devices")) {
        device["node"] = agents[i]->node();
        devices_.push_back(std::move(device));
      }
      nccl_.push_back(frames[i].at("nccl"));
      for (const auto& [stage, ms] : frames[i].at("init_ms").items())  // the slowest one's
        init_ms_[stage] = std::max(init_ms_.value(stage, 0.0), ms.get<double>());
    } catch (const Json::exception& error) {
      throw StartError(agents[i]->Name() + " has sent a frame `ready` that cannot be read: " + error.what(),
                       FailureKind::kInternal);
    }
}

Json AgentRanks::Hello() const {
  Json nodes = agents_.Nodes();
  for (std::size_t i = 0; i < nodes.size(); ++i) nodes[i]["nccl"] = nccl_.at(i);
  return {{"world_size", options_.world_size},
          {"backend", backend_},
          {"transport", transport_},
          {"devices", devices_},
          {"ranks", "threads"},
          {"nodes", std::move(nodes)}};
}

std::vector<std::string_view> AgentRanks::Features() const {
  std::vector<std::string_view> features;
  protocol::ForEach(protocol::kRunMembers, [&](const auto& member) {
    const std::string_view name = member.name;
    const bool here = options_.allow_faults || name != "fault";
    const bool other = std::count(protocol::kOfProcesses.begin(), protocol::kOfProcesses.end(), name) > 0;
    if (member.sent == protocol::Sent::kUnlessDefault && here && !other) features.push_back(member.name);
  });
  return features;
}

void AgentRanks::SendLibraries(const std::vector<std::string>& named, std::vector<std::string>& load,
                               std::map<std::string, std::string>& digests, Clock::time_point until) {
  std::vector<std::string> all = named;
  for (const auto& [file, digest] : case_digests_) {
    if (std::count(named.begin(), named.end(), file) > 0) continue;
    all.push_back(file);
    load.push_back(file);
    digests.emplace(file, digest);
  }
  digests = libraries_.Send(all, std::move(digests), agents_, until);
}

Json AgentRanks::Cases(const protocol::ListRequest& request, Clock::time_point until) {
  const Agents::Busy busy(agents_);
  protocol::ListRequest all = request;
  std::map<std::string, std::string> digests;
  SendLibraries(request.load, all.load, digests, until);
  const std::vector<Json> answers =
      agents_.AskAll({{"frame", "cases"}, {"load", all.load}, {"digests", digests}}, until);
  ThrowRefusal(answers, agents_);
  return answers.front().at("cases");
}

std::vector<Json> AgentRanks::Prepare(const protocol::RunRequest& request, Clock::time_point until) {
  CheckTrace(request.trace);
  if (!request.python.empty())
    throw Refusal(FailureKind::kInvalidRequest,
                  "the ranks of this daemon are threads of agents: a case in Python needs a daemon with "
                  "--python (PoolOptions::python)");
  protocol::RunRequest sent = request;
  std::map<std::string, std::string> digests = std::exchange(sent.digests, {});
  SendLibraries(protocol::NamedLibraries(request), sent.load, digests, until);
  const std::string& own = options_.kernels.path;
  std::optional<Refusal> not_sent;  // which matters to cases that choose kernels alone
  if (!request.choice.named() && options_.kernels.from == protocol::KernelChoice::From::kLibrary) {
    try {
      digests = libraries_.Send({own}, digests, agents_, until);
    } catch (const Refusal& refusal) {
      not_sent = refusal;
    }
  }
  const auto left =
      std::max(std::chrono::duration_cast<std::chrono::milliseconds>(until - kWayBack - Clock::now()), 1ms);
  const std::vector<Json> answers =
      agents_.AskAll({{"frame", "prepare"},
                      {"request", protocol::SerializeRequest({std::nullopt, sent})},
                      {"digests", digests},
                      {"limit_ms", left.count()}},
                     until);
  const auto looked_at_its_path = [&](const Json& answer) {
    if (answer.contains("kind")) return answer.value("error", "").find(own) != std::string::npos;
    return std::ranges::any_of(answer.at("loaded"),
                               [&](const Json& library) { return library.at(1) == own; });
  };
  if (not_sent && std::ranges::any_of(answers, looked_at_its_path)) throw *not_sent;
  ThrowRefusal(answers, agents_);
  for (const Json& library : answers.front().at("loaded"))
    under_way_.Loaded(static_cast<LibraryKind>(library.at(0).get<int>()), library.at(1), library.at(2));
  return answers;
}

void AgentRanks::Validate(const protocol::RunRequest& request, Clock::time_point until) {
  const Agents::Busy busy(agents_);
  Prepare(request, ShortlyBefore(until));
}

RunResult AgentRanks::Run(const protocol::RequestQueue::Entry& incoming, const std::string&,
                          Clock::time_point until, RunTrace* trace) {
  const Agents::Busy busy(agents_);
  const protocol::RunRequest& request = *incoming->run();
  const Json first = Prepare(request, ShortlyBefore(until)).front();
  if (incoming->control.cancelled()) throw Refusal(FailureKind::kCancelled, "");
  auto prepared = std::make_shared<PreparedRun>();
  prepared->registered.name = request.case_name;
  prepared->registered.library = first.at("library");
  prepared->options = request;
  if (first.at("seed").is_number()) prepared->seed = first.at("seed").get<std::uint64_t>();
  prepared->kernels = first.at("kernels");
  prepared->warnings = first.at("warnings").get<std::vector<std::string>>();

  RankRunners runners;
  for (const auto& agent : agents_.links())
    runners.push_back(std::make_shared<AgentRunner>(*agent, agents_, number_ + 1));
  number_ += 2;
  const auto run = std::make_shared<CaseRun>(
      std::move(runners), prepared, std::shared_ptr<protocol::RunControl>(incoming, &incoming->control),
      options_.limits);
  under_way_.OnRanks(run);
  if (trace) {
    trace->backend = backend_;
    trace->transport = transport_;
    trace->clocks = agents_.Clocks(until);
  }
  RunResult result = run->Execute(trace ? &trace->host : nullptr);
  if (trace) run->SaveTrace(*trace, result);
  if (!result.fatal) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    const std::vector<Json> ends = agents_.AskAll({{"frame", "finish"}, {"limit_ms", left.count()}}, until);
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const Json& end = ends[i];
      result.leaks.host_bytes += end.at("host_bytes").get<std::uint64_t>();
      result.leaks.threads += end.at("threads").get<std::uint64_t>();
      result.leaks.fds += end.at("fds").get<std::uint64_t>();
      result.leaks.processes += end.at("processes").get<std::uint64_t>();
      for (const std::string warning : end.at("warnings"))
        result.warnings.push_back("node " + agents_.links()[i]->node() + ": " + warning);
      if (result.respawn.empty()) result.respawn = end.at("respawn");
    }
  }
  under_way_.OnRanks(nullptr);
  return result;
}

void AgentRanks::WhileIdle() {
  agents_.CheckGone();  // of an agent that went after its last answer
  for (const auto& agent : agents_.links()) agent->Send({{"frame", "trim"}});
}

Json AgentRanks::Memory() {
  const Agents::Busy busy(agents_);
  Json memory = Json::array();
  for (const Json& answer : agents_.AskAll({{"frame", "memory"}}, Clock::now() + kMemoryLimit))
    for (const Json& rank : answer.at("memory")) memory.push_back(rank);
  return memory;
}

}  // namespace cppool::daemon
