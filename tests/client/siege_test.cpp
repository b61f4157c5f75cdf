// Misbehaving daemons: a call ends in time, with an answer or an error that says what happened, and leaves no
// process and no descriptor behind, also in unusual harnesses.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::PoolError;
using cppool::PoolOptions;
using cppool::Result;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Kind = PoolError::Kind;

namespace {

// Measures how late the machine wakes a thread that only sleeps. This delay is allowed on top of a limit.
class Lateness {
 public:
  Lateness() : thread_([this] { Watch(); }) {}
  ~Lateness() { Worst(); }
  milliseconds Worst() {  // ends the measurement
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return std::chrono::ceil<milliseconds>(worst_);
  }

 private:
  void Watch() {
    while (!stop_) {
      const auto due = Clock::now() + 2ms;
      std::this_thread::sleep_until(due);
      worst_ = std::max(worst_, Clock::now() - due);
    }
  }
  std::atomic<bool> stop_{false};
  Clock::duration worst_{0};
  std::thread thread_;
};

// A daemon that ends, or answers, does so at once: its limit is far from that, and below the five seconds
// that a runaway takes.
constexpr milliseconds kShort = 200ms, kLong = 2s;

struct Siege {
  const char* what;
  std::optional<Kind> kind;  // the error's; none: the answer is `passed`
  milliseconds limit = kind == Kind::kTimeout ? kShort : kLong;
};

#ifdef CPPOOL_TEST_TSAN  // which reads a flood of lines ten times as slowly
constexpr milliseconds kSlack = 500ms;
#else
constexpr milliseconds kSlack = 50ms;
#endif
constexpr milliseconds kGrace = 50ms, kKillGrace = 200ms;

std::string Ms(Clock::duration time) {
  return std::to_string(std::chrono::ceil<milliseconds>(time).count()) + " ms";
}

std::string Name(std::optional<Kind> kind) { return kind ? std::string(ToString(*kind)) : "an answer"; }

// Makes one call to such a daemon. Returns what was wrong; empty: nothing. `late`: the call took too long,
// nothing else was wrong.
std::string EndureOnce(const Siege& siege, bool* late) {
  PoolOptions options = FakeOptions();
  options.grace = kGrace;
  options.kill_grace = kKillGrace;
  options.retries = 0;
  Pool pool(options);
  int group = 0;
  std::thread([&] { group = GroupOf(pool); }).join();  // the thread that spawned the daemon has ended

  Lateness lateness;
  std::optional<PoolError> error;
  const auto begin = Clock::now();
  try {
    const Result result = pool.Run({{"do", siege.what}, {"ms", 1000}}, Within(siege.limit - kGrace));
    if (!result.ok()) return "the answer is " + result.json.dump();
  } catch (const PoolError& thrown) {
    error = thrown;
  }
  const auto took = Clock::now() - begin;
  const auto allowed = siege.limit + kKillGrace + kSlack + lateness.Worst();
  const auto kind = error ? std::optional(error->kind()) : std::nullopt;
  if (kind != siege.kind)
    return Name(kind) + " instead of " + Name(siege.kind) + (error ? ": " + std::string(error->what()) : "");
  if (kind == Kind::kTimeout && took < siege.limit) return "gave up after " + Ms(took);
  *late = took > allowed;
  if (*late) return "took " + Ms(took) + ", allowed are " + Ms(allowed);
  if (error && error->stderr_tail().empty()) return "the error has no stderr";
  if (error && !Eventually([&] { return GroupGone(group); })) return "its process group is still alive";
  const Result next = pool.Run();
  if (!next.ok()) return "the next answer is " + next.json.dump();
  pool.Stop();
  if (!Eventually([&] { return GroupGone(group); })) return "its process group outlives the Pool";
  return "";
}

std::string Endure(const Siege& siege) {
  std::string wrong;
  bool late = true;
  for (int i = 0; i < 3 && late; ++i) {  // a busy machine may be late once; a wrong client is late every time
    late = false;
    const int before = CountFds();
    wrong = EndureOnce(siege, &late);
    if (CountFds() != before) wrong += " descriptors are left open";
    if (!NoChildren()) wrong += " children are left";
  }
  return wrong.empty() ? "" : std::string(siege.what) + ": " + wrong + "\n";
}

const Siege kSieges[] = {
    {"hang", Kind::kTimeout},
    {"hang_ignoring_term", Kind::kTimeout},
    {"hang_with_grandchild", Kind::kTimeout},
    {"stopped", Kind::kTimeout},
    {"late", Kind::kTimeout},
    {"late_ignoring_term", Kind::kTimeout},
    {"dribble", Kind::kTimeout, 2200ms},
    {"endless_line", Kind::kTimeout},
    {"endless_line_after_sentinel", Kind::kTimeout},
    {"noise_for_ever", Kind::kTimeout},
    {"noise_with_sentinels_for_ever", Kind::kTimeout},
    {"stale_for_ever", Kind::kTimeout},
    {"flood_stderr_for_ever", Kind::kTimeout},
    {"close_stdin", Kind::kTimeout},
    {"close_stdout", Kind::kProtocol},
    {"garbage", Kind::kProtocol},
    {"pass_without_id", Kind::kProtocol},
    {"die", Kind::kDied},
    {"die_by_signal", Kind::kDied},
    {"half_an_answer", Kind::kDied},
    {"grandchild", Kind::kDied},
    {"runaway", Kind::kDied},
    {"flooding_runaway", Kind::kDied},
    {"stale", std::nullopt},
    {"sleeper", std::nullopt},
};

#ifndef CPPOOL_TEST_TSAN

// Runs `body` in a forked child, which has neither this process's threads nor its peak of memory, and returns
// its text.
std::string InChildSays(const std::function<std::string()>& body) {
  int fds[2];
  if (pipe(fds) != 0) return "no pipe";
  const int code = InChild([&] {
    close(fds[0]);
    const std::string text = body();
    return write(fds[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1;
  });
  close(fds[1]);
  std::string text(65536, '\0');
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, read(fds[0], text.data(), text.size()))));
  close(fds[0]);
  return code == 0 ? text : text + "the child ended with " + std::to_string(code);
}

long StatusKb(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.rfind(name + ":", 0) == 0) return std::stol(line.substr(name.size() + 1));
  return -1;
}

std::atomic<int> ticks{0};

// All at once: 1500 descriptors, default SIGPIPE, ignored SIGCHLD, frequent signals. Returns what failed.
std::string BeAHardHarness() {
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  int last = 0;
  while (last >= 0 && last < 1500) last = open("/dev/null", O_RDONLY);
  if (last < 0) return "1500 descriptors cannot be opened";
  signal(SIGPIPE, SIG_DFL);
  signal(SIGCHLD, SIG_IGN);
  struct sigaction action = {};
  action.sa_handler = [](int) { ++ticks; };  // no SA_RESTART: calls are interrupted
  sigaction(SIGUSR1, &action, nullptr);
  sigevent event = {};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGUSR1;
  timer_t timer;
  const itimerspec often = {{0, 500000}, {0, 500000}};
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 || timer_settime(timer, 0, &often, nullptr) != 0)
    return "no timer";
  return "";
}

#endif

}  // namespace

TEST_CASE("a call to a misbehaving daemon ends in time and leaves nothing behind") {
  for (const Siege& siege : kSieges) CHECK(Endure(siege) == "");
}

#ifndef CPPOOL_TEST_TSAN

TEST_CASE("a call ends in time also with many descriptors, SIGCHLD ignored and frequent signals") {
  for (const Siege& siege : kSieges) {
    if (siege.limit > kLong) continue;
    CHECK(InChildSays([&] {
            std::string wrong = BeAHardHarness();
            if (wrong.empty()) wrong = Endure(siege);
            // Some calls end before ten signals have arrived.
            if (wrong.empty() && !Eventually([] { return ticks >= 10; })) wrong = "no signals came";
            return wrong;
          }) == "");
  }
}

TEST_CASE(
    "cppoold runs cases in a harness with many descriptors, SIGCHLD ignored and frequent signals, and ends "
    "when it is killed") {
  int fds[2];
  REQUIRE(pipe(fds) == 0);
  const int code = InChild([&] {
    const int out = fcntl(fds[1], F_DUPFD_CLOEXEC, 3);
    if (const std::string wrong = BeAHardHarness(); !wrong.empty()) throw std::runtime_error(wrong);
    PoolOptions options;
    options.daemon = CPPOOL_TEST_DAEMON;
    options.backend = "host";
    options.case_files = {CPPOOL_ODD_CASE};
    Pool pool(options);
    cppool::RunOptions odd = Within(40s);
    odd.case_name = "odd";
    int pid = 0;
    std::thread([&] { pid = pool.Hello()["pid"]; }).join();  // the thread that spawned the daemon has ended
    for (int i = 0; i < 3; ++i)
      if (!pool.Run({{"action", "pass"}}, odd).ok()) return 1;
    if (pool.Hello()["pid"] != pid || write(out, &pid, sizeof pid) != sizeof pid) return 2;
    std::thread killer([] {
      std::this_thread::sleep_for(300ms);  // the case is running
      kill(getpid(), SIGKILL);
    });
    pool.Run({{"action", "sleep"}}, odd);  // sleeps for ten minutes
    return 3;
  });
  CHECK(code == -SIGKILL);
  close(fds[1]);
  int pid = 0;
  REQUIRE(read(fds[0], &pid, sizeof pid) == sizeof pid);
  close(fds[0]);
  CHECK(Eventually([&] { return GroupGone(pid); }));
}

TEST_CASE("a gigabyte without a newline, and megabytes of noise, do not increase the client's memory") {
  struct Flood {
    const char* what;
    std::optional<Kind> kind;
  };
  for (const Flood& flood : {Flood{"gigabyte", {}}, Flood{"gigabyte_of_answer", Kind::kProtocol},
                             Flood{"binary_noise", {}}, Flood{"noise", {}}, Flood{"flood_stderr", {}}}) {
    INFO(flood.what);
    CHECK(InChildSays([&]() -> std::string {
            PoolOptions options = FakeOptions();
            options.retries = 0;
            std::size_t logged = 0;
            options.log = [&](std::string_view line) { logged += line.size(); };
            Pool pool(options);
            pool.Hello();
            [[maybe_unused]] const long before = StatusKb("VmRSS");
            std::optional<Kind> kind;
            try {
              const Result result = pool.Run(Do(flood.what), Within(40s));
              if (!result.ok()) return result.json.dump();
            } catch (const PoolError& error) {
              kind = error.kind();
            }
            if (kind != flood.kind) return Name(kind);
            if (flood.what != std::string("flood_stderr") && !kind && logged < (1u << 20))
              return "only " + std::to_string(logged) + " bytes of noise were logged";
#ifndef CPPOOL_TEST_ASAN  // AddressSanitizer keeps freed memory
            const long grown = StatusKb("VmHWM") - before;
            if (before < 0 || grown > (64 << 10)) return "grew by " + std::to_string(grown) + " KiB";
#endif
            return pool.Run().ok() ? "" : "the next call fails";
          }) == "");
  }
}

#endif

TEST_CASE("a second answer is not taken for the next request's, even without an id") {
  LeavesNothing([] {
    PoolOptions options = FakeOptions();
    std::string log;
    options.log = [&](std::string_view line) { log += line; };
    Pool pool(options);
    for (int i = 0; i < 20; ++i) {
      CHECK(pool.Run(Do("twice_without_id")).ok());
      CHECK(pool.Run(Do("twice")).ok());
      const Result result = pool.Run();
      CHECK(result.ok());
      CHECK(result.attempts == 1);
    }
    CHECK(Has(log, "an answer without a request"));
  });
}

TEST_CASE("with a retry, a daemon that closes a pipe after its answer is replaced by the next call") {
  const auto what = GENERATE(as<std::string>{}, "close_stdin_afterwards", "close_stdout_afterwards");
  LeavesNothing([&] {
    cppool::PoolOptions options = FakeOptions();
    options.retries = 1;
    Pool pool(options);
    const int group = GroupOf(pool);
    CHECK(pool.Run(Do(what)).ok());
    CHECK(pool.Run().ok());
    CHECK(Eventually([&] { return GroupGone(group); }));
  });
}

TEST_CASE("with a retry, a request whose daemon is killed at any moment is answered") {
  LeavesNothing([] {
    cppool::PoolOptions options = FakeOptions();
    options.retries = 1;
    Pool pool(options);
    int replaced = 0;
    for (int i = 0; i < 100; ++i) {
      const int pid = pool.Hello()["pid"];
      std::thread killer([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(i * 40));
        kill(pid, SIGKILL);  // the id is not reused before the Pool has reaped the daemon
      });
      Result result;
      std::string error;
      try {
        result = pool.Run({{"do", "late"}, {"ms", 2}});
      } catch (const PoolError& thrown) {
        error = thrown.what();
      }
      killer.join();
      CHECK(error == "");
      CHECK(result.ok());
      if (result.attempts == 2) ++replaced;
    }
    CHECK(replaced > 0);
  });
}

TEST_CASE("a suite of 800 cases with a daemon that cannot start does not start 800 daemons") {
  LeavesNothing([] {
    TemporaryFolder folder;
    PoolOptions options = FakeOptions("usage");
    options.arguments.insert(options.arguments.end(), {"--count", folder.File("count")});
    Pool pool(options);
    auto error = [&] {
      try {
        pool.Run();
      } catch (const PoolError& thrown) {
        CHECK(thrown.kind() == Kind::kStart);
        CHECK(Has(thrown.stderr_tail(), "4 ranks need 4 devices"));
        return std::string(thrown.what());
      }
      return std::string();
    };
    const auto begin = Clock::now();
    for (int i = 0; i < 5; ++i) {
      CHECK(Has(error(), "exited with code 2 at its start"));
      CHECK(CountLines(folder.File("count")) == static_cast<std::size_t>(i) + 1);
    }
    CHECK(Clock::now() - begin >= 1500ms);  // pauses of 0.1, 0.2, 0.4 and 0.8 s between the starts
    std::string refused;
    for (int i = 5; i < 800; ++i) refused = error();
    CHECK(CountLines(folder.File("count")) <=
          8);  // 5, or more if the machine is so slow that pauses end meanwhile
    CHECK(Has(refused, "has failed to start "));
    CHECK(Has(refused, " times in a row"));
    CHECK(Has(refused, "Pool::Stop()"));
    CHECK(Has(refused, "exited with code 2 at its start"));

    const std::size_t before = CountLines(folder.File("count"));
    pool.Stop();
    CHECK_FALSE(Has(error(), "in a row"));
    CHECK(CountLines(folder.File("count")) == before + 1);
  });
}

TEST_CASE("a daemon that can start again is started after a pause, and failed starts are counted anew") {
  LeavesNothing([] {
    TemporaryFolder folder;
    PoolOptions options = FakeOptions("file");
    options.arguments.insert(options.arguments.end(),
                             {"--count", folder.File("count"), "--file", folder.File("there")});
    options.retries = 0;
    Pool pool(options);
    for (int i = 0; i < 6; ++i) CHECK_THROWS_AS(pool.Run(), PoolError);
    CHECK(CountLines(folder.File("count")) == 5);
    std::ofstream(folder.File("there")) << "now";
    std::this_thread::sleep_for(1700ms);
    CHECK(pool.Run().ok());
    CHECK_THROWS_AS(pool.Run(Do("die")), PoolError);
    CHECK(pool.Run().ok());  // a death in a case does not count as a failed start
    CHECK(std::remove(folder.File("there").c_str()) == 0);
    CHECK_THROWS_AS(pool.Run(Do("die")), PoolError);
    const std::size_t before = CountLines(folder.File("count"));
    for (std::size_t i = 1; i <= 3; ++i) {
      CHECK_THROWS_AS(pool.Run(), PoolError);
      CHECK(CountLines(folder.File("count")) == before + i);
    }
  });
}

TEST_CASE(
    "the tail of stderr has at most 200 whole lines and 4000 bytes, and includes an unfinished last line") {
  LeavesNothing([] {
    Pool pool(FakeOptions());
    pool.Run({{"do", "say"}, {"text", "first\r\n\nnot ended"}});
    CHECK(Eventually([&] { return Has(pool.StderrTail(), "not ended\n"); }));
    CHECK(pool.StderrTail() == "the fake daemon has started\nfirst\n\nnot ended\n");
    std::string many;
    for (int i = 0; i < 300; ++i) many += "\n" + std::to_string(i);
    pool.Run({{"do", "say"}, {"text", many + "\n"}});
    CHECK(Eventually([&] { return Has(pool.StderrTail(), "299\n"); }));
    CHECK(pool.StderrTail().rfind("100\n101\n", 0) == 0);
    std::string umlauts;  // two bytes each; "!" and "!?" move the cut by a byte
    for (int i = 0; i < 3000; ++i) umlauts += "\xC3\xA4";
    pool.Run({{"do", "say"}, {"text", umlauts + "!\n"}});
    CHECK(Eventually([&] { return Has(pool.StderrTail(), "!\n"); }));
    CHECK(pool.StderrTail().size() == 4000);
    pool.Run({{"do", "say"}, {"text", umlauts + "!?\n"}});
    CHECK(Eventually([&] { return Has(pool.StderrTail(), "!?\n"); }));
    CHECK(pool.StderrTail().size() == 3999);
  });
}
