// What a case leaves behind: put right, reported, or both.
#include <sys/types.h>

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"

namespace cppool::test {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

Json Ask(DaemonProcess& daemon, const std::string& name, const Json& params = Json::object(),
         const char* library = CPPOOL_LITTERING_CASE) {
  return daemon.Ask(
      {{"op", "run"}, {"case", name}, {"load", library}, {"params", params}, {"checks", false}});
}

}  // namespace

TEST_CASE("the floating-point environment of a library, a case and its work ends with their call") {
  DaemonProcess daemon(Host(2));
  for (int i = 0; i < 3; ++i) {
    const Json answer = Ask(daemon, "floats");
    INFO(answer);
    CHECK(answer.at("status") == "passed");
  }
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("what a case leaves is reported with the amount, once, by the run that has left it") {
  DaemonProcess daemon(Host(2));
  const auto leaves = [&](const std::string& action) {
    Json answer = Ask(daemon, "leaves", {{"action", action}});
    INFO(answer);
    CHECK(answer.at("status") == "passed");
    Json reported = {{"leaks", answer.value("leaks", Json())},
                     {"warnings", answer.value("warnings", Json())}};
    CHECK(Ask(daemon, "leaves").value("leaks", Json()) == Json());  // left to the run before it
    return reported;
  };
  const Json nothing = {{"leaks", Json()}, {"warnings", Json()}};
  CHECK(leaves("nothing") == nothing);
  CHECK(
      leaves("allocations") ==
      Json{{"leaks", {{"allocations", 3}, {"device_bytes", 2000}, {"host_bytes", 10}}},
           {"warnings",
            {"the case left 3 allocations (2000 bytes of device memory, 10 of host memory), which the daemon "
             "has freed"}}});
  CHECK(leaves("thread") ==
        Json{{"leaks", {{"threads", 1}}}, {"warnings", {"the case left 1 thread: 'lingering'"}}});
  CHECK(leaves("short thread") == nothing);
  const Json fds = leaves("descriptors");
  CHECK(fds.at("leaks") == Json{{"fds", 3}});
  REQUIRE(fds.at("warnings").size() == 1);
  CHECK_THAT(fds.at("warnings").at(0).get<std::string>(), StartsWith("the case left 3 open descriptors: ") &&
                                                              ContainsSubstring(" (/dev/null), ") &&
                                                              ContainsSubstring(" (pipe:["));
  const Json stats = daemon.Ask({{"op", "stats"}});
  CHECK(stats.at("leaked_allocations") == 3);
  for (const Json& memory : stats.at("memory")) CHECK(memory.at("held_bytes") == 0);
  CHECK(Ask(daemon, "floats").value("leaks", Json()) == Json());
  CHECK(daemon.Ask({{"op", "run"}, {"params", {{"max_seqlen_q", 32}}}}).value("leaks", Json()) == Json());
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("host memory is reported when it grew by over 16 MiB in each of the last five runs of a case") {
  DaemonProcess daemon(Host(2));
  const auto grows = [&](int mebibytes) {
    const Json answer = Ask(daemon, "leaves", {{"action", "memory"}, {"mebibytes", mebibytes}});
    INFO(answer);
    CHECK(answer.at("status") == "passed");
    return answer.value("leaks", Json::object()).value("host_bytes", std::uint64_t{0}) >> 20;
  };
  for (int i = 0; i < 4; ++i) CHECK(grows(20) == 0);
  CHECK(grows(0) == 0);
  for (int i = 0; i < 6; ++i) CHECK(grows(14) == 0);
  for (int i = 0; i < 4; ++i) {
    CHECK(grows(20) == 0);
    CHECK(Ask(daemon, "floats").value("leaks", Json()) == Json());  // another case's runs do not count
  }
  const auto grown = grows(20);
  CHECK(grown >= 19);
  CHECK(grown <= 24);
  CHECK(daemon.Wait() == 0);
}

#ifdef CPPOOL_OPENMP_CASE
TEST_CASE(
    "in a process with OpenMP, whose threads stay, threads are reported when each of the last five runs has "
    "left "
    "some") {
  DaemonProcess daemon(Host(2));
  const auto leaves = [&](const char* action) {
    const Json answer = Ask(daemon, "leaves", {{"action", action}}, CPPOOL_OPENMP_CASE);
    INFO(answer);
    CHECK(answer.at("status") == "passed");
    return answer.value("leaks", Json());
  };
  CHECK(leaves("openmp") == Json());
  CHECK(leaves("openmp") == Json());
  for (int i = 0; i < 4; ++i) CHECK(leaves("thread") == Json());
  CHECK(leaves("thread") == Json{{"threads", 1}});
  CHECK(leaves("descriptors") == Json{{"fds", 3}});
  CHECK(daemon.Wait() == 0);
}
#endif

TEST_CASE("an OpenMP library is known under the name that a wheel gives it") {
  DaemonProcess daemon(Host(2));
  for (int run = 1; run <= 5; ++run) {
    const Json answer = Ask(daemon, "leaves", {{"action", "thread"}}, CPPOOL_LITTERING_WHEEL_CASE);
    INFO(answer);
    CHECK(answer.value("leaks", Json()) == (run < 5 ? Json() : Json{{"threads", 1}}));
  }
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a process that a case forks is reported, is no part of the daemon, and ends with it") {
  for (const bool killed : {false, true}) {
    DaemonProcess daemon(Host(2));
    std::vector<pid_t> children;
    for (const char* action : {"child", "child of a stream"}) {
      const Json answer = Ask(daemon, "leaves", {{"action", action}});
      INFO(answer);
      CHECK(answer.at("status") == "passed");
      children.push_back(answer.at("ranks").at(0).at("child"));
      CHECK(answer.at("leaks") == Json{{"processes", 1}});
      CHECK(answer.at("warnings") == Json{"the case left 1 process: " + std::to_string(children.back())});
    }
    for (const char* action : {"child that exits", "child that crashes", "nothing"}) {
      const Json answer = Ask(daemon, "leaves", {{"action", action}});
      INFO(answer);
      CHECK(answer.at("status") == "passed");
      CHECK_FALSE(answer.contains("leaks"));
    }
    CHECK_THAT(daemon.Stderr(), !ContainsSubstring("cppoold:"));  // no crash, no exit
    if (killed) {
      kill(children.at(0), SIGSTOP);  // as long as it lives, it keeps what it has open
      kill(daemon.pid(), SIGKILL);
    } else {
      daemon.CloseInput();
    }
    CHECK_FALSE(daemon.ReadLine());
    CHECK(daemon.Wait() == (killed ? 1000 + SIGKILL : 0));
    for (const pid_t child : children) CHECK(EndsInTime(child));
  }
}

}  // namespace cppool::test
