// The ranks of a run that an agent has: each rank's thread at the head stands for one of them, hands on its
// reports, and meets the other ranks in its place.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/machines/agents.h"
#include "daemon/rank_runner.h"

namespace cppool::daemon {

// Use make_shared, as LocalRanks.
class AgentRunner : public RankRunner, public std::enable_shared_from_this<AgentRunner> {
 public:
  // Both outlive it. The agent has prepared the run. `number`: of frames, never used twice, nor is the next.
  AgentRunner(AgentLink& agent, Agents& agents, std::uint64_t number)
      : agent_(agent), agents_(agents), number_(number) {}

  const kernels::Place& place() const override { return agent_.place(); }
  void Start(std::shared_ptr<Meeting> meeting, Sink sink) override;
  void StartProbe(std::shared_ptr<Meeting> meeting, std::uint64_t round, Sink sink) override;
  void Recover(std::chrono::milliseconds limit) override;
  void Abort(const std::string& reason) override;
  void Profile(bool begin) override;
  void Wait() override { agent_.threads().Wait(); }
  std::vector<RankReport> Snapshots(bool stacks) const override;
  CrashPlace PlaceOf(pid_t) const override { return {}; }
  void MoveTrace(RunTrace& trace) override;  // throws RanksLost

 private:
  void StartRanks(protocol::Json frame, std::uint64_t number, std::shared_ptr<Meeting> meeting, Sink sink);
  void Serve(int rank, std::uint64_t number, Meeting& meeting, const Sink& sink);
  RankReport LostReport(int rank, Meeting& meeting) const;

  AgentLink& agent_;
  Agents& agents_;
  const std::uint64_t number_;
  std::shared_ptr<Meeting> meeting_;  // of the run
};

}  // namespace cppool::daemon
