// Libraries named in requests: loaded by a warm daemon, replaced when they are rebuilt, refused with what to
// do, and those that crash named.
#include <elf.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <cppool/pool.h>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/end_to_end/replacement.h"
#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

// A cache of the test's own, for the daemons that it starts.
struct Cache {
  TemporaryFolder folder;
  Environment variable{"CPPOOL_CACHE", folder.File("cache")};
};

Json Odd(const Json& load, const std::string& op = "run") {
  return {{"op", op}, {"case", "odd"}, {"load", load}, {"deadline_ms", 60000}};
}

std::string DocOfOdd(const Json& list) {
  for (const Json& entry : list.at("cases"))
    if (entry.at("name") == "odd") return entry.at("doc");
  return "";
}

// How often files of these folders were opened.
class Opens {
 public:
  explicit Opens(const std::vector<std::string>& folders) {
    for (const std::string& folder : folders) REQUIRE(inotify_add_watch(fd_, folder.c_str(), IN_OPEN) >= 0);
  }
  ~Opens() { close(fd_); }
  Opens(const Opens&) = delete;
  Opens& operator=(const Opens&) = delete;

  // Since it was asked last.
  int Count() {
    int count = 0;
    alignas(inotify_event) char buffer[4096];
    for (ssize_t bytes; (bytes = read(fd_, buffer, sizeof buffer)) > 0;)
      for (ssize_t at = 0; at < bytes; ++count)
        at += static_cast<ssize_t>(sizeof(inotify_event) +
                                   reinterpret_cast<const inotify_event*>(buffer + at)->len);
    return count;
  }

 private:
  const int fd_ = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
};

// The end that a run of the case odd has by itself, and the next one's.
struct Ends {
  std::string text;
  std::optional<Crash> crash;
  Status next = Status::kError;
};

Ends EndOf(Pool& pool, const std::string& action, int rank) {
  RunOptions options;
  options.case_name = "odd";
  options.load = {CPPOOL_ODD_CASE};
  Ends ends;
  try {
    ends.text = "answered: " + pool.Run({{"action", action}, {"rank", rank}}, options).error;
  } catch (const PoolError& error) {
    ends.text = error.what();
    ends.crash = error.crash();
  }
  ends.next = pool.Run({}, options).status;
  return ends;
}

PoolOptions HostPool() {
  PoolOptions options;
  options.world_size = 2;
  options.backend = "host";
  options.retries = 0;
  return options;
}

}  // namespace

TEST_CASE("a warm daemon loads the library that a request names, for that request") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  const Json hello = daemon.Ask({{"op", "hello"}});
  const std::vector<std::string> features = hello.at("features");
  CHECK(std::set<std::string>(features.begin(), features.end()).count("load") == 1);
  const Json unknown = daemon.Ask({{"op", "run"}, {"case", "odd"}});
  CHECK(Has(unknown.at("error"), "unknown case \"odd\" (known: attention)"));
  const Json run = daemon.Ask(Odd(CPPOOL_ODD_CASE));
  CHECK(run.at("status") == "passed");
  REQUIRE(run.at("libraries").size() == 1);
  CHECK(run.at("libraries")[0].at("file") == CPPOOL_ODD_CASE);
  CHECK(run.at("libraries")[0].at("digest").get<std::string>().size() == 16);
  CHECK(daemon.Ask(Odd({CPPOOL_ODD_CASE, CPPOOL_ODD_CASE})).at("status") == "passed");
  CHECK(daemon.Ask(Odd(CPPOOL_ODD_CASE, "validate")).at("runs") == true);
  CHECK(DocOfOdd(daemon.Ask({{"op", "list"}, {"load", CPPOOL_ODD_CASE}})) == "odd");
  CHECK(DocOfOdd(daemon.Ask({{"op", "list"}})).empty());
  CHECK(Has(daemon.Ask({{"op", "run"}, {"case", "odd"}}).at("error"), "unknown case"));
  const Json attention =
      daemon.Ask({{"op", "run"}, {"load", CPPOOL_ODD_CASE}, {"params", {{"max_seqlen_q", 32}}}});
  CHECK(attention.at("status") == "passed");
  CHECK(daemon.Ask({{"op", "hello"}}).at("pid") == hello.at("pid"));
  CHECK(fs::exists(cache.folder.File("cache/libraries")));
  CHECK(daemon.Wait() == 0);
}

TEST_CASE(
    "a library that was rebuilt is loaded without a new daemon, and one that was loaded before is known") {
  const Cache cache;
  const std::string file = cache.folder.File("mine.so");
  const std::string first = ReadFile(CPPOOL_ODD_CASE), second = ReadFile(CPPOOL_ODD_REBUILT);
  DaemonProcess daemon(Host(2));
  const auto doc_of = [&](const std::string& bytes) {
    WriteFile(file, bytes);  // in place: the code that is loaded is a copy
    CHECK(daemon.Ask(Odd(file)).at("status") == "passed");
    return DocOfOdd(daemon.Ask({{"op", "list"}, {"load", file}}));
  };
  CHECK(doc_of(first) == "odd");
  CHECK(doc_of(second) == "rebuilt");
  CHECK(doc_of(first) == "odd");
  const Json digest = daemon.Ask(Odd(file)).at("libraries")[0].at("digest");
  fs::last_write_time(file, fs::file_time_type::clock::now() - 1h);
  CHECK(daemon.Ask(Odd(file)).at("libraries")[0].at("digest") == digest);
  fs::rename(file, file + ".away");
  CHECK(Has(daemon.Ask(Odd(file)).at("error"), file + ": there is no such file"));
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a request with the digest of a library gets that content, whatever the file has by now") {
  const Cache cache;
  const std::string file = cache.folder.File("mine.so");
  const auto ask = [&](DaemonProcess& daemon, const std::string& digest) {
    Json request = Odd(file);
    request["digests"] = {{file, digest}};
    return daemon.Ask(request);
  };
  const auto digest_of = [](const Json& answer) {
    INFO(answer.dump());
    CHECK(answer.at("status") == "passed");
    return answer.at("libraries").at(0).at("digest").get<std::string>();
  };
  DaemonProcess daemon(Host(2));
  WriteFile(file, ReadFile(CPPOOL_ODD_CASE));
  const std::string first = digest_of(daemon.Ask(Odd(file)));
  WriteFile(file, ReadFile(CPPOOL_ODD_REBUILT));
  const std::string second = digest_of(daemon.Ask(Odd(file)));
  CHECK(first != second);
  CHECK(digest_of(ask(daemon, first)) == first);
  CHECK(digest_of(ask(daemon, second)) == second);
  fs::remove(file);
  CHECK(digest_of(ask(daemon, first)) == first);
  CHECK(daemon.Wait() == 0);
  DaemonProcess another(Host(2));  // which has loaded nothing
  CHECK(digest_of(ask(another, first)) == first);

  WriteFile(file, ReadFile(CPPOOL_ODD_REBUILT));
  fs::remove_all(cache.folder.File("cache"));
  DaemonProcess late(Host(2));
  CHECK(digest_of(ask(late, second)) == second);
  const Json refused = ask(late, first);
  CHECK(refused.at("failure").at("kind") == "invalid_request");
  CHECK(Has(refused.at("error"), file + ": its content now has the digest " + second + ", not " + first));
  CHECK(Has(ask(late, "mine").at("error"), "must be 16 of the characters 0-9a-f, not \"mine\""));
  Json other = Odd(file);
  other["digests"] = {{"mine.so", first}};
  CHECK(Has(late.Ask(other).at("error"), "\"digests\" has a file that \"load\" and \"kernels\" do not name"));
}

TEST_CASE("a library of --case may be written over while the daemon runs, which goes on with what it was") {
  const Cache cache;
  const std::string file = cache.folder.File("mine.so");
  WriteFile(file, ReadFile(CPPOOL_ODD_CASE));
  DaemonProcess daemon(Host(2, {"--case", file}));
  CHECK(daemon.Ask({{"op", "run"}, {"case", "odd"}}).at("status") == "passed");
  WriteFile(file, "");  // the same file, as `cp` writes it
  CHECK(daemon.Ask({{"op", "run"}, {"case", "odd"}}).at("status") == "passed");
  WriteFile(file, ReadFile(CPPOOL_ODD_REBUILT));
  CHECK(DocOfOdd(daemon.Ask({{"op", "list"}})) == "odd");
  CHECK(DocOfOdd(daemon.Ask({{"op", "list"}, {"load", file}})) == "rebuilt");
  CHECK(daemon.Wait() == 0);
}

TEST_CASE(
    "the library of a request comes before one of --case with a case of the same name, and never before "
    "attention") {
  const Cache cache;
  DaemonProcess daemon(Host(2, {"--case", CPPOOL_ODD_CASE}));
  CHECK(DocOfOdd(daemon.Ask({{"op", "list"}})) == "odd");
  CHECK(DocOfOdd(daemon.Ask({{"op", "list"}, {"load", CPPOOL_ODD_REBUILT}})) == "rebuilt");
  CHECK(DocOfOdd(daemon.Ask({{"op", "list"}})) == "odd");
  const std::string both = daemon.Ask(Odd({CPPOOL_ODD_CASE, CPPOOL_ODD_REBUILT})).at("error");
  CHECK(Has(both, CPPOOL_ODD_REBUILT ": the name of case 'odd' is taken (" CPPOOL_ODD_CASE ")"));
  CHECK(Has(daemon.Ask(Odd(CPPOOL_ODD_CASE_NAME)).at("error"), "'attention' is taken (built in)"));
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a library that cannot be used is refused with its name and what to do, and the daemon goes on") {
  const Cache cache;
  const TemporaryFolder& folder = cache.folder;
  const std::string good = ReadFile(CPPOOL_ODD_CASE);
  WriteFile(folder.File("cut.so"), good.substr(0, good.size() / 2));
  WriteFile(folder.File("header.so"), good.substr(0, 40));
  WriteFile(folder.File("empty.so"), "");
  WriteFile(folder.File("text.so"), "not a library");
  WriteFile(folder.File("mine.cu"), "__global__ void F() {}");
  WriteFile(folder.File("static.so"), "!<arch>\nsomething");
  std::string other = good;
  other[offsetof(Elf64_Ehdr, e_machine)] = static_cast<char>(EM_RISCV);
  WriteFile(folder.File("other.so"), other);
  std::string object = good;
  object[offsetof(Elf64_Ehdr, e_type)] = ET_REL;
  WriteFile(folder.File("object.so"), object);
  WriteFile(folder.File("needs.so"), Replaced(good, "libstdc++.so.6", "libnowhere.so."));
  const std::vector<std::pair<std::string, std::string>> cases = {
      {folder.File("none.so"), "there is no such file: check the path"},
      {folder.path().string(), "is a folder: name a file"},
      {"/dev/null", "is no regular file"},
      {folder.File("cut.so"), "is cut off: wait until it has been built, and try again"},
      {folder.File("header.so"), "is cut off"},
      {folder.File("empty.so"), "is empty: wait until it has been built"},
      {folder.File("text.so"), "is no shared library: link one with -shared"},
      {folder.File("mine.cu"),
       "is a source, and a daemon takes libraries only: `cppool run` compiles sources of --kernels and "
       "--load"},
      {folder.File("static.so"), "is a static library: link its objects with -shared"},
      {folder.File("object.so"), "is an object file: link it with -shared"},
      {folder.File("other.so"), "is for RISC-V, and this machine is "},
      {folder.File("needs.so"), "cannot be loaded: libnowhere.so.: cannot open shared object file"},
      {folder.File("needs.so"), "install it, or link with an absolute -Wl,-rpath"},
      {CPPOOL_ODD_LACKS, "cannot be loaded: undefined symbol: "},
      {CPPOOL_ODD_LACKS, "link the library that has it"},
      {CPPOOL_NO_CASES, "exports no function cppool_cases: declare it extern \"C\""},
      {CPPOOL_ODD_CASE_ABI, "was built for version 77 of the case interface"},
      {CPPOOL_ODD_CASE_ABI, "rebuild it against this cppool's cppool/case.h"},
      {CPPOOL_ODD_CASE_SCHEMA, "parameter action: the default does not fit"},
  };
  DaemonProcess daemon(Host(2));
  for (const auto& [file, part] : cases) {
    INFO(file);
    for (const char* op : {"run", "validate"}) {
      const Json answer = daemon.Ask(Odd(file, op));
      INFO(answer.dump());
      CHECK(answer.at("status") == "error");
      CHECK(answer.at("failure").at("kind") == "invalid_request");
      CHECK(Has(answer.at("error"), file));
      CHECK(Has(answer.at("error"), part));
      CHECK_FALSE(answer.contains("fatal"));
    }
    CHECK(daemon.Ask({{"op", "list"}, {"load", file}}).at("ok") == false);
  }
  CHECK(daemon.Ask(Odd(CPPOOL_ODD_CASE)).at("status") == "passed");
  CHECK(daemon.Wait() == 0);
}

TEST_CASE(
    "a library whose constructor crashes, exits, throws or hangs ends a process that tries it, and not the "
    "daemon") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  const auto ask = [&](const char* file, int deadline_ms) {
    Json request = Odd(file);
    request["deadline_ms"] = deadline_ms;
    const Json answer = daemon.Ask(request);
    INFO(answer.dump());
    CHECK(answer.at("failure").at("kind") == "invalid_request");
    CHECK(Has(answer.at("error"), file));
    CHECK_FALSE(answer.contains("fatal"));
    CHECK(daemon.Ask(Odd(CPPOOL_ODD_CASE)).at("status") == "passed");
    return answer.at("error").get<std::string>();
  };
  const std::string crashed = ask(CPPOOL_ODD_CRASHES, 60000);
  CHECK(Has(crashed, "crashed by signal 6 (Aborted)"));
  CHECK(Has(ask(CPPOOL_ODD_EXITS, 60000), "called exit(5)"));
  CHECK(Has(ask(CPPOOL_ODD_THROWS, 60000), "crashed by signal 6"));
  // The deadline is that of the request: the daemon answers shortly before. How much time is left when it
  // tries the file varies.
  const std::string hung = ask(CPPOOL_ODD_HANGS, 1900), within = "did not return within ";
  REQUIRE(Has(hung, within));
  const double seconds = std::stod(hung.substr(hung.find(within) + within.size()));
  CHECK(seconds > 0);
  CHECK(seconds <= 1.9);
  CHECK(daemon.Wait() == 0);
}

// On a file system that the test mounts in a namespace of its own; not every system allows it.
std::optional<Json> AnswerOnFileSystem(const std::string& options, const TemporaryFolder& folder) {
  fs::create_directory(folder / "mounted");
  const Environment chosen("CPPOOL_CACHE", folder.File("mounted/cache"));
  const std::string mount = "mount -t tmpfs -o " + options + " tmpfs " + folder.File("mounted");
  DaemonProcess daemon({"--user", "--map-root-user", "--mount", "sh", "-c",
                        mount + " && exec " CPPOOL_DAEMON " --world-size 2 --backend host"},
                       "/usr/bin/unshare");
  daemon.Send(Odd(CPPOOL_ODD_CASE).dump());
  const auto line = daemon.ReadLine();
  if (!line) {
    WARN("not tested here: " << daemon.Stderr());
    return std::nullopt;
  }
  CHECK(daemon.Ask({{"op", "run"}, {"params", {{"max_seqlen_q", 32}}}}).at("status") == "passed");
  CHECK(daemon.Wait() == 0);
  return Json::parse(line->substr(line->find('{')));
}

TEST_CASE("a cache that is full, or whose files cannot be run, is named with what to do") {
  const TemporaryFolder folder;
  if (const auto answer = AnswerOnFileSystem("size=8k", folder)) {
    const std::string error = answer->at("error");
    INFO(error);
    CHECK(answer->at("failure").at("kind") == "internal");
    CHECK(Has(error, CPPOOL_ODD_CASE ": no copy of it could be made"));
    CHECK(Has(error, "No space left on device: free space on its disk, or set CPPOOL_CACHE"));
  }
  fs::remove(folder / "mounted");
  if (const auto answer = AnswerOnFileSystem("noexec", folder)) {
    const std::string error = answer->at("error");
    INFO(error);
    CHECK(Has(error, CPPOOL_ODD_CASE ": cannot be loaded from " + folder.File("mounted/cache")));
    CHECK(Has(error, "noexec: set CPPOOL_CACHE to a folder on another one"));
  }
}

TEST_CASE(
    "a case that ends the process: the error names its library, rank, stage and stack, and the next call "
    "runs") {
  const Cache cache;
  Pool pool(HostPool());
  for (const auto& [action, what, function] :
       {std::tuple("crash", "crashed by signal 11", "WriteNowhere"),
        std::tuple("crash on stream", "crashed by signal 11", "WriteNowhere"),
        std::tuple("overflow", "crashed by signal 11", "Overflow"),
        std::tuple("overflow on stream", "crashed by signal 11", "Overflow"),
        std::tuple("abort", "crashed by signal 6", "Crash"),
        std::tuple("trap", "crashed by signal 5", "Trap"), std::tuple("exit", "called exit(42)", "Crash"),
        std::tuple("exit in libc", "called exit(42)", "Crash")}) {
    const Ends ends = EndOf(pool, action, 1);
    INFO(action << ": " << ends.text);
    CHECK(ends.next == Status::kPassed);
    REQUIRE(ends.crash);
    CHECK(ends.crash->rank == 1);
    CHECK(ends.crash->stage == "the end");
    CHECK(ends.crash->case_name == "odd");
    CHECK(ends.crash->library == CPPOOL_ODD_CASE);
    std::string stack;
    for (const std::string& frame : ends.crash->stack) stack += frame + " < ";
    CHECK(Has(stack, std::string(function) + " ["));
    for (const std::string& part :
         {std::string("rank 1 ") + what, std::string("in stage 'the end' in case 'odd'"),
          std::string("library " CPPOOL_ODD_CASE), std::string(function)})
      CHECK(Has(ends.text, part));
    CHECK_FALSE(Has(ends.text, "cppoold: crash {"));  // the line for programs is not shown again
  }
}

TEST_CASE("an overflow of the main thread's stack is reported, too") {
  const Cache cache;
  Pool pool(HostPool());
  const Ends ends = EndOf(pool, "overflow in validate", 0);
  INFO(ends.text);
  CHECK(ends.next == Status::kPassed);
  REQUIRE(ends.crash);
  CHECK_FALSE(ends.crash->rank);
  CHECK(ends.crash->library == CPPOOL_ODD_CASE);
  CHECK(Has(ends.text, "crashed by signal 11 (Segmentation fault) in case 'odd', library " CPPOOL_ODD_CASE));
  CHECK(Has(ends.text, "Overflow ["));
}

TEST_CASE("exit() on all ranks at once is reported once, and no exit handler of a library runs") {
  const Cache cache;
  for (int i = 0; i < 10; ++i) {
    DaemonProcess daemon(Host(8));
    Json request = Odd(CPPOOL_ODD_CLOSING_CRASHES);
    request["params"] = {{"action", "exit everywhere"}};
    daemon.Send(request.dump());
    CHECK(daemon.Wait() == 42);
    INFO(daemon.Stderr());
    const std::vector<Json> crashes = daemon.CrashLines();
    REQUIRE(crashes.size() == 1);
    CHECK(crashes[0].at("rank").is_number_integer());
    CHECK(crashes[0].at("library") == CPPOOL_ODD_CLOSING_CRASHES);
    CHECK(Has(crashes[0].at("error"), "called exit(42) in stage 'the end' in case 'odd'"));
    CHECK_FALSE(Has(daemon.Stderr(), "the library closes"));
  }
}

TEST_CASE("a child of a case that calls exit() is none of the daemon's") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  Json request = Odd(CPPOOL_ODD_CASE);
  request["params"] = {{"action", "exit in child"}};
  const Json answer = daemon.Ask(request);
  INFO(answer.dump());
  CHECK(answer.at("status") == "passed");
  CHECK(daemon.CrashLines().empty());
  request["params"] = {{"action", "exit"}};  // is reported all the same
  daemon.Send(request.dump());
  CHECK(daemon.Wait() == 42);
  CHECK(daemon.CrashLines().size() == 1);
}

TEST_CASE("a result that is nested too deep is refused, and the daemon goes on") {
  const Cache cache;
  Pool pool(HostPool());  // whose own limit an answer must not meet
  RunOptions run;
  run.case_name = "odd";
  run.load = {CPPOOL_ODD_CASE};
  const Json pid = pool.Hello().at("pid");
  for (const char* action : {"nest 61", "nest 100000"}) {
    const Result result = pool.Run({{"action", action}, {"rank", 1}}, run);
    INFO(result.error);
    REQUIRE(result.failure);
    CHECK(result.failure->kind == "internal");
    CHECK(result.failure->rank == 1);
    CHECK(Has(result.error, "a result 'nest' that cannot be used: nested deeper than 60"));
  }
  const Result result = pool.Run({{"action", "nest 60"}, {"rank", 1}}, run);
  INFO(result.error);
  CHECK(result.ok());
  CHECK(pool.Hello().at("pid") == pid);
}

TEST_CASE("a library whose destructor crashes is named when the daemon ends") {
  const Cache cache;
  for (const bool at_start : {false, true}) {
    std::vector<std::string> arguments = Host(2);
    if (at_start) arguments.insert(arguments.end(), {"--case", CPPOOL_ODD_CLOSING_CRASHES});
    DaemonProcess daemon(arguments);
    CHECK(daemon.Ask(at_start ? Json{{"op", "run"}, {"case", "odd"}} : Odd(CPPOOL_ODD_CLOSING_CRASHES))
              .at("status") == "passed");
    CHECK(daemon.Wait() == 1000 + SIGSEGV);
    INFO(daemon.Stderr());
    const std::vector<Json> crashes = daemon.CrashLines();
    REQUIRE(crashes.size() == 1);
    CHECK(crashes[0].at("library") == CPPOOL_ODD_CLOSING_CRASHES);
    CHECK(
        Has(crashes[0].at("error"),
            "crashed by signal 11 (Segmentation fault) while the daemon ended, in " CPPOOL_ODD_CLOSING_CRASHES
            ", stack: "));
    CHECK(Has(crashes[0].at("stack").dump(), "WriteNowhere ["));
  }
}

TEST_CASE("a library whose destructor hangs is named 1 s after SIGTERM, and the daemon ends") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  CHECK(daemon.Ask(Odd(CPPOOL_ODD_CLOSING_HANGS)).at("status") == "passed");
  daemon.CloseInput();
  while (!Has(daemon.Stderr(), "the library closes")) std::this_thread::sleep_for(1ms);
  kill(daemon.pid(), SIGTERM);
  CHECK(daemon.Wait() == 128 + SIGTERM);
  INFO(daemon.Stderr());
  const std::vector<Json> crashes = daemon.CrashLines();
  REQUIRE(crashes.size() == 1);
  CHECK(crashes[0].at("library") == CPPOOL_ODD_CLOSING_HANGS);
  CHECK(Has(crashes[0].at("error"),
            "had not returned 1 s after SIGTERM, while the daemon ended, in " CPPOOL_ODD_CLOSING_HANGS));
#ifndef CPPOOL_TEST_SANITIZED
  CHECK(Has(crashes[0].at("stack").dump(), "SleepForEver ["));
#endif
}

TEST_CASE("SIGTERM does not make a crash of a daemon that is ending") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  CHECK(daemon.Ask(Odd(CPPOOL_ODD_CLOSING_SLOW)).at("status") == "passed");
  daemon.CloseInput();
  while (!Has(daemon.Stderr(), "the library closes")) std::this_thread::sleep_for(1ms);
  kill(daemon.pid(), SIGTERM);
  CHECK(daemon.Wait() == 0);
  INFO(daemon.Stderr());
  CHECK(daemon.CrashLines().empty());
}

TEST_CASE("the end of a rank's thread that hangs is reported, too") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  Json request = Odd(CPPOOL_ODD_CASE);
  request["params"] = {{"action", "hang at the thread's end"}};
  CHECK(daemon.Ask(request).at("status") == "passed");
  daemon.CloseInput();
  while (!Has(daemon.Stderr(), "the thread ends")) std::this_thread::sleep_for(1ms);
  kill(daemon.pid(), SIGTERM);
  CHECK(daemon.Wait() == 128 + SIGTERM);
  INFO(daemon.Stderr());
  const std::vector<Json> crashes = daemon.CrashLines();
  REQUIRE(crashes.size() == 1);
  CHECK(Has(crashes[0].at("error"), "had not returned 1 s after SIGTERM, while the daemon ended"));
}

TEST_CASE("a daemon whose library's destructor hangs ends by itself, and names it", "[long]") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  CHECK(daemon.Ask(Odd(CPPOOL_ODD_CLOSING_HANGS)).at("status") == "passed");
  CHECK(daemon.Wait() == 3);
  INFO(daemon.Stderr());
  const std::vector<Json> crashes = daemon.CrashLines();
  REQUIRE(crashes.size() == 1);
  CHECK(crashes[0].at("library") == CPPOOL_ODD_CLOSING_HANGS);
  CHECK(Has(crashes[0].at("error"), "did not return within 10 s, while the daemon ended, in "));
}

TEST_CASE("Pool::Stop is bounded when a destructor hangs, and the log has what happened") {
  const Cache cache;
  for (const auto& [library, end] :
       {std::pair(CPPOOL_ODD_CLOSING_HANGS, "exited with code 143 when it was stopped: had not returned"),
        std::pair(CPPOOL_ODD_CLOSING_CRASHES,
                  "was killed by signal 11 (Segmentation fault) when it was stopped: ")}) {
    PoolOptions options = HostPool();
    std::string log;
    options.grace = 200ms;
    options.kill_grace = 60s;  // a backstop: SIGKILL would leave nothing to tell
    options.log = [&](std::string_view line) { log += std::string(line) + "\n"; };
    Pool pool(options);
    RunOptions run;
    run.case_name = "odd";
    run.load = {library};
    CHECK(pool.Run({}, run).ok());
    pool.Stop();
    INFO(log);
    CHECK(Has(log, end));
    CHECK(Has(log, library));
    run.load = {CPPOOL_ODD_CASE};
    CHECK(pool.Run({}, run).ok());
  }
}

TEST_CASE("a daemon that has loaded as many libraries as it may is replaced, and no call fails") {
  CheckReplacement(HostPool(), CPPOOL_ODD_CASE, [](Pool& pool, const std::string& file) {
    RunOptions run;
    run.case_name = "odd";
    run.load = {file};
    return pool.Run({}, run);
  });
}

TEST_CASE("a daemon that is not replaced answers on, and loads no further library") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  const std::string bytes = ReadFile(CPPOOL_ODD_CASE), file = cache.folder.File("mine.so");
  for (int i = 1; i <= 64; ++i) {
    WriteFile(file, bytes + std::to_string(i));
    CHECK(daemon.Ask(Odd(file)).contains("respawn") == (i == 64));
  }
  CHECK(daemon.Ask(Odd(file)).at("status") == "passed");  // one that is loaded
  const std::string error = daemon.Ask(Odd(CPPOOL_ODD_REBUILT)).at("error");
  CHECK(Has(error, CPPOOL_ODD_REBUILT ": this daemon has loaded 64 libraries"));
  CHECK(daemon.Wait() == 0);
}

namespace {

Json Attention(const std::string& kernels) {
  return {{"op", "run"},
          {"kernels", kernels},
          {"params", {{"max_seqlen_q", 32}, {"num_heads", 4}, {"is_training", false}}}};
}

}  // namespace

TEST_CASE("a library of kernels is loaded by the warm daemon, and again when it was rebuilt") {
  const Cache cache;
  const std::string file = cache.folder.File("mine.so"), bytes = ReadFile(CPPOOL_KERNEL_NAIVE);
  DaemonProcess daemon(Host(2));
  const auto run = [&](const std::string& kernels) {
    const Json answer = daemon.Ask(Attention(kernels));
    INFO(answer.dump());
    CHECK(answer.at("status") == "passed");
    CHECK(answer.at("kernels").at("name") == "naive");
    CHECK(answer.at("kernels").at("file") == file);
    return answer.at("kernels").at("digest").get<std::string>();
  };
  WriteFile(file, bytes);
  const std::string first = run(file);
  CHECK(run(file + ",naive") == first);
  WriteFile(file, bytes + "rebuilt");
  CHECK(run(file) != first);
  WriteFile(file, bytes);
  CHECK(run(file) == first);
  CHECK(daemon.Ask(Attention("cppool")).at("kernels").at("name") == "cppool");
  CHECK(daemon.Wait() == 0);
  DaemonProcess by_default(Host(2, {"--kernels", file}));
  Json request = Attention(file);
  request.erase("kernels");
  CHECK(by_default.Ask(request).at("kernels").at("file") == file);
}

TEST_CASE("every answer to a request that names libraries has their digests, also where nothing runs") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  const Json cases = daemon.Ask(Odd(CPPOOL_ODD_CASE)).at("libraries");
  CHECK(cases.at(0).at("file") == CPPOOL_ODD_CASE);
  Json refused = Odd(CPPOOL_ODD_CASE);
  refused["params"] = {{"nothing", 1}};
  for (const Json& request :
       {refused, Odd(CPPOOL_ODD_CASE, "validate"), Odd({CPPOOL_ODD_CASE, "/nowhere/mine.so"}),
        Json{{"op", "list"}, {"load", CPPOOL_ODD_CASE}},
        Json{{"op", "list"}, {"load", {CPPOOL_ODD_CASE, "/nowhere/mine.so"}}}}) {
    const Json answer = daemon.Ask(request);
    INFO(answer.dump());
    CHECK(answer.value("libraries", Json()) == cases);
  }
  const auto kernels_of = [&](Json request, const char* op, const char* status) {
    request["op"] = op;
    const Json answer = daemon.Ask(request);
    INFO(answer.dump());
    CHECK(answer.value("status", "runs") == status);
    return answer.value("kernels", Json());
  };
  const Json ran = kernels_of(Attention(CPPOOL_KERNEL_NAIVE), "run", "passed");
  const Json loaded{{"file", CPPOOL_KERNEL_NAIVE}, {"digest", ran.at("digest")}};
  CHECK(kernels_of(Attention(CPPOOL_KERNEL_NAIVE), "validate", "runs") == loaded);
  Json wrong = Attention(CPPOOL_KERNEL_NAIVE);
  wrong["params"]["max_seqlen_q"] = 0;
  CHECK(kernels_of(wrong, "run", "error") == loaded);
  for (const char* op : {"run", "validate"}) {
    const Json kernels = kernels_of(Attention(CPPOOL_KERNEL_CUDNN), op, "skipped");
    CHECK(kernels.value("file", "") == CPPOOL_KERNEL_CUDNN);
    CHECK(kernels.value("digest", "").size() == 16);
  }
  CHECK(kernels_of(Attention("cppool"), "validate", "runs").is_null());
  CHECK(daemon.Ask(Odd("/nowhere/mine.so")).count("libraries") == 0);
  CHECK(daemon.Wait() == 0);
}

TEST_CASE(
    "a request opens no file of a library that was not touched for two seconds, nor of cuDNN's module") {
  const Cache cache;
  fs::create_directory(cache.folder / "mine");
  const std::string cases = cache.folder.File("mine/cases.so"),
                    kernels = cache.folder.File("mine/kernels.so");
  const Environment cudnn("CPPOOL_CUDNN_MODULE", cache.folder.File("mine/cudnn.so"));
  WriteFile(cases, ReadFile(CPPOOL_ODD_CASE));
  WriteFile(kernels, ReadFile(CPPOOL_KERNEL_NAIVE));
  WriteFile(cache.folder.File("mine/cudnn.so"), ReadFile(CPPOOL_KERNEL_CUDNN));
  std::this_thread::sleep_for(2100ms);
  DaemonProcess daemon(Host(2));
  const auto ask = [&] {
    CHECK(daemon.Ask(Odd(cases)).at("status") == "passed");
    CHECK(daemon.Ask(Attention(kernels)).at("status") == "passed");
    CHECK(daemon.Ask(Attention("cudnn")).at("error") == "cudnn: nothing at all");
  };
  ask();
  Opens opens({cache.folder.File("mine"), cache.folder.File("cache/libraries")});
  ask();
  CHECK(opens.Count() == 0);
  fs::last_write_time(kernels, fs::file_time_type::clock::now());
  ask();
  CHECK(opens.Count() == 1);
  fs::rename(kernels, cache.folder.File("mine/cudnn.so"));
  CHECK(Has(daemon.Ask(Attention("cudnn")).at("error"), "it has changed since it was opened"));
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a library that is loaded needs no file any more, and a cache that was removed is made again") {
  const Cache cache;
  DaemonProcess daemon(Host(2));
  const auto remove_cache = [&] { fs::remove_all(cache.folder / "cache"); };
  const auto passes = [&](const Json& request) {
    const Json answer = daemon.Ask(request);
    INFO(answer.dump());
    CHECK(answer.at("status") == "passed");
  };
  passes(Odd(CPPOOL_ODD_CASE));
  passes(Attention(CPPOOL_KERNEL_NAIVE));
  remove_cache();
  passes(Odd(CPPOOL_ODD_CASE));
  passes(Attention(CPPOOL_KERNEL_NAIVE));
  CHECK_FALSE(fs::exists(cache.folder / "cache"));
  passes(Odd(CPPOOL_ODD_REBUILT));  // which is new
  CHECK(daemon.Wait() == 0);
}

TEST_CASE(
    "a library of kernels that cannot be used is refused with its name and what to do, and the daemon goes "
    "on") {
  const Cache cache;
  const std::string module = cache.folder.File("needs.so");
  const Environment cudnn("CPPOOL_CUDNN_MODULE", module);
  WriteFile(module, Replaced(ReadFile(CPPOOL_ODD_CASE), "libstdc++.so.6", "libnowhere.so."));
  DaemonProcess daemon(Host(2));
  for (const auto& [file, part] : {std::pair(CPPOOL_KERNEL_ABORTS, "crashed by signal 6 (Aborted)"),
                                   std::pair(CPPOOL_ODD_CASE, "exports no function cppool_attention"),
                                   std::pair(CPPOOL_ODD_HANGS, "did not return within")}) {
    Json request = Attention(file);
    request["deadline_ms"] = file == std::string(CPPOOL_ODD_HANGS) ? 1500 : 60000;
    const Json answer = daemon.Ask(request);
    INFO(answer.dump());
    CHECK(answer.at("failure").at("kind") == "invalid_request");
    CHECK(Has(answer.at("error"), file));
    CHECK(Has(answer.at("error"), part));
    CHECK_FALSE(Has(answer.at("error"), cache.folder.path().string()));  // the copy is nothing to people
    CHECK_FALSE(answer.contains("fatal"));
  }
  CHECK(
      daemon.Ask(Attention("cudnn")).at("error") ==
      module +
          ": cannot be loaded: libnowhere.so.: cannot open shared object file: No such file or directory: it "
          "needs this library; install it, or add its folder to LD_LIBRARY_PATH");  // no copy is made of it
  CHECK(daemon.Ask(Attention(CPPOOL_KERNEL_NAIVE)).at("status") == "passed");
  CHECK(daemon.Wait() == 0);
}

}  // namespace cppool::test
