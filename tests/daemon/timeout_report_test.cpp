// The answer to a passed deadline, for ranks in different states, including states that cannot be read.
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "daemon/case_run.h"
#include "daemon/local_ranks.h"
#include "daemon/stack_sampler.h"
#include "daemon/timeout_report.h"
#include "tests/catch.h"
#include "tests/daemon/fake_backend.h"
#include "tests/files.h"
#include "tests/sanitized.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;
using daemon::DescribeProgress;
using daemon::RankPhase;
using daemon::RankReport;
using daemon::TimeoutReport;
using kernels::StreamProgress;

StreamProgress In(const std::string& stream, const std::string& stage, double seconds,
                  const std::string& doing = "", std::vector<int> awaits = {},
                  const std::string& behind = "") {
  return {stream, stage, seconds, false, doing, std::move(awaits), behind, 0};
}

RankReport In(RankPhase phase, std::vector<StreamProgress> streams = {}, const std::string& error = "",
              std::vector<int> awaits = {}) {
  RankReport report;
  report.phase = phase;
  report.streams = std::move(streams);
  report.failure.text = error;
  report.awaits = std::move(awaits);
  return report;
}

RankReport Running(std::vector<StreamProgress> streams) {
  return In(RankPhase::kRunning, std::move(streams));
}

// Two ranks that never end. Rank 1 has failed.
class StuckRanks : public daemon::RankRunner {
 public:
  explicit StuckRanks(RankPhase phase, std::chrono::milliseconds reading = {})
      : phase_(phase), reading_(reading) {}
  const kernels::Place& place() const override { return place_; }
  void Start(std::shared_ptr<daemon::Meeting>, Sink sink) override {
    RankReport report = In(RankPhase::kRunning, {}, "it broke");
    report.rank = 1;
    report.failure.status = CPPOOL_INTERNAL;
    report.failure.origin = daemon::FailureOrigin::kOwn;
    sink(report);
  }
  void StartProbe(std::shared_ptr<daemon::Meeting>, std::uint64_t, Sink) override {}
  void Recover(std::chrono::milliseconds) override {}
  void Abort(const std::string&) override {}
  void Profile(bool) override {}
  void Wait() override {}
  std::vector<RankReport> Snapshots(bool) const override {
    std::this_thread::sleep_for(reading_);
    std::vector<RankReport> reports = {In(phase_), In(phase_)};
    reports[1].rank = 1;
    return reports;
  }
  daemon::CrashPlace PlaceOf(pid_t) const override { return {}; }
  void MoveTrace(daemon::RunTrace&) override {}

 private:
  const kernels::Place place_{2};
  const RankPhase phase_;
  const std::chrono::milliseconds reading_;
};

}  // namespace

TEST_CASE("a stream that waits for another stream is reported with the other stream's reason") {
  CHECK(DescribeProgress({In("main", "forward/p2p step 2 of 4", 4.98, "", {}, "stream 1"),
                          In("stream 1", "forward/p2p step 2 of 4: keys and values", 5.1,
                             "waiting for recv from rank 0", {0})}) ==
        "forward/p2p step 2 of 4, waiting for recv from rank 0, 4.98 s");
  CHECK(DescribeProgress({In("main", "use", 1, "", {}, "stream 1"), In("stream 1", "work", 2)}) ==
        "use, waiting for stream 1 (work), 1.00 s");
  CHECK(DescribeProgress({In("main", "a", 1), In("stream 1", "b", 2, "waiting for send to rank 3", {3})}) ==
        "a, 1.00 s; stream 1: b, waiting for send to rank 3, 2.00 s");
  CHECK(DescribeProgress({In("main", "a", 1), In("stream 1", "b", 2, "", {}, "main")}) == "a, 1.00 s");
  CHECK(DescribeProgress({In("main", "", 0)}) == "before its first stage");
  // Two streams that wait for each other must not cause an endless loop.
  CHECK_FALSE(
      DescribeProgress({In("main", "a", 1, "", {}, "stream 1"), In("stream 1", "b", 2, "", {}, "main")})
          .empty());
  CHECK(DescribeProgress({{"main", "last", 1, true}}) ==
        "in the case's host code, no marked work is pending (last stage: last)");
}

TEST_CASE("the rank that other ranks wait for is named, whatever it does itself") {
  const RankReport waits = Running({In("main", "meet", 1, "waiting for recv from rank 1", {1})});
  const auto report = [](std::vector<RankReport> ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i].rank = static_cast<int>(i);
    return TimeoutReport(ranks, std::chrono::milliseconds(700));
  };
  const auto finished = report({waits, In(RankPhase::kDone), waits});
  CHECK(finished.failure->rank == 1);
  CHECK(Has(finished.error,
            "not finished after 700 ms, others wait for rank 1, which has finished: rank 0: meet"));
  CHECK(finished.ranks[1].ok);
  CHECK(finished.fatal);

  const auto busy = report({waits, Running({In("main", "work", 1)}), waits});
  CHECK(busy.failure->rank == 1);
  CHECK(busy.failure->stage == "work");
  CHECK(Has(busy.error, "others wait for rank 1: "));

  const RankReport ready = In(RankPhase::kReady, {}, "", {1});
  const auto unprepared = report({ready, Running({}), ready});
  CHECK(unprepared.failure->rank == 1);
  CHECK(Has(unprepared.error,
            "rank 0: ready for its first iteration, waiting for rank 1; rank 1: in the case's"));

  const auto failed = report({waits, waits, In(RankPhase::kRunning, {}, "it broke")});
  CHECK(failed.failure->rank == 2);
  CHECK(failed.error.rfind("rank 2: it broke; not finished after 700 ms, others wait for rank 2: rank 0: ",
                           0) == 0);
  CHECK(Has(failed.error, "rank 2: failed: it broke"));
  CHECK_FALSE(failed.ranks[2].ok);

  const RankReport waits_too = Running({In("main", "meet", 1, "waiting for recv from rank 0", {0})});
  CHECK_FALSE(report({waits, waits_too}).failure->rank);  // they wait for each other: no rank is the cause

  // It was not heard in time what the first one waits for.
  const RankReport silent = Running({In("main", "", 1, "it does not answer")});
  CHECK(report({silent, Running({In("main", "fault", 1, daemon::kStopped)})}).failure->rank == 1);
  // Nor which call a rank of two that run is in.
  CHECK_FALSE(report({silent, Running({In("main", "work", 1)})}).failure->rank);
}

TEST_CASE("ranks whose reading blocks or throws do not prevent the answer") {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  const auto gate = std::make_shared<Gate>();
  const auto fake = std::make_shared<FakeWorld>();
  daemon::World world(std::make_unique<FakeBackend>(fake, 3));
  world.Open(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  const auto ranks = std::make_shared<daemon::LocalRanks>(world, std::make_shared<daemon::PreparedRun>(), "");
  fake->on_progress = [gate](int rank) {
    if (rank == 1) {
      std::unique_lock lock(gate->mutex);
      gate->changed.wait(lock, [&] { return gate->open; });
    }
    if (rank == 2) throw std::runtime_error("no snapshot");
  };
  const bool stacks = GENERATE(false, true);
  const auto start = std::chrono::steady_clock::now();
  const auto read = daemon::SnapshotsOf({ranks}, stacks);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CHECK(read[0].phase == RankPhase::kWaiting);
  CHECK(read[0].streams.size() == 2);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(read[rank].rank == rank);
    CHECK(read[rank].phase == (rank == 0 ? RankPhase::kWaiting : RankPhase::kUnknown));
    CHECK(read[rank].stacks.size() == (stacks ? 1 : 0));
  }
  const auto report = TimeoutReport(read, std::chrono::milliseconds(5));
  CHECK(Has(report.ranks[0].error, "waiting for a clean state"));
  CHECK(Has(report.ranks[1].error, "the runtime does not say where"));
  CHECK(Has(report.ranks[2].error, "the runtime does not say where"));
  {
    const std::lock_guard lock(gate->mutex);
    gate->open = true;
    gate->changed.notify_all();
  }
  while (ranks.use_count() > 1)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the reading thread
}

TEST_CASE("a node that does not answer is named") {
  const auto on = [](const std::string& node, RankReport report) {
    report.node = node;
    return report;
  };
  const auto report = [](std::vector<RankReport> ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i].rank = static_cast<int>(i);
    return TimeoutReport(ranks, std::chrono::milliseconds(5));
  };
  const RankReport works = on("a", Running({In("main", "forward", 1)}));
  const RankReport silent = on("b", In(RankPhase::kUnknown));
  const auto one = report({works, works, silent, silent});
  CHECK(one.failure->node == "b");
  CHECK(Has(one.error, "not finished after 5 ms, node b does not answer: rank 0 on node a: forward"));
  CHECK(report({works, on("a", In(RankPhase::kUnknown)), silent, silent}).failure->node.empty());
  CHECK(report({works, works, silent, on("b", works)}).failure->node.empty());
  const RankReport failed = on("a", In(RankPhase::kRunning, {}, "it failed"));
  CHECK(report({failed, works, silent, silent}).failure->node == "a");  // the cause
}

TEST_CASE("a rank that cannot be read is asked by one thread, however often where it is is asked") {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int asked[2] = {};
  const auto fake = std::make_shared<FakeWorld>();
  daemon::World world(std::make_unique<FakeBackend>(fake, 2));
  world.Open(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  const auto ranks = std::make_shared<daemon::LocalRanks>(world, std::make_shared<daemon::PreparedRun>(), "");
  fake->on_progress = [&](int rank) {
    std::unique_lock lock(mutex);
    ++asked[rank];
    if (rank == 1) changed.wait(lock, [&] { return open; });
  };
  for (int times = 1; times <= 3; ++times) {
    const auto read = daemon::SnapshotsOf({ranks}, false);
    CHECK(read[0].phase == RankPhase::kWaiting);
    CHECK(read[1].phase == RankPhase::kUnknown);
    const std::lock_guard lock(mutex);
    CHECK(asked[0] == times);
    CHECK(asked[1] == 1);
  }
  {
    const std::lock_guard lock(mutex);
    open = true;
    changed.notify_all();
  }
  while (daemon::SnapshotsOf({ranks}, false)[1].phase == RankPhase::kUnknown) {  // it is asked again
  }
  while (ranks.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST_CASE("a runner alone is read on the thread that asks, and keeps what it reads late") {
  const auto reports = daemon::SnapshotsOf({std::make_shared<StuckRanks>(RankPhase::kRunning, 600ms)}, true);
  REQUIRE(reports.size() == 2);
  CHECK(reports[1].phase == RankPhase::kRunning);
}

TEST_CASE("the answer to a passed deadline has the failure of a rank that cannot be read") {
  const daemon::FailureLimits soon{0ms, 0ms, 0ms};
  daemon::CaseRun run({std::make_shared<StuckRanks>(RankPhase::kUnknown)},
                      std::make_shared<daemon::PreparedRun>(), std::make_shared<protocol::RunControl>(),
                      soon);
  CHECK(run.Execute().fatal);
  const auto late = run.TimedOut(9000ms);
  CHECK(late.ranks[0].error == daemon::kNoPlace);
  CHECK(late.ranks[1].error == "failed: it broke");
  CHECK(late.failure->rank == 1);
}

TEST_CASE("threads without a stack are reported with the reason, and other threads with their stacks") {
  std::mutex mutex;
  std::condition_variable changed;
  bool end = false;
  int ready = 0;
  pid_t deaf_id = 0, waiting_id = 0;
  const auto wait = [&](pid_t* id) {
    std::unique_lock lock(mutex);
    *id = static_cast<pid_t>(syscall(SYS_gettid));
    ++ready;
    changed.notify_all();
    changed.wait(lock, [&] { return end; });
  };
  std::thread deaf([&] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    wait(&deaf_id);
  });
  std::thread waiting([&] { wait(&waiting_id); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ready == 2; });
  }
  const pid_t gone = 0x3ffffff;              // larger than any thread's id
  for (int round = 0; round < 2; ++round) {  // in the second, the first one's signal is still pending
    const auto stacks = daemon::SampleStacks(
        {deaf_id, waiting_id, gone}, std::chrono::steady_clock::now() + std::chrono::milliseconds(500));
    REQUIRE(stacks.size() == 3);
    CHECK(Has(stacks[0].at(0), "blocks the signal"));
    CHECK_FALSE(stacks[1].empty());
    const auto waits = [](const std::string& frame) { return Has(frame, "pthread_cond_wait"); };
    CHECK((kSanitized || std::any_of(stacks[1].begin(), stacks[1].end(), waits)));
    CHECK(Has(stacks[2].at(0), "the thread is gone"));
  }
  {
    const std::lock_guard lock(mutex);
    end = true;
  }
  changed.notify_all();
  deaf.join();
  waiting.join();
}

}  // namespace cppool::test
