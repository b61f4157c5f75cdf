#include "daemon/machines/process_agents.h"

#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "base/hmac.h"
#include "daemon/process_frames.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

using protocol::Json;
using Clock = RankProcess::Clock;

constexpr std::size_t kMostFrames = 256;                 // of a rank that nobody takes
constexpr std::chrono::milliseconds kWayLimit{20};       // between a head and an agent
constexpr std::chrono::milliseconds kWayBackLimit{180};  // less than ProcessRunner waits for it

RankProcess::Place PlaceFrom(const Json& json) {
  const int phase = json.at("phase");
  return {phase >= 0 && phase <= 4 ? static_cast<RankProcess::Phase>(phase) : RankProcess::Phase::kCase,
          json.at("seconds"), json.at("iterations"), json.at("stage")};
}

std::int64_t Until(Clock::time_point limit) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now()).count();
}

}  // namespace

class AgentServers::Rank : public RankProcess {
 public:
  Rank(int rank, AgentLink& agent, std::uint64_t world) : RankProcess(rank), agent_(agent), world_(world) {}

  AgentLink& agent() const { return agent_; }
  std::string node() const override { return agent_.node(); }
  Json About(const char* frame) const { return {{"frame", frame}, {"world", world_}, {"rank", rank_}}; }

  bool Send(const Json& data) override {
    Json frame = About("to_rank");
    frame["data"] = data;
    return !End() && agent_.Send(frame);
  }
  Place Where() const override {
    const std::lock_guard lock(mutex_);
    return place_;
  }

  // What the agent has sent of it; what is no such frame throws.
  void Take(Json frame) {
    const std::lock_guard lock(mutex_);
    if (frame.at("world") != world_ || end_) return;
    if (frame.contains("output")) {
      tail_ = frame.at("output");
      left_out_ = frame.at("left_out");
    }
    if (frame.at("frame") == "ended") {
      stacks_text_ = frame.at("stacks");
      place_ = PlaceFrom(frame.at("place"));
      End(frame.at("how"));
    } else if (frames_.size() < kMostFrames) {
      if (!frame.at("data").is_object()) throw std::runtime_error("it sent what is no frame of a rank");
      frames_.push_back(std::move(frame.at("data")));
    } else if (broken_.empty()) {
      broken_ = "sent more than " + std::to_string(kMostFrames) + " frames that were not asked for; it ";
      agent_.Send(About("kill"));
    }
    changed_.notify_all();
  }
  void BeLost() {
    const std::lock_guard lock(mutex_);
    if (!end_) End("is lost with " + agent_.Name() + ": " + agent_.Gone());
    changed_.notify_all();
  }
  using RankProcess::End;

 private:
  void End(const std::string& how) {
    end_ = broken_ + how;
    over_ = true;  // what is left of it is awaited there, before the next one
  }

  AgentLink& agent_;
  const std::uint64_t world_;
  Place place_;         // under `mutex_`, as the next one
  std::string broken_;  // why it is killed; empty: it is not
};

struct AgentServers::Latest {
  std::mutex mutex;
  std::vector<std::shared_ptr<Rank>> ranks;
};

AgentServers::AgentServers(Agents& agents, std::string python, std::vector<std::string> preload,
                           Clock::time_point limit)
    : agents_(agents),
      digests_([](const std::string&, std::string_view bytes) { return base::Sha256(bytes); }),
      latest_(std::make_shared<Latest>()) {
  std::vector<Json> answers;
  try {
    answers = agents_.AskAll(
        {{"frame", "server"}, {"python", python}, {"preload", preload}, {"limit_ms", Until(limit)}},
        limit + Agents::kAnswerTime);
  } catch (const RanksLost& lost) {
    throw StartError(lost.what(), protocol::FailureKind::kInternal);
  }
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const Json &answer = answers[i], &first = answers.front();
    const auto on = [&](std::size_t index) { return "node " + agents_.links()[index]->node(); };
    if (answer.contains("kind")) throw StartError(on(i) + ": " + TextOf(answer, "error"), KindIn(answer));
    for (const char* version : {"python", "torch"})
      if (answer.at(version) != first.at(version))
        throw StartError(std::string("the nodes have different versions of ") + version + ": " + on(0) + " " +
                         TextOf(first, version) + ", " + on(i) + " " + TextOf(answer, version));
  }
  const Json& first = answers.front();
  info_ = {first.at("python"), first.at("torch"), first.at("preloaded"), first.at("deferred"),
           first.at("import_ms")};
  for (const auto& agent : agents_.links())
    agent->Follow([latest = latest_, &agent = *agent](Json* frame) {
      std::vector<std::shared_ptr<Rank>> ranks;
      {
        const std::lock_guard lock(latest->mutex);
        ranks = latest->ranks;
      }
      for (const auto& rank : ranks) {
        if (&rank->agent() != &agent) continue;
        if (frame == nullptr) rank->BeLost();
        if (frame != nullptr && frame->at("rank") == rank->rank()) return rank->Take(std::move(*frame));
      }
    });
}

Json AgentServers::Ask(AgentLink& agent, const Json& frame, Clock::time_point until) {
  auto answer = agent.Ask(frame, until);
  if (!answer) {
    const std::string lost = Lost();
    throw StartError(lost.empty() ? agent.Name() + " has not answered in time" : lost,
                     protocol::FailureKind::kInternal);
  }
  if (answer->contains("kind"))
    throw StartError("node " + agent.node() + ": " + TextOf(*answer, "error"), KindIn(*answer));
  return std::move(*answer);
}

RankServer::World AgentServers::Fork(int, const std::string& backend, Clock::time_point deadline) {
  const std::uint64_t world = agents_.NextWorld();
  std::vector<std::shared_ptr<Rank>> ranks;
  for (const auto& agent : agents_.links())
    for (int i = 0; i < agent->place().ranks; ++i)
      ranks.push_back(std::make_shared<Rank>(agent->place().first + i, *agent, world));
  {
    const std::lock_guard lock(latest_->mutex);
    latest_->ranks = ranks;
  }
  const Ranks all(ranks.begin(), ranks.end());
  Json frame = {{"frame", "fork"}, {"world", world}, {"backend", backend}, {"host", ""}, {"port", 0}};
  try {
    for (const auto& agent : agents_.links()) {  // the first one has the store
      const Json answer = Ask(*agent, frame, deadline);
      frame["host"] = answer.at("host");
      frame["port"] = answer.at("port");
    }
  } catch (const StartError&) {
    for (const auto& rank : ranks) Kill(*rank);
    throw;
  }
  for (const auto& rank : ranks)
    if (!rank->agent().Gone().empty()) rank->BeLost();  // before it was followed
  return WaitReady(all, deadline);
}

std::vector<std::string> AgentServers::Changed(Clock::time_point deadline) {
  std::vector<std::string> changed;
  try {
    for (const Json& answer : agents_.AskAll({{"frame", "check"}}, deadline))
      for (const Json& file : answer.value("changed", Json::array())) changed.push_back(file);
  } catch (const RanksLost& lost) {
    changed.push_back(lost.what());
  }
  return changed;
}

void AgentServers::Kill(const RankProcess& process) {
  const auto& rank = static_cast<const Rank&>(process);
  rank.agent().Send(rank.About("kill"));
}

RankServer::Look AgentServers::LookAt(RankProcess& process, bool stacks, Clock::time_point limit) {
  auto& rank = static_cast<Rank&>(process);
  Json frame = rank.About("look");
  frame["stacks"] = stacks;
  frame["limit_ms"] = Until(limit - kWayLimit);
  const auto answer = rank.agent().Ask(
      frame, limit + (stacks ? kSignalLimit + kWayBackLimit : std::chrono::milliseconds::zero()));
  Look look;
  look.known = answer && answer->contains("place");
  if (!look.known) return look;
  look.answered = answer->at("answered");
  look.stacks = answer->at("stacks");
  look.text = answer->at("text");
  look.state = answer->at("state");
  look.place = PlaceFrom(answer->at("place"));
  return look;
}

std::string AgentServers::DifferentFile(const RankProcess& rank, const Json& files) {
  if (!files.is_object()) return "";
  for (const auto& [path, digest] : files.items()) {
    std::string own;
    try {
      own = digests_.Of(path);
    } catch (const base::FileError&) {
    }
    const std::string theirs = digest.is_string() ? digest.get<std::string>() : "";
    if (own == theirs) continue;
    return "node " + rank.node() +
           (theirs.empty() ? " does not have the file " + path + " of the head on "
            : own.empty()  ? " has loaded " + path + ", which is not there at the head on "
                           : " has another " + path + " than the head on ") +
           NodeName() + ": cases in Python need a file system that all nodes and the head share";
  }
  return "";
}

std::string AgentServers::Lost() const {
  const auto lost = agents_.FindLost();
  return lost ? lost->what() : "";
}

namespace {

// Until all agents know their places.
ProcessRanks::Options Started(ProcessRanks::Options options, Agents& agents, std::vector<std::string> preload,
                              const Json& place, Clock::time_point limit) {
  agents.SendPlaces(place);
  for (const auto& agent : agents.links()) agents.NextOfStart(*agent, limit);
  options.start = [&agents, python = options.python,
                   preload = std::move(preload)](Clock::time_point deadline) {
    return std::make_shared<AgentServers>(agents, python, preload, deadline);
  };
  return options;
}

}  // namespace

AgentProcessRanks::AgentProcessRanks(UnderWay& under_way, Agents& agents, Options options,
                                     std::vector<std::string> preload, const Json& place,
                                     Clock::time_point limit)
    : ProcessRanks(under_way, Started(std::move(options), agents, std::move(preload), place, limit), limit),
      agents_(agents) {
  agents_.Opened();
}

Json AgentProcessRanks::Hello() const {
  Json hello = ProcessRanks::Hello();
  hello["nodes"] = agents_.Nodes();
  return hello;
}

protocol::RunResult AgentProcessRanks::Run(const protocol::RequestQueue::Entry& request,
                                           const std::string& tag, Clock::time_point until, RunTrace* trace) {
  const Agents::Busy busy(agents_);
  protocol::RunResult result;
  try {
    if (trace) trace->clocks = agents_.Clocks(until);
    result = ProcessRanks::Run(request, tag, until, trace);
    if (!result.fatal || !agents_.FindLost()) return result;
  } catch (const RanksLost& lost) {
    result = lost.ToResult();
  } catch (const Refusal&) {
    const auto lost = agents_.FindLost();
    if (!lost) throw;
    result = lost->ToResult();
  }
  if (const auto launcher = agents_.launcher().Ended(Clock::now() + Agents::kLauncherTime)) {
    const std::string text = "; the launcher " + agents_.launcher().name() + " " + *launcher;
    result.error += text;
    if (result.failure) result.failure->detail += text;
  }
  return result;
}

void AgentProcessRanks::WhileIdle() {
  agents_.CheckGone();
  {
    const Agents::Busy busy(agents_);
    ProcessRanks::WhileIdle();
  }
  agents_.CheckGone();  // of an agent that went meanwhile
}

void AgentProcessRanks::Close() {
  ProcessRanks::Close();
  agents_.Close();
}

}  // namespace cppool::daemon
