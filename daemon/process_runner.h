// The ranks of a run that are Python processes: each rank's thread in this process stands for one of them.
#pragma once

#include <cstdint>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/ask_all.h"
#include "daemon/prepare.h"
#include "daemon/rank_process.h"
#include "daemon/rank_runner.h"
#include "daemon/rank_threads.h"

namespace cppool::daemon {

// Use make_shared: each rank's thread that is at work holds a reference.
class ProcessRunner : public RankRunner, public std::enable_shared_from_this<ProcessRunner> {
 public:
  // `threads` must outlive every thread that runs the case. `id`: of the frame `load`, and the
  // next number that of `run`; never used twice in a world. `tag` names the request in log lines. `devices`:
  // names, by rank.
  ProcessRunner(RankThreads& threads, std::shared_ptr<RankServer> server, RankServer::Ranks ranks,
                std::vector<std::string> devices, std::shared_ptr<const PreparedRun> prepared,
                std::uint64_t id, std::string tag);

  const kernels::Place& place() const override { return place_; }
  void Start(std::shared_ptr<Meeting> meeting, Sink sink) override;
  // A rank process is replaced and not probed: these find nothing wrong.
  void StartProbe(std::shared_ptr<Meeting> meeting, std::uint64_t round, Sink sink) override;
  void Recover(std::chrono::milliseconds) override {}
  // Kills the ranks that have not returned, after having read where they are.
  void Abort(const std::string& reason) override;
  void Cancel() override;
  void Profile(bool) override {}
  void Wait() override { threads_.Wait(); }
  // Where a rank is comes from the page that it shares; what it waits for from its control thread, and, with
  // `stacks`, where that does not answer, from a signal, which interrupts system calls.
  std::vector<RankReport> Snapshots(bool stacks) const override;
  CrashPlace PlaceOf(pid_t) const override { return {}; }
  void MoveTrace(RunTrace& trace) override;

  // After the run: a rank has ended, or was killed.
  bool lost() const;
  // A rank has begun the case.
  bool begun() const;
  // The process of a rank ended by itself before any has.
  bool ended_early() const;

 private:
  struct Rank {
    std::shared_ptr<RankProcess> process;
    RankReport report;  // under `mutex_`
    // Of pytest: a digest of their names, and how many; of the rank's thread until all have loaded.
    std::string items, collected;
    bool begun = false, lost = false;
    bool ended = false;                  // lost, and not since the run was aborted
    std::optional<RankReport> at_abort;  // where it was
    // With `trace`; of the rank's thread alone until it is done.
    std::vector<HostSlice> host;
    kernels::RankTrace trace;
  };
  void RunRank(int rank);
  // The report; nothing: it has ended. `wanted`: what the report has beside the rest.
  std::optional<protocol::Json> AskToLoad(int rank, const char* wanted);
  bool Load(int rank);
  int FirstThatDiffers() const;               // whose items are not rank 0's; 0: all have the same
  std::string DifferenceFromFirst(int rank);  // for people; asks that rank and rank 0 for the names
  void RunCase(int rank);
  // A rank waits for a decision about its iterations.
  void Decide(int rank, const protocol::Json& mark);
  void TakeReport(int rank, const protocol::Json& frame);
  std::vector<HostSlice>* HostOf(int rank);            // null: no trace is wanted
  void Fail(int rank, const protocol::Json& failure);  // of a frame
  void Fail(int rank, RankFailure failure, const std::string& traceback);
  void FailEnded(int rank, const char* during);
  void SetPhase(int rank, RankPhase phase);
  bool failed(int rank) const;
  void Done(int rank);

  Rank& At(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  const Rank& At(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  RankThreads& threads_;
  const std::shared_ptr<RankServer> server_;  // a question to a rank may outlive the run
  const kernels::Place place_;
  const std::vector<std::string> devices_;
  const std::shared_ptr<const PreparedRun> prepared_;
  const std::uint64_t id_;
  const std::string tag_;
  std::shared_ptr<Meeting> meeting_;
  Sink sink_;
  std::vector<Rank> ranks_;
  std::latch difference_told_{1};  // counted down when the first rank that differs has failed
  mutable Questions<RankServer::Look> questions_;
  mutable std::mutex mutex_;
  std::string why_aborted_;  // under `mutex_`
};

}  // namespace cppool::daemon
