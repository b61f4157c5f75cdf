// Clients of a server that break its rules, die or hang: others notice nothing.
#include <fcntl.h>
#include <sys/stat.h>

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

std::size_t FdsOf(pid_t pid) {
  const std::filesystem::directory_iterator fds("/proc/" + std::to_string(pid) + "/fd");
  return static_cast<std::size_t>(std::distance(begin(fds), end(fds)));
}

const Json kRun = {{"op", "run"}, {"id", 7}, {"params", Small()}};

}  // namespace

TEST_CASE("unknown keys of a server's own requests are refused") {
  const Serve server;
  for (const char* op : {"ps", "stop"}) {
    RawClient client(server);
    const Json answer = client.Ask({{"op", op}, {"id", 1}, {"al", true}});
    CHECK(answer.at("failure").at("kind") == "invalid_request");
    CHECK(Has(answer.at("error"), "unknown key \"al\" of \"" + std::string(op) + "\""));
  }
  CHECK(RawClient(server).Ask({{"op", "ps"}, {"id", 1}}).at("ok") == true);
}

TEST_CASE("lines over a socket are answered as those of a daemon's stdin") {
  const Serve server;
  RawClient one(server), two(server);
  CHECK(one.Ask(RawClient::Attach()).at("ok") == true);
  CHECK(two.Ask(RawClient::Attach()).at("ok") == true);
  // The same id, at the same time.
  one.Send(kRun);
  two.Send(kRun);
  for (RawClient* client : {&one, &two}) {
    const auto answer = client->Read();
    REQUIRE(answer);
    CHECK(answer->at("id") == 7);
    CHECK(answer->at("status") == "passed");
  }
  // In order, without an id, with any id, empty lines, and what is no request.
  one.SendBytes("\n  \n" + Json{{"op", "hello"}}.dump() + "\r\n{\"op\": \"helo\", \"id\": [1]}\n{\n\xff\n" +
                Json{{"op", "stats"}, {"id", {{"a", 1}}}}.dump() + "\n");
  CHECK_FALSE(one.Read()->contains("id"));
  const Json unknown = *one.Read();
  CHECK(unknown.at("id") == Json{1});
  CHECK(Has(unknown.at("error"), "did you mean \"hello\"?"));
  for (int i = 0; i < 2; ++i) CHECK(one.Read()->at("failure").at("kind") == "invalid_request");
  CHECK(one.Read()->at("id") == Json{{"a", 1}});
  // A line that is too long, and the next one.
  one.SendBytes(std::string(2 << 20, 'x') + "\n");
  CHECK(Has(one.Read()->at("error"), "more than 1048576 bytes"));
  CHECK(one.Ask(kRun).at("status") == "passed");
  // A last line without its end, and the answers after the end of input.
  one.SendBytes(kRun.dump() + "\n" + kRun.dump());
  one.EndInput();
  for (int i = 0; i < 2; ++i) CHECK(one.Read()->at("status") == "passed");
  CHECK_FALSE(one.Read());
  // shutdown is of the connection.
  two.SendBytes(Json{{"op", "shutdown"}, {"id", 1}}.dump() + "\n" + kRun.dump() + "\n");
  CHECK(*two.Read() == Json{{"ok", true}, {"id", 1}});
  CHECK_FALSE(two.Read());
}

TEST_CASE("relative paths in requests are relative to the client's folder") {
  const Serve server;
  const TemporaryFolder folder;
  RawClient client(server);
  client.Ask(RawClient::Attach(folder.path().string()));
  Json run = kRun;
  run["trace"] = "trace.json";
  CHECK(client.Ask(run).at("status") == "passed");
  CHECK(Has(ReadFile(folder.File("trace.json")), "traceEvents"));
  run["kernels"] = "./none.so";
  const std::string error = client.Ask(run).at("error");
  INFO(error);
  CHECK(Has(error, folder.File("./none.so")));
}

TEST_CASE("cancel over a socket: unknown, answered and doubled ids") {
  const Serve server;
  RawClient client(server);
  client.Ask(RawClient::Attach());
  const auto cancel = [](const Json& id) { return Json{{"op", "cancel"}, {"id", "c"}, {"cancels", id}}; };
  CHECK(Has(client.Ask(cancel(7)).at("error"), "no request with the id 7 waits or runs"));
  CHECK(client.Ask(kRun).at("status") == "passed");
  CHECK(Has(client.Ask(cancel(7)).at("error"), "no request with the id 7 waits or runs"));
  Json run = kRun;
  run["repeat"] = 10000;
  client.Send(run);
  server.AwaitRun();
  client.Send(kRun);
  client.Send({{"op", "run"}, {"id", 8}, {"params", Small()}});
  CHECK(Has(client.Ask(cancel(7)).at("error"), "2 requests have the id 7: none is cancelled"));
  const Json first = client.Ask(cancel(8));
  CHECK(first.at("id") == 8);
  CHECK(first.at("failure").at("kind") == "cancelled");
  CHECK(client.Read()->at("ok") == true);
  const Json status = client.Ask({{"op", "status"}, {"id", "s"}});
  CHECK(status.at("id") == "s");
  CHECK(status.at("waiting") == 1);
  CHECK(status.at("running").at("id") == 7);
}

TEST_CASE("a first line that is none of a client is refused, and says what is allowed") {
  const Serve server;
  const auto refused = [&](const std::string& line) {
    RawClient client(server);
    client.SendBytes(line + "\n");
    const auto answer = client.Read();
    REQUIRE(answer);
    CHECK(answer->at("ok") == false);
    CHECK_FALSE(client.Read());
    return answer->at("error").get<std::string>();
  };
  CHECK(Has(refused("hello"), "syntax"));
  CHECK(Has(refused("[1]"), "not a JSON object"));
  CHECK(Has(refused("{\"op\": \"hello\"}"), "\"attach\", \"ps\" or \"stop\""));
  CHECK(Has(refused(std::string(2 << 20, 'x')), "more than 1048576 bytes"));
  const auto with = [](const std::string& key, const Json& value) {
    Json line = RawClient::Attach();
    line[key] = value;
    return line.dump();
  };
  CHECK(Has(refused(with("folder", "here")), "must be an absolute path"));
  CHECK(Has(refused(with("sentinel", "a\nb")), "an answer is one line"));
  CHECK(Has(refused(with("colour", "red")), "unknown key \"colour\" of \"attach\""));
  CHECK(Has(refused(with("pool", {{"world_sise", 2}})), "did you mean \"world_size\"?"));
  CHECK(Has(refused(with("pool", {{"world_size", 65}})), "an integer from 1 to 64"));
  CHECK(Has(refused(with("pool", {{"attach", "default"}})), "attaches to no other one"));
  CHECK(Has(refused(with("queue_limit_ms", -1)), "\"queue_limit_ms\""));
  CHECK(Has(refused(with("environment", 1)), "an object of strings"));
  // From a client that is newer than the server.
  CHECK(Has(refused(with("needs", {"attach", "teleport", "ps", "fly"})),
            "older than its client, and has not the features teleport, fly"));
  // A NUL byte in what becomes a command line.
  CHECK(Has(refused(with("pool", {{"arguments", {std::string("a\0b", 3)}}})), "cannot hold a zero byte"));
}

TEST_CASE("a client that goes at any moment costs only its own request") {
  Serve server;
  Pool other(server.Real());
  const Json pid = other.Hello().at("pid");
  const Json attach = RawClient::Attach();
  const std::size_t fds = FdsOf(server.pid());
  for (int step = 0; step < 8; ++step) {
    INFO(step);
    RawClient client(server);
    if (step == 1) client.SendBytes(attach.dump().substr(0, 30));
    if (step >= 2) client.Send(attach);
    if (step >= 3) client.Read();
    if (step == 4) client.SendBytes(kRun.dump().substr(0, 20));
    if (step >= 5) {
      Json run = kRun;
      run["repeat"] = 10000;
      run["progress"] = step == 7;
      client.Send(run);
    }
    if (step >= 6) server.AwaitRun();
    client.Close();
    const Result result = other.Run(Small());  // once that one is cancelled
    CHECK(result.ok());
  }
  CHECK(other.Hello().at("pid") == pid);
  CHECK(Eventually([&] { return FdsOf(server.pid()) == fds; }));
}

TEST_CASE("a client that is killed while a child has a copy of its socket is gone nevertheless") {
  const Serve server;
  Pool other(server.Real());
  other.Hello();
  const pid_t client = fork();
  if (client == 0) {
    RawClient raw(server);
    raw.Ask(RawClient::Attach());
    if (fork() == 0) {
      alarm(30);
      for (;;) pause();
    }
    Json run = kRun;
    run["repeat"] = 10000;
    raw.Send(run);
    for (;;) pause();
  }
  server.AwaitRun();
  kill(client, SIGKILL);
  CHECK(other.Run(Small()).ok());
  waitpid(client, nullptr, 0);
}

TEST_CASE("clients that hang or do not read hold up nobody", "[minute]") {
  const Serve server;
  RawClient silent(server), half(server), deaf(server);
  half.SendBytes("{\"op\": \"att");
  deaf.Ask(RawClient::Attach());
  // Answers that nobody reads: more than a socket holds, and then more than the server keeps.
  std::thread flood([&] {
    const std::string id(1 << 19, 'i');
    while (deaf.Send({{"op", "status"}, {"id", id}})) {
    }
  });
  Pool other(server.Real());
  for (int i = 0; i < 5; ++i) CHECK(other.Run(Small()).ok());
  flood.join();  // the server has closed the connection
  CHECK(other.Run(Small()).ok());
}

TEST_CASE("requests are read ahead up to a number, and all are answered") {
  const Serve server;
  RawClient client(server);
  client.Ask(RawClient::Attach());
  constexpr int kRequests = 1000;
  std::thread sender([&] {
    for (int id = 0; id < kRequests; ++id) client.Send({{"op", "hello"}, {"id", id}});
  });
  for (int id = 0; id < kRequests; ++id) {
    const auto answer = client.Read();
    REQUIRE(answer);
    REQUIRE(answer->at("id") == id);
  }
  sender.join();
}

TEST_CASE("descriptors that come with lines are closed") {
  const Serve server;
  const std::size_t before = FdsOf(server.pid());
  {
    Pool pool(server.Real());
    pool.Hello();
    CHECK(FdsOf(server.pid()) > before);
  }
  Pool pool(server.Real());
  pool.Hello();
  const std::size_t with_one = FdsOf(server.pid());
  for (int i = 0; i < 20; ++i) {
    Pool more(server.Real());
    more.Hello();
  }
  CHECK(Eventually([&] { return FdsOf(server.pid()) == with_one; }));
}

TEST_CASE("a server that is killed at any moment leaves no daemon, and its clients get an error") {
  for (int step = 0; step < 4; ++step) {
    INFO(step);
    Serve server;
    Pool pool(server.Real());
    const int daemon = step > 0 ? pool.Hello().at("pid").get<int>() : 0;
    std::thread killer([&] {
      if (step == 2) server.AwaitRun();
      if (step >= 2) server.Kill(SIGKILL);
    });
    if (step < 2) {
      killer.join();
      server.Kill(SIGKILL);
      server.Wait();
    }
    std::optional<PoolError::Kind> kind;
    try {
      pool.Run(Small(), Long());
    } catch (const PoolError& error) {
      kind = error.kind();
    }
    if (killer.joinable()) killer.join();
    REQUIRE(kind);
    CHECK((kind == PoolError::Kind::kDied || kind == PoolError::Kind::kStart));
    if (daemon != 0) CHECK(Eventually([&] { return !Alive(daemon); }));
  }
}

TEST_CASE("a daemon that is killed while it works is replaced for the next client") {
  const Serve server;
  Pool pool(server.Real()), other(server.Real());
  const int daemon = pool.Hello().at("pid");
  std::thread killer([&] {
    server.AwaitRun();
    kill(daemon, SIGKILL);
  });
  std::optional<PoolError> error;
  try {
    pool.Run(Small(), Long());
  } catch (const PoolError& thrown) {
    error = thrown;
  }
  killer.join();
  REQUIRE(error);
  CHECK(error->kind() == PoolError::Kind::kDied);
  CHECK(Has(error->what(), "was killed by signal 9"));
  CHECK(other.Run(Small()).ok());
  kill(other.Hello().at("pid").get<int>(), SIGKILL);  // between two calls, or just as the next one comes
  CHECK(Eventually([&] {
    try {
      return pool.Run(Small()).ok();
    } catch (const PoolError&) {
      return false;
    }
  }));
}

TEST_CASE("another user can neither attach nor be attached to") {
  if (geteuid() != 0) return;  // cannot be another user
  constexpr uid_t kOther = 65534;
  const Serve server;
  chmod(std::filesystem::path(server.socket()).parent_path().c_str(), 0755);
  chmod(server.socket().c_str(), 0666);
  const int refused = InChild([&] {
    if (setuid(kOther) != 0) return 1;
    RawClient client(server);
    const auto answer = client.Read();
    return answer && Has(answer->at("error"), "of user 0 alone, and its client is user 65534") ? 0 : 2;
  });
  CHECK(refused == 0);
  const int not_trusted = InChild([&] {
    if (setuid(kOther) != 0) return 1;
    Pool pool(server.Fake());
    try {
      pool.Hello();
    } catch (const PoolError& error) {
      return Has(error.what(), "is of another user (0, and this is 65534)") ? 0 : 2;
    }
    return 3;
  });
  CHECK(not_trusted == 0);
  CHECK(server.Ps().at("ok") == true);
}
