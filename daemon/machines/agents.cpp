#include "daemon/machines/agents.h"

#include <algorithm>
#include <cstddef>
#include <future>
#include <limits>
#include <utility>

#include "daemon/failure_kind.h"
#include "daemon/prepare.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;

// Together less than the 5 s after which a client that has sent SIGTERM sends SIGKILL.
constexpr std::chrono::seconds kCloseLimit{3}, kTermination{1};
constexpr std::chrono::milliseconds kStartCheck{100};
constexpr int kClockQuestions = 10;

}  // namespace

FailureKind KindIn(const Json& answer) {
  return protocol::ParseFailureKind(answer.value("kind", "")).value_or(FailureKind::kInternal);
}

void ThrowRefusal(const std::vector<Json>& answers, const Agents& agents) {
  const auto refuses = [](const Json& answer) { return answer.contains("kind"); };
  const auto first = std::find_if(answers.begin(), answers.end(), refuses);
  if (first == answers.end()) return;
  const bool all = std::all_of(answers.begin(), answers.end(), refuses);
  const AgentLink& agent = *agents.links()[static_cast<std::size_t>(first - answers.begin())];
  const FailureKind kind = KindIn(*first);
  const std::string text = (all ? "" : agent.Name() + ": ") + first->value("error", "refused");
  if (kind == FailureKind::kCuda || kind == FailureKind::kNccl)
    throw kernels::RuntimeError(StatusOf(kind), text);
  throw Refusal(kind, text, all ? "" : agent.node());
}

void Agents::Start(Clock::time_point limit) {
  std::vector<GreetedAgent> come = GatherAgents(
      [this](const auto& agent, const auto& environment) -> Launcher& { return Launch(agent, environment); },
      options_.world_size, options_.version, limit);
  const int ranks = options_.world_size / static_cast<int>(come.size());
  for (GreetedAgent& agent : come) {
    const kernels::Place place(options_.world_size, agent.index * ranks, ranks);
    const std::size_t index = links_.size();
    AgentLink::Events events;
    events.gone = [this](const AgentLink& lost, const std::string& why) {
      {
        const std::lock_guard lock(losing_);
        if (!first_lost_) first_lost_.emplace(lost.Name() + " is lost: " + why, lost.node());
      }
      if (busy_ == 0) CheckGone();
    };
    events.write = [this](const std::string& text) {
      if (options_.write_answer) options_.write_answer(text);
    };
    events.tell = [this, index](const Json& news) { TellOthers(index, news); };
    links_.push_back(std::make_unique<AgentLink>(std::move(agent), place, std::move(events)));
  }
}

Json Agents::Nodes() const {
  Json nodes = Json::array();
  for (const auto& agent : links_) {
    Json ranks = Json::array();
    for (int i = 0; i < agent->place().ranks; ++i) ranks.push_back(agent->place().first + i);
    nodes.push_back({{"node", agent->node()}, {"pid", agent->pid()}, {"ranks", std::move(ranks)}});
  }
  return nodes;
}

void Agents::SendPlaces(const Json& members) {
  for (const auto& agent : links_) {
    Json frame = members;
    frame["frame"] = "place";
    frame["index"] = agent->place().first / agent->place().ranks;
    frame["agents"] = links_.size();
    frame["world_size"] = options_.world_size;
    agent->Send(frame);
  }
}

Json Agents::NextOfStart(AgentLink& agent, Clock::time_point limit) {
  for (;;) {
    if (auto frame = agent.NextOfStart(std::min(limit, Clock::now() + kStartCheck))) return *std::move(frame);
    CheckStart();  // this one may wait for another that cannot start
    if (Clock::now() >= limit)
      throw StartError(agent.Name() + " did not start in time", FailureKind::kTimeout);
  }
}

// The cause first: NCCL fails where another agent has gone.
void Agents::CheckStart() const {
  for (const auto& agent : links_) {
    if (agent->Gone().empty() || agent->Unstarted()) continue;
    const auto ended = launcher().Ended(Clock::now() + std::chrono::milliseconds(200));
    throw StartError(agent->Name() + " was lost during its start: " + agent->Gone() +
                         (ended ? "; the launcher " + launcher().name() + " " + *ended : ""),
                     FailureKind::kInternal);
  }
  for (const bool of_nccl : {false, true}) {
    for (const auto& agent : links_) {
      const auto frame = agent->Unstarted();
      if (!frame || (KindIn(*frame) == FailureKind::kNccl) != of_nccl) continue;
      StartError error("node " + agent->node() + ": " + frame->value("error", ""), KindIn(*frame));
      error.detail = frame->value("detail", "");
      if (frame->value("rank", Json()).is_number_integer()) error.rank = frame->at("rank").get<int>();
      throw error;
    }
  }
}

void Agents::Opened() {
  const std::lock_guard lock(telling_);
  tells_ = true;
  --busy_;
}

void Agents::TellOthers(std::size_t from, const Json& news) {
  const std::lock_guard lock(telling_);
  for (std::size_t i = 0; tells_ && i < links_.size(); ++i)
    if (i != from) links_[i]->Send(news);
}

std::vector<Json> Agents::AskAll(const Json& frame, Clock::time_point until) {
  std::vector<std::future<std::optional<Json>>> asked;
  for (const auto& agent : links_)
    asked.push_back(
        std::async(std::launch::async, [&agent = *agent, &frame, until] { return agent.Ask(frame, until); }));
  std::vector<Json> answers;
  std::vector<const AgentLink*> missing;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    auto answer = asked[i].get();
    if (!answer) missing.push_back(links_[i].get());
    answers.push_back(answer ? std::move(*answer) : Json());
  }
  if (missing.empty()) return answers;
  if (const auto lost = FindLost()) throw RanksLost(*lost);
  std::string names;
  for (const AgentLink* agent : missing) names += (names.empty() ? "" : ", ") + agent->Name();
  throw RanksLost(names + (missing.size() == 1 ? " has" : " have") + " not answered in time",
                  missing.size() == 1 ? missing.front()->node() : "", FailureKind::kTimeout);
}

std::map<std::string, NodeClock> Agents::Clocks(Clock::time_point until) {
  std::map<std::string, NodeClock> clocks;
  for (const auto& agent : links_) {
    NodeClock best{0, std::numeric_limits<std::int64_t>::max()};
    for (int i = 0; i < kClockQuestions; ++i) {
      const std::int64_t before = kernels::TraceClockNs();
      const auto answer = agent->Ask({{"frame", "clock"}}, until);
      const std::int64_t after = kernels::TraceClockNs(), error = (after - before) / 2 + 1;
      if (!answer) ThrowLost(*agent, "has not said what time it is");
      if (error < best.error_ns) best = {answer->at("ns").get<std::int64_t>() - before - error, error};
    }
    clocks[agent->node()] = best;
  }
  return clocks;
}

std::optional<RanksLost> Agents::FindLost() const {
  const std::lock_guard lock(losing_);
  return first_lost_;
}

void Agents::ThrowLost(const AgentLink& agent, const std::string& has_not) const {
  if (const auto lost = FindLost()) throw RanksLost(*lost);
  throw RanksLost(agent.Name() + " " + has_not, agent.node(), FailureKind::kTimeout);
}

void Agents::CheckGone() const {
  if (const auto lost = FindLost(); lost && options_.lost) options_.lost(lost->what());
}

void Agents::Close() {
  ++busy_;
  for (const auto& agent : links_) agent->Send({{"frame", "close"}});
  launcher().End(Clock::now() + kCloseLimit, kTermination);
}

Launcher& Agents::Launch(const std::vector<std::string>& agent, const std::vector<std::string>& environment) {
  const std::lock_guard lock(launching_);
  if (given_up_) throw StartError("the head ends", protocol::FailureKind::kInternal);
  launcher_ = new Launcher(options_.words, agent, environment);
  return launcher();
}

void Agents::EndLauncher() {
  ++busy_;
  {
    const std::lock_guard lock(launching_);  // it may be about to start
    given_up_ = true;
  }
  if (Launcher* const launcher = launcher_) launcher->End(Clock::now());
}

void Agents::EndUnstarted() {
  ++busy_;
  if (Launcher* const launcher = launcher_) launcher->End(Clock::now(), kTermination);
}

}  // namespace cppool::daemon
