// Ranks that are Python processes (daemon --python): they run functions, scripts and pytest items, and are
// replaced by fresh ones when one has ended or something is left that cannot be put back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/case_run.h"
#include "daemon/process_runner.h"
#include "daemon/rank_process.h"
#include "daemon/rank_threads.h"
#include "daemon/ranks.h"
#include "daemon/under_way.h"

namespace cppool::daemon {

class ProcessRanks : public Ranks {
 public:
  struct Options {
    int world_size = 1;
    std::string python;  // its path, for `hello`
    // Starts what forks the ranks, and anew when that cannot go on. Throws StartError.
    std::function<std::shared_ptr<RankServer>(Clock::time_point deadline)> start;
    std::string backend = "auto";  // of the process group, as the frame `fork` has it
    // A case may be run twice before it is answered. A process that has failed reports after its reset, which
    // takes longer on a busy machine; a killed one with a CUDA context needs 0.2 s.
    FailureLimits limits{.grace = std::chrono::milliseconds(100),
                         .abort = std::chrono::seconds(5),
                         .report = std::chrono::milliseconds(500)};
  };

  // Starts the server and the ranks. On the main thread, as Run and WhileIdle, which may start them anew: the
  // fork server dies with the thread that starts it. Throws StartError.
  ProcessRanks(UnderWay& under_way, Options options, Clock::time_point deadline);
  ~ProcessRanks() override;

  protocol::Json Hello() const override;
  std::vector<std::string_view> Features() const override;
  protocol::Json Cases(const protocol::ListRequest& request, Clock::time_point until) override;
  void Validate(const protocol::RunRequest& request, Clock::time_point until) override;
  protocol::RunResult Run(const protocol::RequestQueue::Entry& request, const std::string& tag,
                          Clock::time_point until, RunTrace* trace) override;
  std::chrono::milliseconds DeadlineMargin() const override { return std::chrono::seconds(8); }
  void WhileIdle() override;
  protocol::Json Memory() override;  // of ranks with a device that answer at once
  void Close() override;
  std::string BeingOpened() const override { return ""; }
  std::string NamedLibrary(const std::string&) const override { return ""; }

  protocol::Json init_ms() const;  // of the start, by stage

 private:
  struct Once {
    protocol::RunResult result;
    std::string reload;   // why the case must be loaded by fresh ranks; empty: it need not
    std::string replace;  // why the ranks must be replaced; empty: they can go on
  };
  // Ranks that run no case now, where there are none. Throws Refusal.
  void Ensure(Clock::time_point until);
  void StartServer(Clock::time_point deadline);  // throws StartError
  void Replace();                                // the next Ensure does it
  std::string DescribeBefore() const;            // for people
  Once RunOnce(const protocol::RequestQueue::Entry& request, std::shared_ptr<const PreparedRun> prepared,
               const std::string& tag, Clock::time_point until, const RunTrace* trace);

  UnderWay& under_way_;
  const Options options_;
  RankThreads threads_;
  std::shared_ptr<RankServer>
      server_;           // null after one that could not be started: the next Ensure tries again
  ForkServerInfo info_;  // of the last one that was
  RankServer::World world_;
  bool ready_ = false;  // `world_` can run a case
  // The cases that it has run, and what they had changed or left, in the form of RunResult::differed.
  struct {
    int count = 0;
    std::string last;
    protocol::Json changes;
  } before_;
  std::uint64_t next_id_ = 1;
  double server_ms_ = 0, ranks_ms_ = 0;
};

}  // namespace cppool::daemon
