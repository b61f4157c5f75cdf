// A server of pools: who shares one, what its clients get, and bad input.
#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <thread>
#include <vector>

#include "tests/client/serve_support.h"
#include "tests/environment.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::PoolError;
using cppool::PoolOptions;
using cppool::Result;
using cppool::Status;

namespace {

Json PidOf(const PoolOptions& options) {
  Pool pool(options);
  return pool.Hello().at("pid");
}

// The error of a call that gets no answer.
template <typename Call>
PoolError ErrorOf(Call call) {
  try {
    call();
  } catch (const PoolError& error) {
    return error;
  }
  FAIL("there is an answer");
  throw 0;
}

std::string StartErrorOf(const PoolOptions& options) {
  const PoolError error = ErrorOf([&] { PidOf(options); });
  CHECK(error.kind() == PoolError::Kind::kStart);
  return error.what();
}

}  // namespace

TEST_CASE("clients with the same options share a daemon, which stays when they go") {
  const Serve server;
  const Json pid = PidOf(server.Real());
  CHECK(PidOf(server.Real()) == pid);
  {
    Pool pool(server.Real());
    CHECK(pool.Run(Small()).ok());
    Pool other(server.Real());
    CHECK(other.Hello().at("pid") == pid);
    CHECK(other.Stats().at("passed") == 1);
    pool.Stop();
    CHECK(pool.Hello().at("pid") == pid);
  }
  // Limits, the sentinel and retries are the client's own.
  PoolOptions same = server.Real();
  same.grace = 1234ms;
  same.sentinel = "answer: ";
  same.retries = 2;
  CHECK(PidOf(same) == pid);
}

TEST_CASE("another option, variable, world size or program is another pool") {
  const Serve server;
  const Json pid = PidOf(server.Real());
  CHECK(PidOf(server.Real(1)) != pid);
  PoolOptions other = server.Real();
  other.arguments = {"--allow-faults"};
  CHECK(PidOf(other) != pid);
  for (const char* name : {"CUDA_X", "NCCL_X", "CPPOOL_X", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV"}) {
    const Environment variable(name, "/nowhere");
    INFO(name);
    CHECK(PidOf(server.Real()) != pid);
  }
  {
    const Environment variable("OTHER_VARIABLE", "x");
    CHECK(PidOf(server.Real()) == pid);
  }
  const TemporaryFolder folder;
  PoolOptions fake = server.Fake();
  fake.daemon = folder.File("daemon");
  std::filesystem::copy_file(CPPOOL_FAKE_DAEMON, fake.daemon);
  const Json built = PidOf(fake);
  CHECK(PidOf(fake) == built);
  std::filesystem::remove(fake.daemon);
  std::filesystem::copy_file(CPPOOL_FAKE_DAEMON, fake.daemon);  // built again
  CHECK(PidOf(fake) != built);
}

TEST_CASE("the path of a launcher is relative to its client's folder, also when it has odd characters") {
  const auto sent = [](const char* launch) {
    PoolOptions options = RealOptions();
    options.launch = launch;
    return cppool::client::AttachLine(options).at("pool").at("launch").get<std::string>();
  };
  const std::string here = std::filesystem::current_path().string();
  CHECK(sent("my\\ folder/launch 2 'a b'") == "'" + here + "/my folder/launch' 2 'a b'");
  CHECK(sent("srun -N 2") == "srun -N 2");
  CHECK(sent("/bin/launch 'a") == "/bin/launch 'a");
}

TEST_CASE("a daemon has its client's environment, and not the server's") {
  const Environment of_server("CUDA_VISIBLE_DEVICES", "7");
  const Serve server;
  const auto seen = [&](PoolOptions options) {
    Pool pool(std::move(options));
    return pool.Run(Do("echo")).json["surroundings"]["environment"];
  };
  CHECK(seen(server.Fake())["CUDA_VISIBLE_DEVICES"] == "7");
  unsetenv("CUDA_VISIBLE_DEVICES");
  CHECK(seen(server.Fake())["CUDA_VISIBLE_DEVICES"] == Json());
  {
    const Environment of_client("CUDA_VISIBLE_DEVICES", "3");
    CHECK(seen(server.Fake())["CUDA_VISIBLE_DEVICES"] == "3");
    PoolOptions chosen = server.Fake();
    chosen.devices = {"4", "5"};
    CHECK(seen(chosen)["CUDA_VISIBLE_DEVICES"] == "4,5");
  }
  PoolOptions with = server.Fake();
  with.environment = {{"FAKE_VARIABLE", "x"}};
  CHECK(seen(with)["FAKE_VARIABLE"] == "x");
}

TEST_CASE("a client gets every outcome that it would get from a daemon of its own") {
  const Serve server;
  Pool pool(server.Fake());
  CHECK(pool.Run(Do("pass")).ok());
  CHECK(pool.Run(Do("fail")).status == Status::kFailed);
  CHECK(pool.Run(Do("skip")).status == Status::kSkipped);
  CHECK(pool.Validate(Do("skip")).status == Status::kSkipped);
  CHECK(pool.Run(Do("fatal")).fatal);
  CHECK(pool.Run(Do("pass")).ok());

  const PoolError died = ErrorOf([&] { pool.Run(Do("die")); });
  CHECK(died.kind() == PoolError::Kind::kDied);
  CHECK(Has(died.what(), "exited with code 3"));
  CHECK(Has(died.stderr_tail(), "the last words"));
  const PoolError crashed = ErrorOf([&] { pool.Run(Do("crash")); });
  REQUIRE(crashed.crash());
  CHECK(crashed.crash()->rank == 1);
  CHECK_FALSE(Has(crashed.stderr_tail(), "cppoold: crash"));
  const PoolError late = ErrorOf([&] { pool.Run(Do("hang"), Within(100ms)); });
  CHECK(late.kind() == PoolError::Kind::kTimeout);
  CHECK(Has(late.what(), "did not answer within 0.3 s and was killed"));
  CHECK(Has(late.diagnosis(), "thread"));
  for (const char* broken : {"garbage", "no_result"})
    CHECK(ErrorOf([&] { pool.Run(Do(broken)); }).kind() == PoolError::Kind::kProtocol);
  CHECK(pool.Run(Do("pass")).ok());

  const TemporaryFolder folder;
  PoolOptions again = server.Fake();
  again.retries = 1;
  Pool retrying(again);
  const Result flaky = retrying.Run({{"do", "die_once"}, {"marker", folder.File("marker")}});
  CHECK(flaky.flaky == "flaky (passed at attempt 2)");
  CHECK(Has(flaky.lost.at(0).stderr_tail, "the last words"));
}

TEST_CASE("a daemon that cannot start says why to its client") {
  const Serve server;
  Pool pool(server.Fake("start_told"));
  const PoolError error = ErrorOf([&] { pool.Hello(); });
  CHECK(error.kind() == PoolError::Kind::kStart);
  CHECK(Has(error.what(), "no room for 4 ranks: ask for fewer"));
  REQUIRE(error.start_failure());
  CHECK(error.start_failure()->kind == "out_of_memory");
  RawClient raw(server);
  Json attach = RawClient::Attach();
  attach["pool"]["case_files"] = {"/nonexistent.so"};
  CHECK(raw.Ask(attach).at("ok") == true);
  const Json answer = raw.Ask({{"op", "hello"}});
  CHECK(answer.at("failure").at("kind") == "invalid_request");  // as that of a daemon's start
  CHECK(answer.at("lost").at("kind") == "start");
  PoolOptions none = server.Fake();
  none.daemon = "/nonexistent/cppoold";
  CHECK(Has(StartErrorOf(none), "/nonexistent/cppoold"));
}

TEST_CASE("what a case writes goes to its client, before the answer") {
  const Serve server;
  std::vector<std::string> lines[2];
  std::mutex mutex;
  const auto client = [&](int number) {
    PoolOptions options = server.Fake();
    options.on_stderr = [&, number](std::string_view line) {
      const std::lock_guard lock(mutex);
      if (line.starts_with("client")) lines[number].emplace_back(line);
    };
    Pool pool(options);
    for (int i = 0; i < 20; ++i) {
      const std::string text = "client " + std::to_string(number) + " run " + std::to_string(i);
      CHECK(pool.Run({{"do", "say"}, {"text", text + "\n"}}).ok());
      CHECK(Has(pool.StderrTail(), text));
    }
  };
  std::thread other(client, 1);
  client(0);
  other.join();
  for (int number : {0, 1}) {
    CHECK(lines[number].size() == 20);
    for (const std::string& line : lines[number])
      CHECK(line.substr(0, 8) == "client " + std::to_string(number));
  }
}

TEST_CASE("a client that does not read what a case writes is told how much is left out") {
  const Serve server;
  std::atomic<bool> reads{false};
  PoolOptions options = server.Fake();
  options.on_stderr = [&](std::string_view) {
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);  // a backstop
         !reads && std::chrono::steady_clock::now() < end;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Pool pool(options);
  std::string text;  // more than the pipe and the client take
  for (int i = 0; i < 10000; ++i) text += "line " + std::to_string(i) + " of a case that writes much\n";
  const Result result = pool.Run({{"do", "say"}, {"text", text}});
  reads = true;
  CHECK(result.ok());
  REQUIRE(result.warnings.size() == 1);
  CHECK(Has(result.warnings[0], " bytes of the daemon's stderr are left out"));
}

TEST_CASE("cancel, status and progress are of the client's own request") {
  const Serve server;
  std::atomic<int> progress{0};
  PoolOptions options = server.Real();
  options.log = [&](std::string_view line) {
    if (Has(std::string(line), "\"progress\"")) ++progress;
  };
  Pool pool(options), other(server.Real());
  const Json pid = pool.Hello().at("pid");
  std::thread canceller([&] {
    CHECK(Eventually([&] {
      const Json status = pool.Status();
      return !status.at("running").is_null() && status.at("running").at("iteration") > 0;
    }));
    CHECK(Eventually([&] { return progress > 0; }));
    CHECK_FALSE(other.Cancel());
    CHECK(other.Status().at("running") == Json());
    CHECK(pool.Cancel());
  });
  cppool::RunOptions run = Long();
  run.progress = true;
  const Result result = pool.Run(Small(), run);
  canceller.join();
  CHECK(result.failure->kind == "cancelled");
  CHECK_FALSE(result.fatal);
  CHECK(pool.Hello().at("pid") == pid);
}

TEST_CASE("a request that waits for its turn is cancelled at once, and the one that runs goes on") {
  const Serve server;
  Pool first(server.Real()), second(server.Real());
  second.Hello();
  Result cancelled;
  std::thread running([&] { CHECK(first.Run(Small(), Long()).failure->kind == "cancelled"); });
  server.AwaitRun();
  std::thread waiting([&] { cancelled = second.Run(Small()); });
  CHECK(Eventually([&] { return Has(second.Status().at("text"), "waits for its turn"); }));
  CHECK(second.Cancel());
  waiting.join();
  CHECK(cancelled.failure->kind == "cancelled");
  CHECK_FALSE(first.Status().at("running").is_null());
  CHECK(first.Cancel());
  running.join();
}

TEST_CASE("a call that is interrupted leaves the server's daemon to others") {
  const Serve server;
  PoolOptions options = server.Real();
  std::atomic<bool> stop{false};
  options.interrupted = [&] { return stop.load(); };
  Pool pool(options), other(server.Real());
  const Json pid = other.Hello().at("pid");
  std::thread interrupting([&] {
    server.AwaitRun();
    stop = true;
  });
  CHECK(ErrorOf([&] { pool.Run(Small(), Long()); }).kind() == PoolError::Kind::kInterrupted);
  interrupting.join();
  CHECK(other.Run(Small()).ok());
  CHECK(other.Hello().at("pid") == pid);
}

TEST_CASE("without a server there is a clear error") {
  const TemporaryFolder folder;
  PoolOptions options = FakeOptions();
  options.attach = folder.File("socket");
  CHECK(Has(StartErrorOf(options), "there is no server at " + options.attach));
  CHECK(Has(StartErrorOf(options), "start one with `cppool serve`"));
  WriteFile(options.attach, "no socket");
  CHECK(Has(StartErrorOf(options), "there is no server at " + options.attach));

  const auto refused = [&](const std::string& attach) -> std::string {
    options.attach = attach;
    try {
      const Pool pool(options);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  CHECK(Has(refused("elsewhere"), "neither \"default\" nor the path of a socket"));
  CHECK(Has(refused("/" + std::string(200, 'x')), "has 201 bytes, and the system allows 107"));
  options.idle_exit = 1s;
  CHECK(Has(refused("default"), "idle_exit cannot be given with attach"));
}

TEST_CASE("a socket in /tmp counts only in a folder of this user's own") {
  unsetenv("XDG_RUNTIME_DIR");
  const std::string folder = "/tmp/cppool-" + std::to_string(geteuid());
  if (std::filesystem::exists(folder)) return;  // in use
  PoolOptions options = FakeOptions();
  options.attach = "default";
  CHECK(Has(StartErrorOf(options), "there is no server at " + folder + "/cppool.sock"));
  mkdir(folder.c_str(), 0755);
  chmod(folder.c_str(), 0755);
  CHECK(Has(StartErrorOf(options), "nobody else can open (mode 0700)"));
  std::filesystem::remove(folder);
}

TEST_CASE("a second server says that one runs, and a socket left by a crash is taken over") {
  Serve server;
  const std::string serve = std::string(CPPOOL_COMMAND) + " serve --socket " + server.socket();
  const Child second = RunChild(serve);
  CHECK(second.exit_code == 1);
  CHECK(Has(second.output,
            "a server runs at " + server.socket() + " already (pid " + std::to_string(server.pid())));
  const int daemon = PidOf(server.Real());
  server.Kill(SIGKILL);
  server.Wait();
  CHECK(Eventually([&] { return !Alive(daemon); }));
  CHECK(std::filesystem::exists(server.socket()));
  server.Start();
  CHECK(Eventually([&] {
    return RunChild(std::string(CPPOOL_COMMAND) + " ps --socket " + server.socket()).exit_code == 0;
  }));
  CHECK(PidOf(server.Real()) != daemon);
  server.Stop();

  WriteFile(server.socket(), "no socket");
  const Child refused = RunChild(serve);
  CHECK(refused.exit_code == 1);
  CHECK(Has(refused.output, "is there and is no socket"));
  CHECK(ReadFile(server.socket()) == "no socket");
}

TEST_CASE("the command runs, benches and diagnoses with the daemons of a server") {
  const Serve server;
  const std::string common = std::string(" --backend host --daemon ") + CPPOOL_TEST_DAEMON +
                             " --param max_seqlen_q=64 --param num_heads=4";
  const auto run = [&](const std::string& command) {
    return RunChild(CPPOOL_COMMAND + (" " + command + common));
  };
  const std::string attach = " --attach " + server.socket();
  const Child first = run("run --world-size 1,2" + attach);
  INFO(first.output);
  CHECK(first.exit_code == 0);
  CHECK(Has(first.output, "2 passed, 0 failed"));
  {
    const Environment variable("CPPOOL_ATTACH", server.socket());
    CHECK(run("run --world-size 1,2").exit_code == 0);
    CHECK(run("bench --repeat 2 --world-size 1").exit_code == 0);
  }
  CHECK(
      RunChild(std::string(CPPOOL_COMMAND) + " doctor --backend host --daemon " + CPPOOL_TEST_DAEMON + attach)
          .exit_code == 0);
  const Json pools = server.Ps().at("pools");
  CHECK(pools.size() == 4);  // of 1, 2, 4 and 8 ranks
  for (const Json& pool : pools) CHECK(pool.at("running") == Json());
  const Child text = RunChild(std::string(CPPOOL_COMMAND) + " ps --socket " + server.socket());
  CHECK(Has(text.output, "server: pid " + std::to_string(server.pid())));
  CHECK(Has(text.output, "world size 2, backend host"));
  CHECK(Has(text.output, "rank 1: device -1"));

  const Child missing = run("run --attach " + server.socket() + "2");
  CHECK(missing.exit_code == 1);
  CHECK(Has(missing.output, "there is no server at"));
  CHECK(run("run --attach elsewhere").exit_code == 2);
}

TEST_CASE("`cppool stop` ends a server and its daemons") {
  Serve server;
  Pool pool(server.Real());
  const int daemon = pool.Hello().at("pid");
  const std::string stop = std::string(CPPOOL_COMMAND) + " stop --socket " + server.socket();
  std::thread lost([&] {
    const PoolError error = ErrorOf([&] { pool.Run(Small(), Long()); });
    CHECK(error.kind() == PoolError::Kind::kDied);
    CHECK(Has(error.what(), "the server"));
  });
  server.AwaitRun();
  const Child stopped = RunChild(stop);
  CHECK(stopped.exit_code == 0);
  CHECK(Has(stopped.output, "has ended"));
  lost.join();
  CHECK(server.Wait() == 0);
  CHECK_FALSE(Alive(daemon));
  CHECK_FALSE(std::filesystem::exists(server.socket()));
  const Child none = RunChild(stop);
  CHECK(none.exit_code == 1);
  CHECK(Has(none.output, "there is no server at"));
}
