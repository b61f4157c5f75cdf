// The compiler as a process: when its end is seen, and that it does not outlive the caller.
#include <cppool/compile.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <sstream>
#include <string>
#include <thread>

#include "client/src/process.h"
#include "tests/catch.h"
#include "tests/client/compile_support.h"
#include "tests/client/support.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;

// While it lives, SIGCHLD is ignored: no status of a child can be had.
struct IgnoredChildren {
  IgnoredChildren() : before(signal(SIGCHLD, SIG_IGN)) {}
  ~IgnoredChildren() { signal(SIGCHLD, before); }
  void (*before)(int);
};

// While it lives, another thread waits for every child.
struct Reaper {
  std::atomic<bool> done{false};
  std::thread thread{[this] {
    while (!done)
      if (waitpid(-1, nullptr, WNOHANG) <= 0) std::this_thread::sleep_for(100us);
  }};
  ~Reaper() {
    done = true;
    thread.join();
  }
};

}  // namespace

TEST_CASE("a compiler that leaves a background process is not waited for, and that process is killed") {
  const Sources sources;
  WriteProgram(sources.folder / "leaving", "[ \"$1\" = --version ] && exit 0\nsleep 1000 &\necho $! > '" +
                                               sources.folder.File("left") + "'\nexec c++ \"$@\"\n");
  const Environment leaving("CXX", sources.folder.File("leaving"));
  CompileOptions options;
  options.limit = 60s;
  CHECK_FALSE(Compile(sources.folder.File("mine.cpp"), options).library.empty());
  const int left = std::stoi(ReadFile(sources.folder.File("left")));
  CHECK(Eventually([&] { return !Alive(left); }));
}

template <typename Scope>
void CheckCompiler() {
  const Sources sources("mine.c");
  const std::string source = sources.folder.File("mine.c");
  const Scope scope;
  for (int i = 0; i < 5; ++i) {  // whoever waits first
    sources.SetVersion("version " + std::to_string(i));
    CHECK_FALSE(Compile(source).cached);
  }
  Write(source, "int main( {\n");
  CHECK(Has(Refusal([&] { Compile(source); }), " exited with code 1\n"));
}

TEST_CASE("a source compiles where SIGCHLD is ignored") { CheckCompiler<IgnoredChildren>(); }

TEST_CASE("a source compiles where another thread waits for all children") { CheckCompiler<Reaper>(); }

TEST_CASE("a compiler that is interrupted, or takes too long, leaves no file") {
  const Sources sources;
  const TemporaryFolder temporary;
  const Environment folder("TMPDIR", temporary.path().string());
  WriteProgram(sources.folder / "slow",
               "[ \"$1\" = --version ] && exit 0\n: > \"$TMPDIR/ccObject.o\"\n: > '" +
                   sources.folder.File("working") + "'\nsleep 1000\n");
  const Environment slow("CXX", sources.folder.File("slow"));
  CompileOptions options;
  options.interrupted = [&] { return fs::exists(sources.folder / "working"); };
  CHECK(Has(Refusal([&] { Compile(sources.folder.File("mine.cpp"), options); }), "interrupted"));
  CHECK(fs::is_empty(temporary.path()));
  options.interrupted = nullptr;
  options.limit = 2s;
  CHECK(Has(Refusal([&] { Compile(sources.folder.File("mine.cpp"), options); }), "did not end within 2 s"));
  CHECK(fs::is_empty(temporary.path()));
}

TEST_CASE("however the client ends, its compiler ends with it, and leaves no file") {
  for (const int number : {SIGINT, SIGTERM, SIGKILL}) {
    INFO(strsignal(number));
    const Sources sources;
    const TemporaryFolder temporary;
    const Environment folder("TMPDIR", temporary.path().string());
    // One that ignores SIGTERM, and a process of its own.
    WriteProgram(sources.folder / "slow",
                 "[ \"$1\" = --version ] && exit 0\ntrap '' TERM\nsleep 1000 &\necho $$ $! > '" +
                     sources.folder.File("new") + "'\nmv '" + sources.folder.File("new") + "' '" +
                     sources.folder.File("pids") + "'\nwait\nsleep 1000\n");
    const Environment slow("CXX", sources.folder.File("slow"));
    const auto client = client::Process::Spawn(
        {CPPOOL_COMMAND,
         {"run", "--backend", "host", "--case", "mine", "--load", sources.folder.File("mine.cpp")},
         {}});
    REQUIRE(Eventually([&] { return fs::exists(sources.folder / "pids"); }));
    REQUIRE(kill(client->pid(), number) == 0);
    std::istringstream pids(ReadFile(sources.folder.File("pids")));
    for (int pid; pids >> pid;) CHECK(Eventually([&] { return !Alive(pid); }));
    CHECK(Eventually([&] { return fs::is_empty(temporary.path()); }));
  }
}

}  // namespace cppool::test
