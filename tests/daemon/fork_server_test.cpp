// The fork server of Python ranks with the ranks' own code and any Python: no torch.
#include "daemon/fork_server.h"

#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "daemon/process.h"
#include "daemon/start_error.h"
#include "tests/catch.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

using Catch::Matchers::ContainsSubstring;
using daemon::ForkServer;
using daemon::RankProcess;
using protocol::Json;
using Clock = RankProcess::Clock;

Clock::time_point Soon() { return Clock::now() + std::chrono::seconds(60); }  // a backstop

ForkServer::Options WithPython(bool shared, std::vector<std::string> preload = {}) {
  // The environment decides who shares: not the tests that one ctest runs at once.
  setenv("CPPOOL_TEST", std::to_string(getpid()).c_str(), 1);
  return {.python = daemon::FindPython("python3"),
          .preload = std::move(preload),
          .devices = {},
          .most_output = 1 << 16,
          .shared = shared};
}

pid_t ParentOf(pid_t pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
  return std::stoi(stat.substr(stat.rfind(") ") + 4));
}
pid_t PidOf(const Json& ready) { return ready.at("pid").get<pid_t>(); }

// A file with the functions, and what loads one of them.
struct Cases {
  TemporaryFolder folder;
  std::string file = (folder.path() / "cases.py").string();
  explicit Cases(const std::string& text) { std::ofstream(file) << text; }
  Json Load(const char* name, int id) const {
    return {{"frame", "load"},       {"id", id},   {"function", file + ":" + name},
            {"path", Json::array()}, {"cwd", "/"}, {"roots", Json::array()}};
  }
};

// The report of a function on one rank; null: it has ended.
Json Call(RankProcess& rank, const Cases& cases, const char* name, int id) {
  rank.BeginCase();
  REQUIRE(rank.Send(cases.Load(name, id)));
  for (Json next = {{"frame", "run"}, {"id", id + 1}, {"kwargs", Json::object()}};
       auto frame = rank.Next(Soon());) {
    if (frame->at("frame") != "report") continue;
    if (frame->at("phase") == "case" || frame->at("status") != "passed") return *frame;
    rank.Send(next);
  }
  return nullptr;
}

template <typename Holds>
bool Eventually(Holds holds) {
  for (const auto limit = Soon(); Clock::now() < limit;
       std::this_thread::sleep_for(std::chrono::milliseconds(2)))
    if (holds()) return true;
  return false;
}

TEST_CASE("Python ranks run, are where they say, write lines, and are replaced") {
  const bool shared = GENERATE(false, true);
  const Cases cases(
      "import os, sys, time\n"
      "def value(world): return world.rank\n"
      "def writes(world):\n"
      "    print('one line'); sys.stdout.write('no end')\n"
      "def floods(world): print('x' * 100_000)\n"
      "def stays(world):\n"
      "    with world.stage('here/there'): time.sleep(1000)\n"
      "def exits(world): os._exit(5)\n"
      "def breaks(world):\n"
      "    os.write(max(map(int, os.listdir('/proc/self/fd'))), b'no frame\\n')\n"
      "    time.sleep(1000)\n");
  std::thread([] {}).join();  // ThreadSanitizer has a thread of its own from the first one on
  const auto before = daemon::OwnUsage();
  {
    ForkServer server(WithPython(shared), Soon());
    CHECK(server.info().python.starts_with("3."));
    auto world = server.Fork(2, "auto", Soon());
    REQUIRE(world.ranks.size() == 2);
    for (int i = 0; i < 2; ++i) {
      CHECK(world.ready[i].at("rank") == i);
      CHECK(Call(*world.ranks[i], cases, "value", 1).at("value") == i);
    }
    CHECK(Call(*world.ranks[0], cases, "writes", 3).at("status") == "passed");
    CHECK_THAT(world.ranks[0]->Output(), ContainsSubstring("one line\nno end"));
    CHECK(Call(*world.ranks[0], cases, "floods", 5).at("status") == "passed");
    CHECK(world.ranks[0]->Output().size() == 4096);
    CHECK(server.Changed(Soon()).empty());

    std::thread stuck([&] { CHECK(Call(*world.ranks[1], cases, "stays", 7).is_null()); });
    CHECK(Eventually([&] { return world.ranks[1]->Where().stage == "here/there"; }));
    CHECK(world.ranks[1]->Where().phase == RankProcess::Phase::kCase);
    const auto look = server.LookAt(*world.ranks[1], false, Soon());
    REQUIRE(look.answered);
    CHECK_THAT(look.stacks.dump(), ContainsSubstring("cases.py:7 stays"));
    kill(world.ready[1].at("pid"), SIGSTOP);
    CHECK(Eventually([&] {
      const auto stopped =
          server.LookAt(*world.ranks[1], false, Clock::now() + std::chrono::milliseconds(50));
      return !stopped.answered && stopped.state == "it is stopped";
    }));
    server.Kill(*world.ranks[1]);
    stuck.join();
    CHECK_THAT(world.ranks[1]->End().value_or(""), ContainsSubstring("killed by signal 9"));
    CHECK(world.ranks[1]->Where().stage == "here/there");  // of a rank that is no more

    CHECK(Call(*world.ranks[0], cases, "exits", 9).is_null());
    CHECK(world.ranks[0]->End() == "exited with code 5");
    CHECK_FALSE(world.ranks[0]->Send({{"frame", "bye"}}));

    world = server.Fork(3, "none", Soon());
    CHECK(Call(*world.ranks[2], cases, "breaks", 1).is_null());
    CHECK_THAT(world.ranks[2]->End().value_or(""), ContainsSubstring("no frame"));
    CHECK(server.KillAll(world.ranks, Soon()));
    world.ranks.clear();
  }
  const auto after = daemon::OwnUsage();
  CHECK(after.fds == before.fds);
  CHECK(after.threads == before.threads);
}

TEST_CASE("how a rank ends is known before the fork server has reaped it") {
  const Cases cases(
      "import os, subprocess\n"
      "def exits(world): os._exit(5)\n"
      "def leaves(world):\n"
      "    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
      "    os._exit(6)\n");
  ForkServer server(WithPython(false), Soon());
  const auto world = server.Fork(2, "none", Soon());
  const pid_t parent = ParentOf(PidOf(world.ready[0]));
  kill(parent, SIGSTOP);
  CHECK(Call(*world.ranks[0], cases, "exits", 1).is_null());
  CHECK(world.ranks[0]->End() == "exited with code 5");
  CHECK_FALSE(world.ranks[0]->WaitEnd(Clock::now()));
  kill(parent, SIGCONT);
  CHECK(world.ranks[0]->WaitEnd(Soon()));
  CHECK(Call(*world.ranks[1], cases, "leaves", 3).is_null());
  CHECK(world.ranks[1]->End() == "exited with code 6, and left 1 process");
}

TEST_CASE("the end of a fork server ends its Python ranks") {
  const bool shared = GENERATE(false, true);
  const Cases cases(
      "import os, time\n"
      "def leaves(world):\n"
      "    port, pid = os.environ['MASTER_PORT'], os.getpid()\n"
      "    for name in (f'cppool_{pid}_0', f'buffer_{port}_0', f'cppool_{pid}1'):\n"
      "        open(f'/dev/shm/{name}', 'w').close()\n"
      "    with world.stage(port): time.sleep(1000)\n");
  ForkServer server(WithPython(shared), Soon());
  const auto world = server.Fork(2, "none", Soon());
  std::thread stuck([&] { CHECK(Call(*world.ranks[1], cases, "leaves", 1).is_null()); });
  CHECK(Eventually([&] { return !world.ranks[1]->Where().stage.empty(); }));
  const std::string start = "/dev/shm/cppool_" + std::to_string(PidOf(world.ready[1]));
  kill(ParentOf(PidOf(world.ready[0])), SIGKILL);
  stuck.join();
  const std::string how = shared ? "the fork server has ended" : "the fork server was killed by signal 9";
  for (const auto& rank : world.ranks) {
    CHECK(rank->WaitEnd(Soon()));
    CHECK_THAT(rank->End().value_or(""), ContainsSubstring(how));
  }
  for (const std::string& name : {start + "_0", "/dev/shm/buffer_" + world.ranks[1]->Where().stage + "_0"})
    CHECK(Eventually([&] { return access(name.c_str(), F_OK) != 0; }));
  CHECK(unlink((start + "1").c_str()) == 0);  // has another number
  CHECK_THAT(server.Changed(Soon()).front(), ContainsSubstring(how));
  CHECK_THROWS_WITH(server.Fork(1, "none", Soon()), ContainsSubstring(how));
}

TEST_CASE("fork servers that are shared have one parent, which ends with the last") {
  const auto before = daemon::OwnUsage();
  pid_t parent = 0;
  {
    auto first = std::make_unique<ForkServer>(WithPython(true), Soon());
    const auto ranks = first->Fork(1, "none", Soon());
    parent = ParentOf(ParentOf(PidOf(ranks.ready[0])));
    CHECK(ParentOf(parent) == getpid());
    ForkServer second(WithPython(true), Soon());
    auto world = second.Fork(2, "none", Soon());
    CHECK(ParentOf(ParentOf(PidOf(world.ready[1]))) == parent);
    auto other = WithPython(true);
    other.devices = "0";  // seen by the ranks alone, and hidden from what is imported where there are none
    ForkServer elsewhere(other, Soon());
    const auto devices = elsewhere.Fork(1, "none", Soon());
    CHECK(ParentOf(ParentOf(PidOf(devices.ready[0]))) != parent);
    first.reset();
    CHECK(ranks.ranks[0]->WaitEnd(Soon()));
    CHECK(kill(parent, 0) == 0);
    CHECK_FALSE(world.ranks[0]->End());
    CHECK(second.KillAll(world.ranks, Soon()));
    world = second.Fork(1, "none", Soon());
    kill(parent, SIGKILL);
    CHECK(world.ranks[0]->WaitEnd(Soon()));
    ForkServer third(WithPython(true), Soon());
    const auto again = third.Fork(1, "none", Soon());
    CHECK(ParentOf(ParentOf(PidOf(again.ready[0]))) != parent);
  }
  CHECK(daemon::OwnUsage().fds == before.fds);
  CHECK(daemon::OwnUsage().threads == before.threads);
}

TEST_CASE("a Python that cannot be used is named") {
  const bool shared = GENERATE(false, true);
  CHECK_THROWS_WITH(daemon::FindPython("/nonexistent/python"),
                    ContainsSubstring("/nonexistent/python is no program"));
  CHECK_THROWS_WITH(daemon::FindPython("no_such_python"),
                    ContainsSubstring("no program no_such_python on PATH"));
  CHECK_THROWS_WITH(
      ForkServer({.python = "/bin/false", .preload = {}, .devices = {}, .shared = shared}, Soon()),
      ContainsSubstring("/bin/false exited with code 1 before it was ready"));
  CHECK_THROWS_WITH(ForkServer(WithPython(shared, {"no_such_module"}), Soon()),
                    ContainsSubstring("no_such_module"));
  ForkServer server(WithPython(shared), Soon());
  CHECK_THROWS_WITH(server.Fork(1, "nccl", Soon()), ContainsSubstring("rank 0 could not start"));
  CHECK(server.Fork(1, "none", Soon()).ranks.size() == 1);
}

}  // namespace
}  // namespace cppool::test
