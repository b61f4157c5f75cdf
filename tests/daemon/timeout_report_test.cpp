// The answer to a passed deadline, for ranks in different states, including states that cannot be read.
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "daemon/stack_sampler.h"
#include "daemon/timeout_report.h"
#include "tests/catch.h"

namespace cppool::test {
namespace {

using daemon::DescribeProgress;
using daemon::RankPhase;
using daemon::RankSnapshot;
using daemon::TimeoutReport;
using kernels::StreamProgress;

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

StreamProgress In(const std::string& stream, const std::string& stage, double seconds,
                  const std::string& doing = "", std::vector<int> awaits = {},
                  const std::string& behind = "") {
  return {stream, stage, seconds, false, doing, std::move(awaits), behind, 0};
}

RankSnapshot Running(std::vector<StreamProgress> streams) {
  return {RankPhase::kRunning, "", std::move(streams)};
}

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
  const RankSnapshot waits = Running({In("main", "meet", 1, "waiting for recv from rank 1", {1})});
  const auto report = [](const std::vector<RankSnapshot>& ranks) {
    return TimeoutReport(
        std::vector<pid_t>(ranks.size(), 0), [ranks](int rank) { return ranks[rank]; },
        std::chrono::milliseconds(700));
  };
  const auto finished = report({waits, {RankPhase::kDone, "", {}}, waits});
  CHECK(finished.failure->rank == 1);
  CHECK(Has(finished.error,
            "not finished after 700 ms, others wait for rank 1, which has finished: rank 0: meet"));
  CHECK(finished.ranks[1].ok);
  CHECK(finished.fatal);

  const auto busy = report({waits, Running({In("main", "work", 1)}), waits});
  CHECK(busy.failure->rank == 1);
  CHECK(busy.failure->stage == "work");
  CHECK(Has(busy.error, "others wait for rank 1: "));

  const RankSnapshot ready{RankPhase::kReady, "", {}, {1}};
  const auto unprepared = report({ready, Running({}), ready});
  CHECK(unprepared.failure->rank == 1);
  CHECK(Has(unprepared.error,
            "rank 0: ready for its first iteration, waiting for rank 1; rank 1: in the case's"));

  const auto failed = report({waits, waits, {RankPhase::kRunning, "it broke", {}}});
  CHECK(failed.failure->rank == 2);
  CHECK(failed.error.rfind("rank 2: it broke; not finished after 700 ms, others wait for rank 2: rank 0: ",
                           0) == 0);
  CHECK(Has(failed.error, "rank 2: failed: it broke"));
  CHECK_FALSE(failed.ranks[2].ok);

  const RankSnapshot waits_too = Running({In("main", "meet", 1, "waiting for recv from rank 0", {0})});
  CHECK_FALSE(report({waits, waits_too}).failure->rank);  // they wait for each other: no rank is the cause
}

TEST_CASE("snapshots that block or throw do not prevent the answer") {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  const auto gate = std::make_shared<Gate>();
  const auto start = std::chrono::steady_clock::now();
  const auto report = TimeoutReport(
      {0, 0, 0},
      [gate](int rank) -> RankSnapshot {
        if (rank == 1) {
          std::unique_lock lock(gate->mutex);
          gate->changed.wait(lock, [&] { return gate->open; });
        }
        if (rank == 2) throw std::runtime_error("no snapshot");
        return Running({In("main", "work", 1)});
      },
      std::chrono::milliseconds(5));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CHECK(Has(report.ranks[0].error, "work, 1.00 s"));
  CHECK(Has(report.ranks[1].error, "the runtime does not say where"));
  CHECK(Has(report.ranks[2].error, "the runtime does not say where"));
  const std::lock_guard lock(gate->mutex);
  gate->open = true;
  gate->changed.notify_all();
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
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    bool found = false;
    for (const std::string& frame : stacks[1]) found = found || Has(frame, "pthread_cond_wait");
    CHECK(found);
#endif
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
