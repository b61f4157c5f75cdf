#include "daemon/machines/agent_ranks.h"

#include <algorithm>
#include <cstddef>
#include <future>

#include "daemon/failure_kind.h"
#include "daemon/prepare.h"
#include "daemon/start_error.h"
#include "kernels/error.h"
#include "protocol/run_record.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;

constexpr std::chrono::seconds kCloseLimit{10}, kMemoryLimit{10};
constexpr std::chrono::milliseconds kStartCheck{100};

FailureKind KindIn(const Json& answer) {
  return protocol::ParseFailureKind(answer.value("kind", "")).value_or(FailureKind::kInternal);
}

// Throws what the agents have refused the request for: with the node, where not all of them have.
void ThrowRefusal(const std::vector<Json>& answers, const std::vector<std::unique_ptr<AgentLink>>& agents) {
  const auto refuses = [](const Json& answer) { return answer.contains("kind"); };
  const auto first = std::find_if(answers.begin(), answers.end(), refuses);
  if (first == answers.end()) return;
  const bool all = std::all_of(answers.begin(), answers.end(), refuses);
  const std::string node =
      all ? "" : "node " + agents[static_cast<std::size_t>(first - answers.begin())]->node() + ": ";
  const FailureKind kind = KindIn(*first);
  const std::string text = node + first->value("error", "refused");
  if (kind == FailureKind::kCuda || kind == FailureKind::kNccl || kind == FailureKind::kInternal)
    throw kernels::RuntimeError(StatusOf(kind), text);
  throw Refusal(kind, text);
}

}  // namespace

class AgentRanks::Busy {
 public:
  explicit Busy(AgentRanks& ranks) : ranks_(ranks) { ++ranks_.busy_; }
  ~Busy() { --ranks_.busy_; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  AgentRanks& ranks_;
};

struct AgentRanks::Lost : kernels::RuntimeError {
  Lost(const std::string& text, std::string on_node)
      : RuntimeError(CPPOOL_INTERNAL, text), node(std::move(on_node)) {}
  std::string node;
};

AgentRanks::AgentRanks(UnderWay& under_way, Options options, Clock::time_point limit)
    : under_way_(under_way), options_(std::move(options)) {
  Gathered gathered = GatherAgents(options_.words, options_.world_size, options_.version, limit);
  launcher_ = std::move(gathered.launcher);
  const int ranks = options_.world_size / static_cast<int>(gathered.agents.size());
  for (GreetedAgent& agent : gathered.agents) {
    const kernels::Place place(options_.world_size, agent.index * ranks, ranks);
    const std::size_t index = agents_.size();
    AgentLink::Events events;
    events.gone = [this] {
      if (busy_ == 0) TakeGone();
    };
    events.write = [this](const std::string& text) {
      if (options_.write_answer) options_.write_answer(text);
    };
    events.tell = [this, index](const Json& news) { TellOthers(index, news); };
    agents_.push_back(std::make_unique<AgentLink>(std::move(agent), place, std::move(events)));
  }
  Open(limit);
  try {
    protocol::ListRequest given;
    given.load = options_.case_files;
    case_digests_ = libraries_.Send(given.load, {}, agents_, limit);
    if (!given.load.empty()) Cases(given, limit);
  } catch (const Refusal& refusal) {
    throw StartError(std::string("--case ") + refusal.what(), refusal.kind());
  }
  const std::lock_guard lock(telling_);
  tells_ = true;
  --busy_;
}

AgentRanks::~AgentRanks() {
  ++busy_;
  for (const auto& agent : agents_) agent->Shut();
  {
    const std::lock_guard lock(telling_);
    tells_ = false;
  }
  agents_.clear();
  launcher_.reset();
}

Json AgentRanks::NextOfStart(AgentLink& agent, Clock::time_point limit) {
  for (;;) {
    if (auto frame = agent.NextOfStart(std::min(limit, Clock::now() + kStartCheck))) return *std::move(frame);
    CheckStart();  // this one may wait for another that cannot start
    if (Clock::now() >= limit)
      throw StartError(agent.Name() + " did not start in time", FailureKind::kTimeout);
  }
}

// The cause first: NCCL fails where another agent has gone.
void AgentRanks::CheckStart() const {
  for (const auto& agent : agents_) {
    if (agent->Gone().empty() || agent->Unstarted()) continue;
    const auto launcher = launcher_->Ended(Clock::now() + std::chrono::milliseconds(200));
    throw StartError(agent->Name() + " was lost during its start: " + agent->Gone() +
                         (launcher ? "; the launcher " + launcher_->name() + " " + *launcher : ""),
                     FailureKind::kInternal);
  }
  for (const bool of_nccl : {false, true}) {
    for (const auto& agent : agents_) {
      const auto frame = agent->Unstarted();
      if (!frame || (KindIn(*frame) == FailureKind::kNccl) != of_nccl) continue;
      StartError error("node " + agent->node() + ": " + frame->value("error", ""), KindIn(*frame));
      error.detail = frame->value("detail", "");
      if (frame->value("rank", Json()).is_number_integer()) error.rank = frame->at("rank").get<int>();
      throw error;
    }
  }
}

void AgentRanks::TellOthers(std::size_t from, const Json& news) {
  const std::lock_guard lock(telling_);
  for (std::size_t i = 0; tells_ && i < agents_.size(); ++i)
    if (i != from) agents_[i]->Send(news);
}

void AgentRanks::Open(Clock::time_point limit) {
  for (const auto& agent : agents_) {
    Json frame = options_.agent;
    frame["frame"] = "place";
    frame["index"] = agent->place().first / agent->place().ranks;
    frame["agents"] = agents_.size();
    frame["world_size"] = options_.world_size;
    agent->Send(frame);
  }
  std::vector<Json> frames;
  for (const auto& agent : agents_) frames.push_back(NextOfStart(*agent, limit));
  const auto kind = [](const Json& frame) { return std::pair(frame.at("frame"), frame.value("what", "")); };
  for (const Json& frame : frames)
    if (kind(frame) != kind(frames.front()))
      throw StartError("the nodes have different backends: name one with --backend");
  if (frames.front().at("frame") == "exchange") {
    Json all = Json::array();
    for (const Json& frame : frames) all.push_back(frame.at("data"));
    for (const auto& agent : agents_) agent->Send({{"frame", "exchanged"}, {"all", all}});
    for (std::size_t i = 0; i < agents_.size(); ++i) frames[i] = NextOfStart(*agents_[i], limit);
  }
  backend_ = frames.front().at("backend");
  transport_ = frames.front().at("transport");
  for (std::size_t i = 0; i < agents_.size(); ++i) {
    if (frames[i].at("backend") != backend_ || frames[i].at("transport") != transport_)
      throw StartError("the nodes have different backends: " + backend_ + " on " + agents_.front()->node() +
                       ", " + frames[i].at("backend").get<std::string>() + " on " + agents_[i]->node() +
                       ": name one with --backend");
    for (Json device : frames[i].at("devices")) {
      device["node"] = agents_[i]->node();
      devices_.push_back(std::move(device));
    }
    nccl_.push_back(frames[i].at("nccl"));
    for (const auto& [stage, ms] : frames[i].at("init_ms").items())  // the slowest one's
      init_ms_[stage] = std::max(init_ms_.value(stage, 0.0), ms.get<double>());
  }
}

void AgentRanks::TakeGone() {
  for (const auto& agent : agents_)
    if (const std::string why = agent->Gone(); !why.empty() && options_.lost)
      return options_.lost(agent->Name() + " is lost: " + why);
}

Json AgentRanks::Hello() const {
  Json nodes = Json::array();
  for (std::size_t index = 0; index < agents_.size(); ++index) {
    const auto& agent = agents_[index];
    Json ranks = Json::array();
    for (int i = 0; i < agent->place().ranks; ++i) ranks.push_back(agent->place().first + i);
    nodes.push_back({{"node", agent->node()},
                     {"pid", agent->pid()},
                     {"ranks", std::move(ranks)},
                     {"nccl", nccl_.at(index)}});
  }
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
    const bool here = name != "trace" && (options_.allow_faults || name != "fault");
    const bool other = std::count(protocol::kOfProcesses.begin(), protocol::kOfProcesses.end(), name) > 0;
    if (member.sent == protocol::Sent::kUnlessDefault && here && !other) features.push_back(member.name);
  });
  return features;
}

std::vector<Json> AgentRanks::AskAll(const Json& frame, Clock::time_point until) {
  std::vector<std::future<std::optional<Json>>> asked;
  for (const auto& agent : agents_)
    asked.push_back(
        std::async(std::launch::async, [&agent = *agent, &frame, until] { return agent.Ask(frame, until); }));
  std::vector<Json> answers;
  std::string missing, node;
  for (std::size_t i = 0; i < agents_.size(); ++i) {
    auto answer = asked[i].get();
    if (!answer && missing.empty()) {
      const std::string gone = agents_[i]->Gone();
      node = agents_[i]->node();
      missing = agents_[i]->Name() + (gone.empty() ? " has not answered in time" : " is lost: " + gone);
    }
    answers.push_back(answer ? std::move(*answer) : Json());
  }
  if (!missing.empty()) throw Lost(missing, node);
  return answers;
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
  const Busy busy(*this);
  protocol::ListRequest all = request;
  std::map<std::string, std::string> digests;
  SendLibraries(request.load, all.load, digests, until);
  const std::vector<Json> answers =
      AskAll({{"frame", "cases"}, {"load", all.load}, {"digests", digests}}, until);
  ThrowRefusal(answers, agents_);
  return answers.front().at("cases");
}

std::vector<Json> AgentRanks::Prepare(const protocol::RunRequest& request, Clock::time_point until) {
  if (!request.trace.empty())
    throw Refusal(FailureKind::kUnsupported, "\"trace\" is for ranks of one process: leave out --launch");
  if (!request.python.empty())
    throw Refusal(FailureKind::kInvalidRequest,
                  "the ranks of this daemon are threads of agents: a case in Python needs a daemon with "
                  "--python (PoolOptions::python) and without --launch");
  protocol::RunRequest with_digests = request;
  SendLibraries(protocol::NamedLibraries(request), with_digests.load, with_digests.digests, until);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
  const std::vector<Json> answers =
      AskAll({{"frame", "prepare"},
              {"request", protocol::SerializeRequest({std::nullopt, with_digests})},
              {"limit_ms", left.count()}},
             until);
  ThrowRefusal(answers, agents_);
  for (const Json& library : answers.front().at("loaded"))
    under_way_.Loaded(static_cast<LibraryKind>(library.at(0).get<int>()), library.at(1), library.at(2));
  return answers;
}

void AgentRanks::Validate(const protocol::RunRequest& request, Clock::time_point until) {
  const Busy busy(*this);
  Prepare(request, until);
}

RunResult AgentRanks::Run(const protocol::RequestQueue::Entry& incoming, const std::string&,
                          Clock::time_point until, RunTrace*) try {
  const Busy busy(*this);
  const protocol::RunRequest& request = *incoming->run();
  const Json first = Prepare(request, until).front();
  if (incoming->control.cancelled()) throw Refusal(FailureKind::kCancelled, "");
  auto prepared = std::make_shared<PreparedRun>();
  prepared->registered.name = request.case_name;
  prepared->registered.library = first.at("library");
  prepared->options = request;
  if (first.at("seed").is_number()) prepared->seed = first.at("seed").get<std::uint64_t>();
  prepared->kernels = first.at("kernels");
  prepared->warnings = first.at("warnings").get<std::vector<std::string>>();

  RankRunners runners;
  for (const auto& agent : agents_)
    runners.push_back(std::make_shared<AgentRunner>(*agent, *launcher_, number_ + 1));
  number_ += 2;
  const auto run = std::make_shared<CaseRun>(
      std::move(runners), prepared, std::shared_ptr<protocol::RunControl>(incoming, &incoming->control),
      options_.limits);
  under_way_.OnRanks(run);
  RunResult result = run->Execute();
  if (!result.fatal) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    const std::vector<Json> ends = AskAll({{"frame", "finish"}, {"limit_ms", left.count()}}, until);
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const Json& end = ends[i];
      result.leaks.host_bytes += end.at("host_bytes").get<std::uint64_t>();
      result.leaks.threads += end.at("threads").get<std::uint64_t>();
      result.leaks.fds += end.at("fds").get<std::uint64_t>();
      result.leaks.processes += end.at("processes").get<std::uint64_t>();
      for (const std::string warning : end.at("warnings"))
        result.warnings.push_back("node " + agents_[i]->node() + ": " + warning);
      if (result.respawn.empty()) result.respawn = end.at("respawn");
    }
  }
  under_way_.OnRanks(nullptr);
  return result;
} catch (const Lost& lost) {
  RunResult result;
  result.status = protocol::Status::kError;
  result.error = lost.what();
  result.failure = protocol::Failure{FailureKind::kInternal, std::nullopt, "", lost.what()};
  result.failure->node = lost.node;
  result.fatal = true;
  under_way_.OnRanks(nullptr);
  return result;
}

void AgentRanks::WhileIdle() {
  TakeGone();  // of an agent that went after its last answer
  for (const auto& agent : agents_) agent->Send({{"frame", "trim"}});
}

Json AgentRanks::Memory() {
  const Busy busy(*this);
  Json memory = Json::array();
  for (const Json& answer : AskAll({{"frame", "memory"}}, Clock::now() + kMemoryLimit))
    for (const Json& rank : answer.at("memory")) memory.push_back(rank);
  return memory;
}

void AgentRanks::Close() {
  ++busy_;  // from here on they go
  for (const auto& agent : agents_) agent->Send({{"frame", "close"}});
  launcher_->End(Clock::now() + kCloseLimit);
}

void AgentRanks::EndLauncher() {
  ++busy_;
  launcher_->End(Clock::now());
}

}  // namespace cppool::daemon
