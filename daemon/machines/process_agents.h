// Python ranks of agents, at the head: to it they are what forked processes are.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/file_cache.h"
#include "daemon/machines/agents.h"
#include "daemon/process_ranks.h"
#include "daemon/rank_process.h"

namespace cppool::daemon {

// The fork servers of all agents. None of another one's ranks may live when it is made.
class AgentServers : public RankServer {
 public:
  // `agents` outlives it. Throws StartError, also when the nodes have different Pythons.
  AgentServers(Agents& agents, std::string python, std::vector<std::string> preload, Clock::time_point limit);

  const ForkServerInfo& info() const override { return info_; }
  World Fork(int size, const std::string& backend, Clock::time_point deadline) override;
  std::vector<std::string> Changed(Clock::time_point deadline) override;
  void Kill(const RankProcess& rank) override;
  Look LookAt(RankProcess& rank, bool stacks, Clock::time_point limit) override;
  bool ComparesFiles() const override { return true; }
  std::string DifferentFile(const RankProcess& rank, const protocol::Json& files) override;
  std::string Lost() const override;

 private:
  class Rank;
  struct Latest;  // the ranks of the latest world
  using Json = protocol::Json;
  Json Ask(AgentLink& agent, const Json& frame, Clock::time_point until);  // throws StartError

  Agents& agents_;
  ForkServerInfo info_;
  base::FileDigests digests_;
  const std::shared_ptr<Latest> latest_;  // frames that come may outlive this
};

class AgentProcessRanks : public ProcessRanks {
 public:
  // `place`: members of the frame `place`. Of `options` it sets `start`. The others outlive it. Throws
  // StartError.
  AgentProcessRanks(UnderWay& under_way, Agents& agents, Options options, std::vector<std::string> preload,
                    const protocol::Json& place, Clock::time_point limit);

  protocol::Json Hello() const override;
  protocol::RunResult Run(const protocol::RequestQueue::Entry& request, const std::string& tag,
                          Clock::time_point until, RunTrace* trace) override;
  void WhileIdle() override;
  void Close() override;

 private:
  Agents& agents_;
};

}  // namespace cppool::daemon
