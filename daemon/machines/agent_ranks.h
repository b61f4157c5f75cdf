// Ranks of agents on several machines, or of several on one: at the head, which runs none itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/case_run.h"
#include "daemon/machines/agent_link.h"
#include "daemon/machines/agent_runner.h"
#include "daemon/machines/gather.h"
#include "daemon/machines/library_frames.h"
#include "daemon/ranks.h"
#include "daemon/under_way.h"

namespace cppool::daemon {

class AgentRanks : public Ranks {
 public:
  struct Options {
    int world_size = 1;
    std::string version;
    std::vector<std::string> words;       // of the launcher
    protocol::Json agent;                 // members of the frame `place`, beside the place itself
    std::vector<std::string> case_files;  // of --case
    bool allow_faults = false;
    std::function<void(std::string_view)> write_answer;  // for faults of answers
    // An agent was lost while no request was under way: the daemon must end. Any thread.
    std::function<void(const std::string& why)> lost;
    FailureLimits limits;
  };

  // Starts the launcher, and returns when all ranks are open. Throws StartError. `under_way` outlives it.
  AgentRanks(UnderWay& under_way, Options options, Clock::time_point limit);
  ~AgentRanks() override;

  const std::string& backend() const { return backend_; }
  const protocol::Json& init_ms() const { return init_ms_; }

  protocol::Json Hello() const override;
  std::vector<std::string_view> Features() const override;
  protocol::Json Cases(const protocol::ListRequest& request, Clock::time_point until) override;
  void Validate(const protocol::RunRequest& request, Clock::time_point until) override;
  protocol::RunResult Run(const protocol::RequestQueue::Entry& request, const std::string& tag,
                          Clock::time_point until, RunTrace* trace) override;
  std::chrono::milliseconds DeadlineMargin() const override { return {}; }
  void WhileIdle() override;
  protocol::Json Memory() override;
  void Close() override;
  std::string BeingOpened() const override { return ""; }
  std::string NamedLibrary(const std::string&) const override { return ""; }

  void EndLauncher();  // any thread: at once, with SIGTERM and SIGKILL

 private:
  using Json = protocol::Json;
  // While it lives, the loss of an agent is the request's matter.
  class Busy;
  struct Lost;  // what AskAll throws
  // The answers of all agents, by index.
  std::vector<Json> AskAll(const Json& frame, Clock::time_point until);
  // Adds those of --case to what a request loads, and sends them all to the agents.
  void SendLibraries(const std::vector<std::string>& named, std::vector<std::string>& load,
                     std::map<std::string, std::string>& digests, Clock::time_point until);
  std::vector<Json> Prepare(const protocol::RunRequest& request, Clock::time_point until);
  Json NextOfStart(AgentLink& agent, Clock::time_point limit);
  void CheckStart() const;  // throws StartError when an agent cannot start
  void TellOthers(std::size_t from, const Json& news);
  void Open(Clock::time_point limit);
  void TakeGone();

  UnderWay& under_way_;
  const Options options_;
  std::unique_ptr<Launcher> launcher_;
  std::vector<std::unique_ptr<AgentLink>> agents_;
  LibrarySender libraries_;
  std::map<std::string, std::string> case_digests_;  // of --case: the files' of the start
  std::string backend_, transport_;
  Json init_ms_ = Json::object(), devices_ = Json::array();
  Json nccl_ = Json::array();  // the settings of each node
  std::uint64_t number_ = 0;   // of frames `run` and `probe`
  std::atomic<int> busy_{1};   // the start counts
  std::mutex telling_;
  bool tells_ = false;  // the agents are all there
};

}  // namespace cppool::daemon
