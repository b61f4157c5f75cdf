// The ranks of a run that are threads of this process.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/ask_all.h"
#include "daemon/case_context.h"
#include "daemon/prepare.h"
#include "daemon/rank_runner.h"
#include "daemon/trace_file.h"
#include "daemon/world.h"

namespace cppool::daemon {

// Use make_shared: each rank that is at work holds a reference, so that one that never returns does not
// outlive it.
class LocalRanks : public RankRunner, public std::enable_shared_from_this<LocalRanks> {
 public:
  // `world` must outlive every thread that runs the case. `tag` names the request in log lines.
  LocalRanks(World& world, std::shared_ptr<const PreparedRun> prepared, std::string tag);

  const kernels::Place& place() const override { return world_.place(); }
  void Start(std::shared_ptr<Meeting> meeting, Sink sink) override;
  void StartProbe(std::shared_ptr<Meeting> meeting, std::uint64_t round, Sink sink) override;
  void Recover(std::chrono::milliseconds limit) override { world_.backend().Recover(limit); }
  void Abort(const std::string& reason) override { world_.backend().Abort(reason); }
  void Profile(bool begin) override { world_.backend().Profile(begin); }
  void Wait() override { world_.threads().Wait(); }
  std::vector<RankReport> Snapshots(bool stacks) const override;
  CrashPlace PlaceOf(pid_t thread) const override;
  void MoveTrace(RunTrace& trace) override;

 private:
  struct Rank {
    std::optional<CaseContext> context;  // for the rank's thread alone; streams may use it until this ends
    RankReport report;                   // under `mutex_`
    std::vector<HostSlice>
        host;  // with `trace`, as the next one; of the rank's thread alone until it is done
    kernels::RankTrace trace;
  };

  // By their numbers in the world.
  Rank& At(int rank) { return *ranks_[static_cast<std::size_t>(rank - place().first)]; }
  const Rank& At(int rank) const { return *ranks_[static_cast<std::size_t>(rank - place().first)]; }

  void RunRank(int rank);
  void RunCase(int rank);
  CaseFailure BeginIterations(int rank);
  void EndRank(int rank);
  void TakeTrace(int rank);
  // Calls `function` on the rank's thread; what it throws is a failure of the rank. False: it has thrown.
  template <typename Function>
  bool Attempt(int rank, Function&& function);
  void Fail(int rank, const CaseFailure& failure);
  void SetPhase(int rank, RankPhase phase);
  bool InOrder(int rank) const;         // no failure but a failed check
  RankReport Snapshot(int rank) const;  // may block while the rank is stuck

  World& world_;
  const std::shared_ptr<const PreparedRun> prepared_;
  const std::string tag_;
  std::shared_ptr<Meeting> meeting_;
  Sink sink_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  mutable Questions<RankReport> snapshots_;  // of a rank that is stuck, one thread is
  mutable std::mutex mutex_;                 // never held while a rank's runtime is asked
};

}  // namespace cppool::daemon
