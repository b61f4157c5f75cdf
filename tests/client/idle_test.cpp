// PoolOptions::idle_exit: a daemon that exits when it is idle, and calls while it exits.
#include <signal.h>

#include <atomic>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::PoolError;

namespace {

// A Pool of fake daemons, of which the first `going` exit as `start` names, and the Pool's log.
struct GoingPool {
  GoingPool(const std::string& start, int going, std::chrono::milliseconds grace = 60s, int retries = 0) {
    cppool::PoolOptions options = FakeOptions(start);
    options.grace = grace;
    options.retries = retries;
    options.idle_exit = 1h;
    options.arguments.insert(
        options.arguments.end(),
        {"--file", folder.File("gone"), "--going", std::to_string(going), "--count", folder.File("starts")});
    options.log = [this](std::string_view line) { log += std::string(line) + "\n"; };
    pool.emplace(options);
  }
  std::size_t Starts() const { return CountLines(folder.File("starts")); }
  TemporaryFolder folder;
  std::string log;
  std::optional<Pool> pool;
};

cppool::PoolOptions RealOptions(std::chrono::milliseconds idle_exit) {
  cppool::PoolOptions options;
  options.daemon = CPPOOL_REAL_DAEMON;
  options.backend = "host";
  options.world_size = 1;
  options.idle_exit = idle_exit;
  return options;
}

const Json kSmallest = {{"max_seqlen_q", 16}, {"max_seqlen_kv", 16}, {"num_heads", 1}, {"num_gqa_groups", 1},
                        {"head_dim_qk", 64},  {"head_dim_v", 64},    {"batch_size", 1}};

class ChildSignal {
 public:
  explicit ChildSignal(sighandler_t handler) : before_(signal(SIGCHLD, handler)) {}
  ~ChildSignal() { signal(SIGCHLD, before_); }
  ChildSignal(const ChildSignal&) = delete;
  ChildSignal& operator=(const ChildSignal&) = delete;

 private:
  sighandler_t before_;
};

}  // namespace

TEST_CASE("the idle time is passed to the daemon in seconds with a decimal point") {
  cppool::PoolOptions options = FakeOptions();
  options.idle_exit = 61050ms;
  Pool pool(options);
  const Json words = pool.Run(Do("echo")).json["surroundings"]["arguments"];
  std::string all;
  for (const Json& word : words) all += word.get<std::string>() + " ";
  CHECK(Has(all, "--idle-exit 61.050 "));
  Pool never(FakeOptions());
  CHECK_FALSE(Has(never.Run(Do("echo")).json["surroundings"]["arguments"].dump(), "idle"));
}

TEST_CASE(
    "a request that an exiting daemon has not read is sent to a new one, which does not count as an "
    "attempt") {
  // leave_unread: the request stays in the pipe. leave_part: its first byte is read. leave_closed: stdin is
  // closed before the request is written; leave_all_closed: stdout and stderr too. leave_slowly: the exit
  // takes 1.5 s.
  for (const bool unknown : {false, true}) {  // the exit status, if SIGCHLD is ignored
    const ChildSignal how(unknown ? SIG_IGN : SIG_DFL);
    for (const char* start :
         {"leave_unread", "leave_part", "leave_closed", "leave_all_closed", "leave_slowly"}) {
      for (const std::size_t bytes : {10u, 1000000u}) {  // the larger one does not fit into the pipe
        INFO(start << ", " << bytes << ", " << unknown);
        GoingPool going(start, 1);
        cppool::Result result = going.pool->Run({{"much", std::string(bytes, 'x')}});
        CHECK(result.ok());
        CHECK(result.attempts == 1);
        if (!unknown) CHECK(going.log == "");
        CHECK(going.Starts() == 2);
      }
    }
  }
}

TEST_CASE(
    "a daemon that exits more slowly than the grace period is killed, which does not count as an attempt") {
  GoingPool going("leave_slowly", 1, 100ms);
  const cppool::Result result = going.pool->Run();
  CHECK(result.ok());
  CHECK(result.attempts == 1);
  CHECK(going.Starts() == 2);
}

TEST_CASE("a daemon without an idle time that exits has died, even if its exit status is unknown") {
  const ChildSignal ignored(SIG_IGN);
  TemporaryFolder folder;
  cppool::PoolOptions options = FakeOptions("leave_unread");
  options.arguments.insert(options.arguments.end(), {"--file", folder.File("gone"), "--going", "1"});
  Pool pool(options);
  CHECK_THROWS_AS(pool.Run(), PoolError);
  CHECK(pool.Run().ok());
}

TEST_CASE("an unread request is sent to a new daemon once, then a daemon that exits has died") {
  GoingPool going("leave_unread", 100);
  try {
    going.pool->Run();
    FAIL("there was an answer");
  } catch (const PoolError& error) {
    CHECK(error.kind() == PoolError::Kind::kDied);
    CHECK(error.attempts() == 1);
  }
  CHECK(going.Starts() == 2);
}

TEST_CASE("a daemon that has read the request, or exits with an error, has died") {
  for (const char* start : {"leave_having_read", "leave_in_disorder"}) {
    INFO(start);
    CHECK_THROWS_AS(GoingPool(start, 1).pool->Run(), PoolError);
    GoingPool going(start, 1, 60s, 1);
    cppool::Result result = going.pool->Run();
    CHECK(result.ok());
    CHECK(result.attempts == 2);
    CHECK(Has(going.log, "is sent to a new daemon"));
    CHECK(going.Starts() == 2);
  }
}

TEST_CASE("an idle daemon exits in order, and the next call starts a new one without a log line") {
  LeavesNothing([] {
    cppool::PoolOptions options = RealOptions(300ms);
    std::string log;
    options.log = [&](std::string_view line) { log += line; };
    Pool pool(options);
    for (int i = 0; i < 2; ++i) {
      const cppool::Result first = pool.Run(kSmallest);
      INFO(first.error);
      REQUIRE(first.ok());
      CHECK(first.attempts == 1);
      const int pid = pool.Hello()["pid"];
      CHECK(Eventually([&] { return !Alive(pid); }));
      const cppool::Result second = pool.Run(kSmallest);
      CHECK(second.ok());
      CHECK(second.attempts == 1);
      CHECK(pool.Hello()["pid"] != pid);
    }
    CHECK(log == "");
  });
}

TEST_CASE("a daemon that gets requests within its idle time does not exit") {
  Pool pool(RealOptions(1500ms));
  const int pid = pool.Hello()["pid"];
  for (int i = 0; i < 20; ++i) {  // twice the idle time in all
    std::this_thread::sleep_for(150ms);
    CHECK(pool.Hello()["pid"] == pid);
  }
}

TEST_CASE("calls at the moment when an idle daemon exits are all answered") {
  // Two pools at once, which varies the timing: some calls find the daemon still running, some do not.
  std::atomic<int> failed{0}, stayed{0}, replaced{0};
  auto drive = [&](unsigned seed) {
    std::mt19937 random(seed);
    cppool::PoolOptions options = RealOptions(100ms);
    options.retries = 0;
    Pool pool(options);
    int before = 0;
    for (int i = 0; i < 40; ++i) {
      try {
        const int pid = pool.Hello()["pid"];
        if (i > 0) ++(pid == before ? stayed : replaced);
        before = pid;
      } catch (const PoolError& error) {
        std::fprintf(stderr, "%s\n", error.what());
        ++failed;
      }
      // The idle time since the answer, within 1.5 ms.
      std::this_thread::sleep_for(std::chrono::microseconds(98500 + random() % 3000));
    }
  };
  std::thread other(drive, 1);
  drive(2);
  other.join();
  INFO(stayed << " stayed, " << replaced << " replaced");
  CHECK(failed == 0);
  CHECK(replaced > 0);
}
