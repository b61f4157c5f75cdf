// Clients of a server that want the same daemon: turns, limits, memory, and the end of idle ones.
#include <thread>
#include <vector>

#include "tests/client/serve_support.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::PoolError;
using cppool::PoolOptions;
using cppool::Result;

namespace {

// A daemon that notes each start in `folder`, and whose start needs the memory of a second one to be free.
std::string ShortDaemon(const TemporaryFolder& folder) {
  const std::string file = folder.File("short");
  WriteFile(
      file,
      "#!/bin/sh\nmark='" + folder.File("up") + "'/$$\nmkdir -p '" + folder.File("up") +
          "'\necho \"$CUDA_X\" > $mark\nif [ $(ls '" + folder.File("up") +
          "' | wc -l) -gt 2 ]; then rm $mark; echo 'cppoold: start {\"error\": \"no memory\", \"kind\": "
          "\"out_of_memory\"}' >&2; exit 2; fi\n'" CPPOOL_FAKE_DAEMON
          "' \"$@\"\ncode=$?\nrm $mark\nexit $code\n");
  std::filesystem::permissions(file, std::filesystem::perms::owner_all);
  return file;
}

}  // namespace

TEST_CASE("clients take turns, whoever asks more") {
  const Serve server;
  const TemporaryFolder folder;
  const std::string log = folder.File("log");
  // Each request waits until one of the other client waits, too.
  const auto ask = [&](int client, int requests) {
    RawClient raw(server);
    Json attach = RawClient::Attach();
    attach["pool"] = {{"daemon", CPPOOL_FAKE_DAEMON}};
    raw.Ask(attach);
    for (int i = 0; i < requests; ++i)
      raw.Send({{"op", "run"},
                {"id", i},
                {"case", std::to_string(client)},
                {"params", {{"do", "nth"}, {"log", log}, {"ends", "[late]"}, {"ms", 50}}}});
    for (int i = 0; i < requests; ++i) {
      const auto answer = raw.Read();
      if (!answer || answer->at("id") != i || answer->at("ok") != true) return false;
    }
    return true;
  };
  bool right[2] = {};
  std::thread other([&] { right[1] = ask(1, 10); });
  right[0] = ask(0, 10);
  other.join();
  CHECK(right[0]);
  CHECK(right[1]);
  std::vector<std::string> order;
  for (const std::string& line : Lines(ReadFile(log))) order.push_back(Json::parse(line).at("case"));
  REQUIRE(order.size() == 20);
  // From when both ask to when one has no more, nobody comes twice in a row.
  int twice = 0;
  for (std::size_t i = 6; i < 14; ++i) twice += order[i] == order[i - 1];
  CHECK(twice <= 1);
}

TEST_CASE("a request that waits too long for others is answered as such") {
  const Serve server;
  Pool first(server.Real());
  PoolOptions options = server.Real();
  options.queue_limit = 200ms;
  Pool second(options);
  second.Hello();
  Result result;
  std::thread running([&] { result = first.Run(Small(), Long()); });
  server.AwaitRun();
  std::optional<PoolError> error;
  try {
    second.Run(Small());
  } catch (const PoolError& thrown) {
    error = thrown;
  }
  REQUIRE(error);
  INFO(error->what());
  CHECK(error->kind() == PoolError::Kind::kQueue);
  CHECK(Has(error->what(),
            "waited 0.2 s (queue_limit) for its turn and was not taken up: pid " + std::to_string(getpid())));
  CHECK(Has(error->what(), "has run `run attention` for"));
  CHECK(second.Hello().at("ok") == true);  // who asks is known while another one's run is under way
  CHECK(first.Cancel());
  running.join();
  CHECK(result.failure->kind == "cancelled");
  CHECK(second.Run(Small()).ok());
}

TEST_CASE("a deadline counts from when the request has its turn") {
  const Serve server;
  Pool first(server.Fake()), second(server.Fake());
  second.Hello();
  std::thread running([&] { first.Run({{"do", "late"}, {"ms", 1500}}); });
  server.AwaitRun();
  CHECK(second.Run(Do("pass"), Within(500ms)).ok());  // with the grace 0.7 s
  running.join();
}

TEST_CASE("a client that keeps its turn goes first, until it tells otherwise, hangs or goes") {
  const Serve server;
  RawClient keeper(server), same(server);
  keeper.Ask(RawClient::Attach());
  same.Ask(RawClient::Attach());
  CHECK(keeper.Ask({{"op", "turn"}, {"id", 1}, {"keep", true}}) == Json{{"ok", true}, {"id", 1}});
  const Json run = {{"op", "run"}, {"id", 2}, {"params", Small()}};
  CHECK(same.Ask(run).at("ok") == true);  // the same process
  // Another process waits for as long as the keeper has requests.
  const auto end = GENERATE(0, 1, 2);
  INFO(end);
  const pid_t waiting = Fork([&] {
    keeper.Close();  // the server sees this connection's end when no process has it any more
    RawClient other(server);
    other.Ask(RawClient::Attach());
    return other.Ask(run).at("ok") == true ? 0 : 1;
  });
  for (int i = 0; i < 10; ++i) {
    CHECK(keeper.Ask(run).at("ok") == true);
    std::this_thread::sleep_for(50ms);
  }
  CHECK(Alive(waiting));
  if (end == 0) CHECK(keeper.Ask({{"op", "turn"}, {"keep", false}}) == Json{{"ok", true}});
  if (end == 1) keeper.Close();
  const int code = AwaitForked(waiting);  // else after two seconds
  CHECK(code == 0);
  if (end != 1) CHECK(keeper.Ask(run).at("ok") == true);
  if (end != 1) CHECK(Has(keeper.Ask({{"op", "turn"}, {"keep", 1}}).at("error"), "\"keep\", true or false"));
}

TEST_CASE("the pool that was used longest ago ends where a new one finds no memory") {
  const Serve server;
  const TemporaryFolder folder;
  const std::string daemon = ShortDaemon(folder);
  const auto up = [&] {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(folder.File("up")))
      names.push_back(Lines(ReadFile(file.path().string())).at(0));
    std::sort(names.begin(), names.end());
    return names;
  };
  const auto use = [&](const std::string& name) {
    PoolOptions options = server.Fake();
    options.daemon = daemon;
    options.environment = {{"CUDA_X", name}};
    Pool pool(options);
    CHECK(pool.Run(Do("pass")).ok());
  };
  use("one");
  use("two");
  use("one");
  CHECK(up() == std::vector<std::string>{"one", "two"});
  use("three");  // in place of "two"
  CHECK(up() == std::vector<std::string>{"one", "three"});

  // Pools that are in use stay, and the error is the daemon's.
  const auto hold = [&](const std::string& name) {
    PoolOptions options = server.Fake();
    options.daemon = daemon;
    options.environment = {{"CUDA_X", name}};
    Pool pool(options);
    pool.Run({{"do", "late"}, {"ms", 3000}});
  };
  std::thread one(hold, "one"), three(hold, "three");
  CHECK(Eventually([&] {
    const Json ps = server.Ps();
    int running = 0;
    for (const Json& pool : ps.at("pools")) running += !pool.at("running").is_null();
    return running == 2;
  }));
  PoolOptions options = server.Fake();
  options.daemon = daemon;
  Pool none(options);
  std::string why;
  try {
    none.Hello();
  } catch (const PoolError& error) {
    why = error.what();
  }
  CHECK(Has(why, "no memory"));
  one.join();
  three.join();
  CHECK(none.Hello().at("ok") == true);
}

TEST_CASE("a daemon that is idle ends, and a server without clients, too") {
  Serve server({"--idle-exit", "0.5"});
  {
    Pool pool(server.Real());
    const int daemon = pool.Hello().at("pid");
    CHECK(Eventually([&] { return !Alive(daemon); }));
    CHECK(Alive(server.pid()));  // it has a client
    const Result result = pool.Run(Small());
    CHECK(result.ok());
    CHECK(result.attempts == 1);
  }
  CHECK(server.Wait() == 0);
  CHECK(Has(server.Log(), "no client was connected for 0.5 s"));
  CHECK_FALSE(std::filesystem::exists(server.socket()));
}
