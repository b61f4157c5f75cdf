// The agents of a head: starts them, asks them, notices their loss, and ends them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/machines/agent_link.h"
#include "daemon/machines/gather.h"
#include "daemon/ranks.h"
#include "daemon/trace_file.h"
#include "protocol/json_text.h"
#include "protocol/response.h"

namespace cppool::daemon {

class Agents {  // never destroyed
 public:
  using Clock = std::chrono::steady_clock;
  using Json = protocol::Json;
  // Beside the limit of what an agent is asked to do.
  static constexpr std::chrono::milliseconds kAnswerTime{100};
  // For the launcher to end, which may say why an agent has gone.
  static constexpr std::chrono::milliseconds kLauncherTime{200};
  struct Options {
    int world_size = 1;
    std::string version;
    std::vector<std::string> words;                      // of the launcher
    std::function<void(std::string_view)> write_answer;  // for faults of answers
    // An agent was lost while no request was under way: the daemon must end. Any thread.
    std::function<void(const std::string& why)> lost;
  };
  // While it lives, the loss of an agent is the request's matter.
  class Busy {
   public:
    explicit Busy(Agents& agents) : agents_(agents) { ++agents_.busy_; }
    ~Busy() { --agents_.busy_; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    Agents& agents_;
  };

  explicit Agents(Options options) : options_(std::move(options)) {}
  Agents(const Agents&) = delete;
  Agents& operator=(const Agents&) = delete;

  // Starts the launcher, and returns when all have come. Busy until Opened(). Throws StartError.
  void Start(Clock::time_point limit);

  const std::vector<std::unique_ptr<AgentLink>>& links() const { return links_; }  // by index
  Launcher& launcher() const { return *launcher_.load(); }
  Json Nodes() const;  // the member of `hello`

  // Tells each its place: the frame `place`, with `members` beside the place itself.
  void SendPlaces(const Json& members);
  // The next frame of its start. Throws StartError: it cannot start, or has gone.
  Json NextOfStart(AgentLink& agent, Clock::time_point limit);
  void Opened();  // all have started, and may tell each other news
  // The number of a world of Python ranks, never used twice.
  std::uint64_t NextWorld() { return ++worlds_; }

  // The answers of all, by index. Throws RanksLost.
  std::vector<Json> AskAll(const Json& frame, Clock::time_point until);
  std::map<std::string, NodeClock> Clocks(Clock::time_point until);  // by node; throws RanksLost
  // Of the agent that was the first to go: others may go for that.
  std::optional<RanksLost> FindLost() const;
  // Throws it, or that this one "has not" done what it was asked for in time.
  [[noreturn]] void ThrowLost(const AgentLink& agent, const std::string& has_not) const;
  // Ends the daemon where one has gone.
  void CheckGone() const;

  void Close();        // from here on they go: waits for their end
  void EndLauncher();  // any thread: at once, with SIGTERM and SIGKILL
  // After a start that has failed, at which a client waits for no more than 2 s.
  void EndUnstarted();

 private:
  void CheckStart() const;  // throws StartError when an agent cannot start
  void TellOthers(std::size_t from, const Json& news);
  Launcher& Launch(const std::vector<std::string>& agent, const std::vector<std::string>& environment);

  const Options options_;
  std::mutex launching_;
  bool given_up_ = false;                     // no launcher is to start any more
  std::atomic<Launcher*> launcher_{nullptr};  // never destroyed; null: not started
  std::vector<std::unique_ptr<AgentLink>> links_;
  std::atomic<int> busy_{1};  // the start counts
  std::uint64_t worlds_ = 0;
  mutable std::mutex losing_;
  std::optional<RanksLost> first_lost_;
  std::mutex telling_;
  bool tells_ = false;  // the agents are all there
};

// The kind in the answer of an agent that refuses, or cannot start.
protocol::FailureKind KindIn(const protocol::Json& answer);
// Throws what the agents have refused: with the node, where not all of them have.
void ThrowRefusal(const std::vector<protocol::Json>& answers, const Agents& agents);

}  // namespace cppool::daemon
