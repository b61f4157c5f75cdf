// PoolOptions::idle_exit: a daemon that goes when nobody needs it, and a call that meets it going.
#include <signal.h>

#include <atomic>
#include <fstream>
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

// A pool of fake daemons of which the first `going` do as `start` says, and what it logged.
struct GoingPool {
  GoingPool(const std::string& start, int going, std::chrono::milliseconds grace = 20s) {
    cppool::PoolOptions options = FakeOptions(start);
    options.grace = grace;
    options.idle_exit = 1h;
    options.arguments.insert(
        options.arguments.end(),
        {"--file", folder.File("gone"), "--going", std::to_string(going), "--count", folder.File("starts")});
    options.log = [this](std::string_view line) { log += std::string(line) + "\n"; };
    pool.emplace(options);
  }
  int Starts() const {
    std::ifstream file(folder.File("starts"));
    int lines = 0;
    for (std::string line; std::getline(file, line);) ++lines;
    return lines;
  }
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

bool Gone(int pid) {  // to be reaped, or reaped
  const char state = StateOf(std::to_string(pid)).state;
  return state == ' ' || state == 'Z';
}

}  // namespace

TEST_CASE("the idle time is handed to the daemon in seconds, whatever the locale") {
  cppool::PoolOptions options = FakeOptions();
  options.idle_exit = 61050ms;
  Pool pool(options);
  const Json words = pool.Run(Do("echo")).json["surroundings"]["arguments"];
  std::string all;
  for (const Json& word : words) all += word.get<std::string>() + " ";
  CHECK(all.find("--idle-exit 61.050 ") != std::string::npos);
  Pool never(FakeOptions());
  CHECK(never.Run(Do("echo")).json["surroundings"]["arguments"].dump().find("idle") == std::string::npos);
}

TEST_CASE("a request that a daemon left unread as it went is asked of another, and that is no attempt") {
  // The request is in the pipe and is not read; a part of it is read; stdin, or everything, is closed before it is written; the end
  // takes its time.
  for (const bool unknown : {false, true}) {  // how children end
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

TEST_CASE("a daemon that takes longer to go than the grace is ended, and that is no attempt either") {
  GoingPool going("leave_slowly", 1, 100ms);
  const cppool::Result result = going.pool->Run();
  CHECK(result.ok());
  CHECK(result.attempts == 1);
  CHECK(going.Starts() == 2);
}

TEST_CASE("a daemon that nobody expects to go has died, though nobody knows how") {
  const ChildSignal ignored(SIG_IGN);
  TemporaryFolder folder;
  cppool::PoolOptions options = FakeOptions("leave_unread");
  options.arguments.insert(options.arguments.end(), {"--file", folder.File("gone"), "--going", "1"});
  options.retries = 0;
  Pool pool(options);
  CHECK_THROWS_AS(pool.Run(), PoolError);
  CHECK(pool.Run().ok());
}

TEST_CASE("it is asked of another once; then daemons that go count as dead") {
  GoingPool going("leave_unread", 100);
  try {
    going.pool->Run();
    FAIL("there was an answer");
  } catch (const PoolError& error) {
    CHECK(error.kind() == PoolError::Kind::kDied);
    CHECK(std::string(error.what()).find("attempt 2") != std::string::npos);
  }
  CHECK(going.Starts() == 3);
}

TEST_CASE("a daemon that read the request, or ended in disorder, has died") {
  for (const char* start : {"leave_having_read", "leave_in_disorder"}) {
    INFO(start);
    GoingPool going(start, 1);
    cppool::Result result = going.pool->Run();
    CHECK(result.ok());
    CHECK(result.attempts == 2);
    CHECK(going.log.find("another is asked") != std::string::npos);
    CHECK(going.Starts() == 2);
  }
}

TEST_CASE("an idle daemon ends in order, and the next call starts another without a word") {
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
      CHECK(Eventually([&] { return Gone(pid); }));
      const cppool::Result second = pool.Run(kSmallest);
      CHECK(second.ok());
      CHECK(second.attempts == 1);
      CHECK(pool.Hello()["pid"] != pid);
    }
    CHECK(log == "");
  });
}

TEST_CASE("a daemon that is busy or asked in time stays") {
  Pool pool(RealOptions(1500ms));
  const int pid = pool.Hello()["pid"];
  for (int i = 0; i < 20; ++i) {  // twice the idle time in all
    std::this_thread::sleep_for(150ms);
    CHECK(pool.Hello()["pid"] == pid);
  }
}

TEST_CASE("calls at the very moment at which an idle daemon goes are all answered") {
  // Two pools at once, so that the moment moves about; on each some calls find the daemon still there, others not.
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
      // From the answer on: the idle time, and a little more or less.
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
