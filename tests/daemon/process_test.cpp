// Parts of the daemon's process: the channel for answers, the watchdog, the ranks' threads, the command line.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "daemon/library.h"
#include "daemon/library_probe.h"
#include "daemon/options.h"
#include "daemon/process.h"
#include "daemon/rank_threads.h"
#include "daemon/watchdog.h"
#include "tests/catch.h"
#include "tests/files.h"
#include "tests/pipe.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;
using base::UniqueFd;
using Clock = std::chrono::steady_clock;

daemon::ParsedOptions Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "cppoold");
  return daemon::ParseOptions(static_cast<int>(arguments.size()), arguments.data());
}

}  // namespace

TEST_CASE("a library that does not return was given a time, which only a request's deadline cuts") {
  const auto failure = [](const char* file, Clock::duration to_deadline) -> std::string {
    try {
      daemon::ProbeLibrary(CPPOOL_TEST_DAEMON, daemon::LibraryKind::kCases, file, file, 300ms,
                           Clock::now() + to_deadline);
    } catch (const daemon::LibraryError& error) {
      return error.what();
    }
    return "";
  };
  const std::string hangs = failure(CPPOOL_ODD_HANGS, 1h);
  CHECK_THAT(hangs, Catch::Matchers::ContainsSubstring(" did not return within "));
  CHECK_THAT(hangs, Catch::Matchers::ContainsSubstring(" s: look at what its constructors "));
  CHECK_THAT(hangs, !Catch::Matchers::ContainsSubstring("request"));
  const std::string cut = failure(CPPOOL_ODD_HANGS, 200ms);
  CHECK_THAT(cut, Catch::Matchers::ContainsSubstring(" did not return within "));
  CHECK_THAT(cut, Catch::Matchers::ContainsSubstring("the request's deadline is near"));
  const std::string late = failure(CPPOOL_ODD_CASE, -1ms);
  CHECK_THAT(late, Catch::Matchers::ContainsSubstring("there is no time to try it"));
  CHECK_THAT(late, !Catch::Matchers::ContainsSubstring("constructors"));
}

TEST_CASE("how a process ends is known before it is reaped") {
  for (const int with : {0, SIGTERM, SIGKILL}) {
    const pid_t child = fork();
    if (child == 0) {
      if (with == 0) _exit(5);
      std::signal(with, SIG_DFL);
      kill(getpid(), with);
      _exit(1);
    }
    siginfo_t ended;
    REQUIRE(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) == 0);
    const auto known = daemon::StatusOfEnding(child, getpid());
    CHECK_FALSE(daemon::StatusOfEnding(child, getppid()));
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(known == status);
    CHECK_FALSE(daemon::StatusOfEnding(child, getpid()));
  }
  CHECK_FALSE(daemon::StatusOfEnding(getpid(), getppid()));
}

TEST_CASE("a deadline passes once, and only if it is armed") {
  std::promise<void> passed;
  std::atomic<int> times{0};
  daemon::Watchdog watchdog(0, -1,
                            {[&] {
                               ++times;
                               passed.set_value();
                             },
                             nullptr, nullptr});
  for (int i = 0; i < 200; ++i) {
    watchdog.Arm(Clock::now() + 10min);
    CHECK(watchdog.Disarm());
  }
  // A deadline that is replaced before it passes has no effect.
  watchdog.Arm(Clock::now() + 1ms);
  watchdog.Arm(Clock::now() + 10min);
  std::this_thread::sleep_for(20ms);
  CHECK(times <= 1);
  if (times == 0) {
    CHECK(watchdog.Disarm());
    watchdog.Arm(Clock::now() + 1ms);
  }
  REQUIRE(passed.get_future().wait_for(60s) == std::future_status::ready);
  CHECK_FALSE(watchdog.Disarm());
  CHECK(times == 1);
}

TEST_CASE("the watchdog's thread has its name from the beginning") {
  for (int i = 0; i < 50; ++i) {
    const daemon::Watchdog watchdog(0, -1, {nullptr, nullptr, nullptr});
    bool named = false;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(thread.path() / "comm"), name);
      named = named || name == "watchdog";
    }
    CHECK(named);
  }
}

TEST_CASE("exactly one of the watchdog and the dispatcher answers") {
  for (int i = 0; i < 300; ++i) {
    std::atomic<int> answers{0};
    {
      daemon::Watchdog watchdog(0, -1, {[&] { ++answers; }, nullptr, nullptr});
      watchdog.Arm(Clock::now() + std::chrono::microseconds(i % 100));
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (watchdog.Disarm()) ++answers;
    }
    REQUIRE(answers == 1);
  }
}

TEST_CASE("the watchdog notices the death of the process that it watches") {
  Pipe pipe;
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    close(pipe.write_end.get());
    _exit(read(pipe.read_end.get(), &byte, 1) == 0 ? 0 : 1);
  }
  std::promise<void> died;
  daemon::Watchdog watchdog(child, -1, {nullptr, [&] { died.set_value(); }, nullptr});
  auto future = died.get_future();
  CHECK(future.wait_for(20ms) == std::future_status::timeout);
  pipe.write_end.Reset();
  CHECK(future.wait_for(60s) == std::future_status::ready);
  waitpid(child, nullptr, 0);
}

TEST_CASE("the watchdog reports each termination request once") {
  const UniqueFd terminate(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::promise<void> reported[2];
  std::atomic<int> times{0};
  daemon::Watchdog watchdog(0, terminate.get(),
                            {nullptr, nullptr, [&] { reported[times++ % 2].set_value(); }});
  for (auto& once : reported) {
    REQUIRE(eventfd_write(terminate.get(), 1) == 0);
    CHECK(once.get_future().wait_for(60s) == std::future_status::ready);
  }
  std::this_thread::sleep_for(20ms);
  CHECK(times == 2);
}

TEST_CASE("every rank's thread runs every job") {
  daemon::RankThreads threads(8);
  std::atomic<int> sum{0};
  for (int i = 0; i < 500; ++i) {
    threads.Start([&](int rank) { sum += rank + 1; });
    REQUIRE(threads.WaitUntil(Clock::now() + 60s));
    REQUIRE(sum == 36 * (i + 1));
  }
}

TEST_CASE("the destructor of RankThreads does not wait for threads that are stuck") {
  auto release = std::make_shared<std::promise<void>>();
  auto future = release->get_future().share();
  auto finished = std::make_shared<std::promise<void>>();
  {
    daemon::RankThreads threads(2);
    threads.Start([future, finished](int rank) {
      if (rank == 1) {
        future.wait();
        finished->set_value();
      }
    });
    CHECK_FALSE(threads.WaitUntil(Clock::now() + 10ms));
  }  // returns while rank 1's thread still runs
  release->set_value();
  CHECK(finished->get_future().wait_for(60s) == std::future_status::ready);
}

TEST_CASE("every option of the daemon's command line is read") {
  auto parsed = Parse({"--world-size", "4"});
  REQUIRE(parsed.options);
  CHECK(parsed.options->world_size == 4);
  CHECK(parsed.options->backend == daemon::BackendChoice::kAuto);
  CHECK(parsed.options->transport == kernels::Transport::kAuto);
  CHECK(parsed.options->sentinel == "[CP_POOL_RESP] ");
  CHECK(parsed.options->case_files.empty());
  parsed = Parse({"--world-size=2", "--backend", "host", "--transport", "auto", "--sentinel", "", "--case",
                  "a.so", "--case", "b.so", "--log-level", "off"});
  REQUIRE(parsed.options);
  CHECK(parsed.options->backend == daemon::BackendChoice::kHost);
  CHECK(parsed.options->sentinel.empty());
  CHECK(parsed.options->case_files == std::vector<std::string>{"a.so", "b.so"});
  CHECK(parsed.options->log_level == "off");
  CHECK(Parse({"--world-size", "2", "--transport", "nccl"}).options->transport == kernels::Transport::kNccl);
  CHECK(Parse({"--world-size", "2", "--transport", "peer"}).options->transport == kernels::Transport::kPeer);
  parsed = Parse({"--world-size", "2", "--sentinel="});  // what a shell makes of --sentinel=''
  REQUIRE(parsed.options);
  CHECK(parsed.options->sentinel.empty());
  CHECK(Parse({"--world-size", "2", "--sentinel=> "}).options->sentinel == "> ");
  CHECK(Parse({"--world-size", "2", "--case", "a.so", "b.so"}).options->case_files.size() == 2);
}

TEST_CASE("an invalid command line is refused with exit code 2") {
  const std::vector<std::pair<std::vector<const char*>, std::string>> wrong = {
      {{}, "--world-size is required"},
      {{"--world-size", "0"}, "1"},
      {{"--world-size", "65"}, "64"},
      {{"--world-size", "two"}, "two"},
      {{"--world-size", "2", "--backend", "rocm"}, "host"},
      {{"--world-size", "2", "--transport", "mpi"}, "peer"},
      {{"--world-size", "2", "--log-level", "loud"}, "trace"},
      {{"--world-size", "2", "--wat"}, "--wat"},
      {{"--world-size", "2", "--sentinel", "a\nb"}, "one line"},
      {{"--world-size", "2", "stray"}, "stray"},
      {{"--world-size", "2", "--idle-exit", "0"}, "from 0.001 to 1e6 seconds"},
      {{"--world-size", "2", "--idle-exit", "nan"}, "from 0.001 to 1e6 seconds, not nan"},
      {{"--world-size", "2", "--idle-exit=-nan"}, "from 0.001 to 1e6 seconds"},
      {{"--world-size", "2", "--idle-exit", "inf"}, "from 0.001 to 1e6 seconds, not inf"},
      {{"--world-size", "2", "--idle-exit", "soon"}, "soon"},
  };
  for (const auto& [arguments, part] : wrong) {
    const auto parsed = Parse(arguments);
    INFO(parsed.text);
    CHECK_FALSE(parsed.options);
    CHECK(parsed.exit_code == 2);
    CHECK(Has(parsed.text, part));
    CHECK(Has(parsed.text, "--help"));
  }
  CHECK(Parse({"--help"}).exit_code == 0);
  CHECK(Has(Parse({"--help"}).text, "--sentinel"));
  CHECK(Parse({"--version"}).text.find("cppoold 0.") == 0);
}

}  // namespace cppool::test
