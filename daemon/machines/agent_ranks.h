// Ranks of agents on several machines, or of several on one: at the head, which runs none itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/case_run.h"
#include "daemon/machines/agent_runner.h"
#include "daemon/machines/agents.h"
#include "daemon/machines/library_frames.h"
#include "daemon/ranks.h"
#include "daemon/under_way.h"
#include "protocol/kernel_choice.h"

namespace cppool::daemon {

class AgentRanks : public Ranks {
 public:
  struct Options {
    int world_size = 1;
    protocol::Json agent;                 // members of the frame `place`, beside the place itself
    std::vector<std::string> case_files;  // of --case
    bool allow_faults = false;
    FailureLimits limits;
    protocol::KernelChoice kernels;  // what requests that name none run on
  };

  // Returns when all ranks are open. Throws StartError. The others outlive it.
  AgentRanks(UnderWay& under_way, Agents& agents, Options options, Clock::time_point limit);

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
  void Close() override { agents_.Close(); }
  std::string BeingOpened() const override { return ""; }
  std::string NamedLibrary(const std::string&) const override { return ""; }

 private:
  using Json = protocol::Json;
  // Adds those of --case to what a request loads, and sends them all to the agents.
  void SendLibraries(const std::vector<std::string>& named, std::vector<std::string>& load,
                     std::map<std::string, std::string>& digests, Clock::time_point until);
  std::vector<Json> Prepare(const protocol::RunRequest& request, Clock::time_point until);
  void Open(Clock::time_point limit);

  UnderWay& under_way_;
  Agents& agents_;
  const Options options_;
  LibrarySender libraries_;
  std::map<std::string, std::string> case_digests_;  // of --case: the files' of the start
  std::string backend_, transport_;
  Json init_ms_ = Json::object(), devices_ = Json::array();
  Json nccl_ = Json::array();  // the settings of each node
  std::uint64_t number_ = 0;   // of frames `run` and `probe`
};

}  // namespace cppool::daemon
