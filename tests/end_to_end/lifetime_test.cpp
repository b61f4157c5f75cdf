// How a daemon starts and exits: refused options, stdin and stdout, idle time, signals, the death of its
// parent.
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"
#include "tests/child.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

std::string Odd(const std::string& action, int rank = 0, int deadline_ms = 60000) {
  return Json{{"op", "run"},
              {"case", "odd"},
              {"deadline_ms", deadline_ms},
              {"params", {{"action", action}, {"rank", rank}}}}
      .dump();
}

// A separate parent process for a daemon, which spawns it from a thread that ends at once.
struct Harness {
  pid_t parent = -1;
  pid_t daemon = -1;
  int requests = -1;  // kept open here, so that the end of input does not end the daemon
  int answers = -1;
  int errors = -1;  // the daemon's stderr

  explicit Harness(const char* log_level = "off") {
    int to[2], from[2], pids[2], log[2];
    REQUIRE(pipe2(log, O_CLOEXEC) == 0);
    REQUIRE(pipe2(to, O_CLOEXEC) == 0);
    REQUIRE(pipe2(from, O_CLOEXEC) == 0);
    REQUIRE(pipe2(pids, O_CLOEXEC) == 0);
    parent = fork();
    if (parent == 0) {
      std::thread([&] {
        const pid_t child = fork();
        if (child == 0) {
          dup2(to[0], 0);
          dup2(from[1], 1);
          dup2(log[1], 2);
          setenv("CPPOOL_PARENT_PID", std::to_string(getppid()).c_str(), 1);
          execl(CPPOOL_DAEMON, "cppoold", "--world-size", "2", "--backend", "host", "--case", CPPOOL_ODD_CASE,
                "--log-level", log_level, nullptr);
          _exit(127);
        }
        if (write(pids[1], &child, sizeof(child)) != sizeof(child)) _exit(1);
      }).join();
      while (true) pause();
    }
    REQUIRE(read(pids[0], &daemon, sizeof(daemon)) == sizeof(daemon));
    requests = to[1];
    answers = from[0];
    errors = log[0];
    for (const int fd : {to[0], from[1], pids[0], pids[1], log[1]}) close(fd);
  }
  ~Harness() {
    kill(parent, SIGKILL);
    waitpid(parent, nullptr, 0);
    close(requests);
    close(answers);
    close(errors);
  }
  std::string Stderr() const {  // all of it: waits for the daemon's end
    std::string text;
    char buffer[4096];
    for (ssize_t count; (count = read(errors, buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<std::size_t>(count));
    return text;
  }
  void Send(const std::string& line) const {
    const std::string text = line + "\n";
    REQUIRE(write(requests, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  bool HasAnswer(int limit_ms) const {
    pollfd ready{answers, POLLIN, 0};
    return poll(&ready, 1, limit_ms) == 1 && (ready.revents & POLLIN);
  }
  void KillParent() {
    kill(parent, SIGKILL);
    waitpid(parent, nullptr, 0);
  }
};

}  // namespace

// The last line of a daemon's stderr, which must be the start line.
Json StartLine(const std::string& text) {
  const std::string prefix = "cppoold: start ";
  REQUIRE(!text.empty());
  REQUIRE(text.back() == '\n');
  const auto before = text.rfind('\n', text.size() - 2);
  const std::string line = text.substr(before == std::string::npos ? 0 : before + 1);
  REQUIRE(line.rfind(prefix, 0) == 0);
  return Json::parse(line.substr(prefix.size()));
}

TEST_CASE("a daemon that cannot start says why and exits with code 2") {
  struct Wrong {
    std::vector<std::string> arguments;
    std::string stage, part;
  };
  const std::vector<Wrong> wrongs = {
      {{}, "arguments", "--world-size is required"},
      {Host(2, {"--kernels", ",x"}), "arguments",
       "--kernels: must be \"cppool\", \"cudnn\", a library's path"},
      {Host(2, {"--transport", "nccl"}), "backend", "--transport nccl needs the backend cuda"},
      {Host(2, {"--case", "/nonexistent.so"}), "cases", "--case /nonexistent.so: there is no such file"},
      {Host(2, {"--case", CPPOOL_NO_CASES}), "cases", "exports no function cppool_cases"},
      {Host(2, {"--case", CPPOOL_ODD_CRASHES}), "cases",
       "--case " CPPOOL_ODD_CRASHES
       ": when it was opened to try it, before the daemon loads it, it crashed by signal 6"},
      {Host(2, {"--case", CPPOOL_ODD_CASE, "--case", CPPOOL_ODD_CASE}), "cases", "'odd' is taken"},
  };
  for (const Wrong& wrong : wrongs) {
    DaemonProcess daemon(wrong.arguments);
    CHECK(daemon.Wait() == 2);
    INFO(daemon.Stderr());
    CHECK(Has(daemon.Stderr(), wrong.part));
    CHECK_FALSE(daemon.ReadLine());  // nothing unsolicited on stdout
    const Json why = StartLine(daemon.Stderr());
    CHECK(Has(why.at("error"), wrong.part));
    CHECK(why.at("kind") == "invalid_request");
    CHECK(why.at("detail").is_string());
    CHECK(why.at("stage") == wrong.stage);
    const bool understood = wrong.stage != "arguments";
    CHECK(why.value("world_size", 0) == (understood ? 2 : 0));
    CHECK(why.value("backend", "") == (understood ? "host" : ""));
  }
}

TEST_CASE("a daemon whose stdin is closed says so and exits with code 2") {
  const Child daemon = RunChild("'" CPPOOL_DAEMON "' --world-size 1 --backend host <&-");
  CHECK(Has(daemon.output, "stdin is closed"));
  CHECK(daemon.exit_code == 2);
}

TEST_CASE("an unreadable stdin and an unwritable stdout are reported before the daemon exits") {
  struct Wrong {
    const char *before, *after, *says;
    int exit_code;
  };
  for (const Wrong& wrong :
       {Wrong{"", "</", "stdin cannot be read: Is a directory", 3},
        Wrong{"echo '{\"op\": \"hello\"}' | ", ">/dev/full", "nobody reads stdout", 1}}) {
    const std::string command =
        std::string(wrong.before) + "'" CPPOOL_DAEMON "' --world-size 1 --backend host 2>&1 " + wrong.after;
    const Child daemon = RunChild(command);
    INFO(command << ": " << daemon.output);
    CHECK(Has(daemon.output, wrong.says));
    CHECK(daemon.exit_code == wrong.exit_code);
  }
}

TEST_CASE("without a device, --backend cuda is an error and auto runs on the host") {
  const Environment none("CUDA_VISIBLE_DEVICES", "");
  {
    DaemonProcess daemon({"--world-size", "2", "--backend", "cuda"});
    CHECK(daemon.Wait() == 2);
    INFO(daemon.Stderr());
    CHECK(Has(daemon.Stderr(), "CUDA sees no device (CUDA_VISIBLE_DEVICES=''; it is empty"));
    CHECK(Has(daemon.Stderr(), "--backend host"));
    const Json why = StartLine(daemon.Stderr());
    CHECK(why.at("kind") == "cuda");
    CHECK(why.at("devices") == 0);
    CHECK(why.at("world_size") == 2);
    CHECK(why.at("detail") ==
          "CUDA sees no device (CUDA_VISIBLE_DEVICES=''; it is empty, so that CUDA sees none)");
  }
  DaemonProcess daemon({"--world-size", "2"});
  CHECK(daemon.Ask({{"op", "hello"}}).at("backend") == "host");
}

TEST_CASE("an idle daemon exits in order, but not during a partial line or a case") {
  DaemonProcess idle(Host(2, {"--idle-exit", "0.3"}));
  CHECK(idle.Ask({{"op", "hello"}}).at("ok") == true);
  idle.Send("");                 // no request
  CHECK_FALSE(idle.ReadLine());  // it exits although its input is open
  CHECK(idle.Wait() == 0);
  CHECK(Has(idle.Stderr(), "no request for 0.3 s"));

  DaemonProcess half(Host(2, {"--idle-exit", "0.3", "--case", CPPOOL_ODD_CASE}));
  half.SendBytes("{\"op\": \"hello\"}\n{\"op\": ");  // in one piece: it is never idle between them
  CHECK(half.ReadAnswer().at("ok") == true);
  std::this_thread::sleep_for(std::chrono::milliseconds(900));
  half.SendBytes("\"hello\"}\n" + Odd("sleep", 0, 900) + "\n");
  CHECK(half.ReadAnswer().at("ok") == true);
  CHECK(half.ReadAnswer().at("failure").at("kind") == "timeout");
}

TEST_CASE(
    "a rank that throws or skips a collective is named at once, the others are released, and the next case "
    "passes") {
  for (const int world_size : {2, 4, 8}) {
    DaemonProcess daemon(Host(world_size, {"--case", CPPOOL_ODD_CASE}));
    for (const std::string action : {"throw", "wait", "throw"}) {
      const auto start = std::chrono::steady_clock::now();
      daemon.Send(Odd(action, 1));  // with a deadline of a minute
      const Json answer = daemon.ReadAnswer();
      INFO(answer);
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
      CHECK(answer.at("status") == "error");
      CHECK(answer.at("failure").at("kind") == "internal");
      CHECK(answer.at("failure").at("rank") == 1);
      CHECK(answer.at("ranks").at(0).at("ok") == false);
      CHECK_FALSE(answer.contains("fatal"));
      if (action == "throw") {
        CHECK(Has(answer.at("error"), "thrown on purpose"));
        CHECK(Has(answer.at("ranks").at(0).at("error"), "rank 1"));
      } else {
        CHECK(answer.at("failure").at("stage") == "meet");
        CHECK(Has(answer.at("error"), "rank 1 has finished the case, and rank "));
        CHECK(Has(answer.at("error"), "in all_reduce of 4 bytes"));
        CHECK(answer.at("ranks").at(1).at("ok") == true);
      }
      daemon.Send(Odd("pass"));
      CHECK(daemon.ReadAnswer().at("status") == "passed");
    }
    CHECK(Has(daemon.Stderr(), "[rank 1] [request #1] the case threw: thrown on purpose"));
    CHECK(daemon.Wait() == 0);
  }
}

TEST_CASE("SIGTERM ends an idle daemon in order, and a busy one at once") {
  DaemonProcess idle(Host(2));
  CHECK(idle.Ask({{"op", "hello"}}).at("ok") == true);
  // Waits until the daemon waits for a request: before that, SIGTERM ends it at once, with another exit code.
  while (!Has(idle.Stderr(), "are open")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  kill(idle.pid(), SIGTERM);
  CHECK_FALSE(idle.ReadLine());
  CHECK(idle.Wait() == 0);

  DaemonProcess busy(Host(2, {"--case", CPPOOL_ODD_CASE}));
  CHECK(busy.Ask({{"op", "hello"}}).at("ok") == true);
  busy.Send(Odd("sleep"));
  while (!Has(busy.Stderr(), "asleep")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  kill(busy.pid(), SIGTERM);
  CHECK(busy.Wait() == 128 + SIGTERM);
}

// The signal comes at varying times, also between two requests that were read together. The last request, if
// it were still started, would run to its deadline.
TEST_CASE("SIGTERM ends a daemon that has read more requests than it has started") {
  for (int i = 0; i < 40; ++i) {
    DaemonProcess daemon(Host(1, {"--case", CPPOOL_ODD_CASE, "--log-level", "off"}));
    CHECK(daemon.Ask({{"op", "hello"}}).at("ok") == true);
    std::string lines;
    for (int j = 0; j < 2000; ++j) lines += "{\"op\": \"bad\"}\n";
    std::thread reader([&] {
      while (daemon.ReadLine()) {
      }
    });
    daemon.SendBytes(lines + Odd("sleep", 0, 20000) + "\n");
    std::this_thread::sleep_for(std::chrono::microseconds(500 * i));
    kill(daemon.pid(), SIGTERM);
    reader.join();
    const int code = daemon.Wait();
    CHECK((code == 0 || code == 128 + SIGTERM));
  }
}

TEST_CASE("a daemon exits if the reader of its stdout has closed the pipe") {
  DaemonProcess daemon(Host(2));
  CHECK(daemon.Ask({{"op", "hello"}}).at("ok") == true);
  daemon.CloseOutput();
  daemon.Send(R"({"op": "hello"})");
  CHECK(EndsInTime(daemon.pid()));
  CHECK(daemon.Wait() == 1);
}

TEST_CASE("a daemon outlives the thread that spawned it, but not the process") {
  SECTION("idle, as its log says") {
    for (const char* level : {"off", "info"}) {
      Harness harness(level);
      harness.Send(R"({"op": "hello"})");
      REQUIRE(harness.HasAnswer(60000));
      CHECK(kill(harness.daemon, 0) == 0);
      harness.KillParent();
      CHECK(EndsInTime(harness.daemon));
      const std::string gone = "the parent process " + std::to_string(harness.parent) + " has gone";
      const std::string written = harness.Stderr();
      CHECK((level == std::string("off") ? written.empty() : Has(written, gone)));
    }
  }
  SECTION("during a case") {
    Harness harness;
    harness.Send(R"({"op": "hello"})");
    REQUIRE(harness.HasAnswer(60000));
    harness.Send(Odd("sleep"));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(kill(harness.daemon, 0) == 0);
    harness.KillParent();
    CHECK(EndsInTime(harness.daemon));
  }
}

TEST_CASE("a daemon whose parent is not the process in CPPOOL_PARENT_PID exits and says why") {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  REQUIRE(waitpid(gone, nullptr, 0) == gone);
  {
    const Environment parent("CPPOOL_PARENT_PID", std::to_string(gone).c_str());
    DaemonProcess daemon(Host(2));
    CHECK(daemon.Wait() == 2);
    INFO(daemon.Stderr());
    CHECK(
        Has(daemon.Stderr(), "the parent process " + std::to_string(gone) + " is gone (CPPOOL_PARENT_PID)"));
  }
  // A wrapper process stays between harness and daemon, as with nsys.
  const Environment parent("CPPOOL_PARENT_PID", std::to_string(getpid()).c_str());
  DaemonProcess wrapper({"-c", "'" CPPOOL_DAEMON "' --world-size 2 --backend host; exit $?"}, "/bin/sh");
  CHECK(wrapper.Wait() == 2);
  INFO(wrapper.Stderr());
  CHECK(Has(wrapper.Stderr(), "the parent is " + std::to_string(wrapper.pid()) + ", not " +
                                  std::to_string(getpid()) + ", which started this"));
  CHECK(Has(wrapper.Stderr(), "exec cppoold"));
}

}  // namespace cppool::test
