// `cppool pipe`: the protocol over stdin and stdout, with an answer to every line whatever becomes of a
// daemon.
#include <signal.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;

Json Attention(const Json& id, int repeat = 1) {
  return {
      {"op", "run"}, {"id", id}, {"repeat", repeat}, {"params", {{"max_seqlen_q", 64}, {"num_heads", 4}}}};
}
Json WithFault(const Json& id, const char* kind) {
  Json run = Attention(id);
  run["fault"] = {{"kind", kind}, {"rank", 1}, {"stage", "forward/"}};
  return run;
}
Json Cancel(const Json& id) { return {{"op", "cancel"}, {"id", "c"}, {"cancels", id}}; }

class Pipe {
 public:
  explicit Pipe(std::vector<std::string> more = {}) : process_(Words(std::move(more)), CPPOOL_COMMAND) {}

  DaemonProcess& process() { return process_; }
  void Send(const Json& request) { process_.Send(request.dump()); }
  Json Read() {
    const auto line = process_.ReadLine();
    if (!line) throw std::runtime_error("no answer; stderr: " + process_.Stderr());
    return Json::parse(*line);
  }
  Json Ask(const Json& request) {
    Send(request);
    return Read();
  }
  pid_t DaemonPid() { return Ask({{"op", "hello"}}).at("pid"); }
  // Waits until the run under way has begun iterations; returns the latest `status`.
  Json AwaitIterations(int iterations) {
    while (true) {
      const Json status = Ask({{"op", "status"}, {"id", "s"}});
      if (!status.at("running").is_null() && status.at("running").at("iteration") >= iterations)
        return status;
    }
  }

 private:
  static std::vector<std::string> Words(std::vector<std::string> more) {
    std::vector<std::string> words = {"pipe", "--backend", "host", "--allow-faults"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  DaemonProcess process_;
};

}  // namespace

TEST_CASE("pipe: every op is answered in order, with its id and without a sentinel") {
  Pipe pipe({"--world-size", "4"});
  const Json id = {{"any", {1, nullptr, "x"}}};
  const Json hello = pipe.Ask({{"op", "hello"}, {"id", id}});
  CHECK(hello.at("id") == id);
  CHECK(hello.at("world_size") == 4);
  CHECK_FALSE(pipe.Ask({{"op", "list"}}).contains("id"));
  CHECK(pipe.Ask(Attention(2)).at("status") == "passed");
  Json validate = Attention(nullptr);
  validate["op"] = "validate";
  CHECK(pipe.Ask(validate) == Json{{"ok", true}, {"id", nullptr}, {"runs", true}});
  Json kwargs = {{"op", "run"}, {"id", 3}, {"kwargs", {{"max_seqlen_q", "64"}, {"cp_comm_type", "a2a"}}}};
  CHECK(pipe.Ask(kwargs).at("status") == "passed");
  const Json stats = pipe.Ask({{"op", "stats"}, {"id", 4}});
  CHECK(stats.at("passed") == 2);
  CHECK(stats.at("id") == 4);
  CHECK(pipe.Ask({{"op", "status"}, {"id", 5}}) ==
        Json{{"ok", true}, {"id", 5}, {"running", nullptr}, {"text", "nothing runs"}, {"waiting", 0}});
  CHECK(pipe.Ask(Cancel(2)).at("failure").at("kind") == "invalid_request");
  pipe.Send({{"op", "shutdown"}, {"id", 6}});
  pipe.Send({{"op", "hello"}});
  CHECK(pipe.Read() == Json{{"ok", true}, {"id", 6}});
  CHECK_FALSE(pipe.process().ReadLine());
  CHECK(pipe.process().Wait() == 0);
}

TEST_CASE("pipe: bad lines get the daemon's answers, and the next request goes on") {
  Pipe pipe;
  DaemonProcess daemon(Host(2, {"--allow-faults"}));
  const std::string long_id(1'000'000, 'x');
  std::string most = R"({"op": "status", "id": ")" + long_id + "\"";
  most += std::string((1 << 20) - 1 - most.size(), ' ') + "}";
  for (const std::string& line :
       {std::string("no JSON"), std::string(R"({"op": "rum", "id": 1})"),
        std::string(R"({"op": "run", "id": 2, "repeats": 1})"),
        std::string(R"({"op": "run", "id": 3, "deadline_ms": 0})"),
        std::string(R"({"op": "run", "progress": true})"), most, most + " ", std::string(2 << 20, 'x')}) {
    INFO(line.substr(0, 80));
    pipe.process().Send(line);
    daemon.Send(line);
    CHECK(pipe.Read() == daemon.ReadAnswer());
  }
  pipe.process().SendBytes("\n \t\r\n");  // no requests
  const Json refused = pipe.Ask({{"op", "run"}, {"id", 4}, {"params", {{"cp_comm_type", "a2b"}}}});
  CHECK(refused.at("id") == 4);
  CHECK(Has(refused.at("error"), "did you mean \"a2a\"?"));
  CHECK(refused.contains("ranks"));
  CHECK(pipe.Ask({{"op", "list"}, {"id", 5}, {"load", "/nowhere.so"}}).at("failure").at("kind") ==
        "invalid_request");
  CHECK(pipe.Ask(Attention(6)).at("status") == "passed");
  CHECK(pipe.process().Wait() == 0);
}

TEST_CASE(
    "pipe: a request whose daemon crashes is answered with rank, stage and stack, and the next one passes") {
  Pipe pipe;
  const pid_t daemon = pipe.DaemonPid();
  pipe.Send(WithFault("crash", "segfault"));
  pipe.Send(Attention("next"));
  const Json crash = pipe.Read();
  INFO(crash.dump(1));
  CHECK(crash.at("id") == "crash");
  CHECK(crash.at("ok") == false);
  CHECK(crash.at("status") == "error");
  CHECK(crash.at("ranks") == Json::array());
  const Json failure = crash.at("failure");
  CHECK(failure.at("kind") == "internal");
  CHECK(failure.at("rank") == 1);
  CHECK(failure.at("stage").get<std::string>().starts_with("forward/"));
  CHECK(Has(crash.at("error"), "was killed by signal 11"));
  CHECK_FALSE(Has(crash.at("error"), "the end of its stderr"));
  CHECK(crash.at("no_answer").at("kind") == "died");
  CHECK(crash.at("no_answer").at("attempts") == 1);
  CHECK(Has(crash.at("no_answer").at("crash").at("stack").dump(), "FaultInjector"));
  CHECK(Has(crash.at("no_answer").at("stderr_tail"), "2 ranks on host are open"));
  const Json next = pipe.Read();
  CHECK(next.at("id") == "next");
  CHECK(next.at("status") == "passed");
  CHECK_FALSE(next.contains("flaky"));
  CHECK(pipe.DaemonPid() != daemon);
  CHECK(pipe.process().Wait() == 0);
  CHECK(Has(pipe.process().Stderr(), "cppoold: crash {"));
}

TEST_CASE("pipe: with retries a request is asked again, and its answer is flaky") {
  Pipe pipe({"--retries", "1"});
  const pid_t daemon = pipe.DaemonPid();
  pipe.Send(Attention(1, 300));
  pipe.AwaitIterations(1);
  REQUIRE(kill(daemon, SIGKILL) == 0);
  const Json answer = pipe.Read();
  CHECK(answer.at("id") == 1);
  CHECK(answer.at("status") == "passed");
  CHECK(answer.at("flaky") == "flaky (passed at attempt 2)");
  CHECK(answer.at("lost").at(0).at("kind") == "died");
  const Json twice = pipe.Ask(WithFault(2, "segfault"));
  CHECK(twice.at("no_answer").at("attempts") == 2);
  CHECK(twice.at("no_answer").at("lost").size() == 1);
  CHECK(pipe.process().Wait() == 0);
}

TEST_CASE("pipe: a hang is answered at the deadline, by the daemon or for it") {
  Pipe pipe({"--deadline", "0.5"});
  const Json stall = pipe.Ask(WithFault(1, "stall"));
  INFO(stall.dump(1));
  CHECK(stall.at("id") == 1);
  CHECK(stall.at("failure").at("kind") == "timeout");
  CHECK(Has(stall.at("error"), "500 ms"));
  CHECK(stall.at("fatal") == true);
  CHECK_FALSE(stall.contains("no_answer"));

  const pid_t daemon = pipe.DaemonPid();
  REQUIRE(kill(daemon, SIGSTOP) == 0);
  Json own = Attention(2);
  own["deadline_ms"] = 300;
  const Json stopped = pipe.Ask(own);
  INFO(stopped.dump(1));
  CHECK(stopped.at("id") == 2);
  CHECK(stopped.at("failure").at("kind") == "timeout");
  CHECK(Has(stopped.at("error"), "did not answer within 2.3 s"));
  CHECK(stopped.at("no_answer").at("kind") == "timeout");
  CHECK(EndsInTime(daemon));
  CHECK(pipe.Ask(WithFault(3, "none")).at("id") == 3);
  CHECK(pipe.process().Wait() == 0);
}

TEST_CASE("pipe: at the end of input all requests are answered, more than are read ahead") {
  Pipe pipe;
  for (int id = 0; id < 200; ++id)
    pipe.Send(id == 100 ? WithFault(id, "segfault") : Json{{"op", "hello"}, {"id", id}});
  pipe.process().SendBytes(R"({"op": "hello", "id": 200})");  // without a newline
  pipe.process().CloseInput();
  for (int id = 0; id <= 200; ++id) {
    const Json answer = pipe.Read();
    CHECK(answer.at("id") == id);
    CHECK(answer.at("ok") == (id != 100));
  }
  CHECK_FALSE(pipe.process().ReadLine());
  CHECK(pipe.process().Wait() == 0);
}

TEST_CASE("pipe: cancel and status overtake, and progress has the run's id") {
  Pipe pipe;
  Json run = Attention({"run", 1}, 10000);
  run["progress"] = true;
  const pid_t daemon = pipe.DaemonPid();
  pipe.Send(run);
  const Json progress = pipe.Read();
  CHECK(progress.at("id") == run.at("id"));
  CHECK(progress.at("progress").at("iterations") == 10000);
  pipe.Send(Attention(2));
  pipe.Send(Attention(3));
  pipe.Send(Cancel(2));
  pipe.Send({{"op", "status"}, {"id", "s"}});
  pipe.Send(Cancel(run.at("id")));
  std::vector<Json> answers;
  while (answers.size() < 6)
    if (Json line = pipe.Read(); !line.contains("progress")) answers.push_back(std::move(line));
  std::vector<Json> ids;
  for (const Json& answer : answers) ids.push_back(answer.at("id"));
  CHECK(ids == std::vector<Json>{2, "c", "s", "c", run.at("id"), 3});
  CHECK(answers[0].at("failure").at("kind") == "cancelled");
  CHECK(answers[1] == Json{{"ok", true}, {"id", "c"}});
  CHECK(answers[2].at("running").at("id") == run.at("id"));
  CHECK(answers[2].at("waiting") == 1);
  CHECK(answers[3] == Json{{"ok", true}, {"id", "c"}});
  CHECK(answers[4].at("failure").at("kind") == "cancelled");
  CHECK_FALSE(answers[4].contains("no_answer"));
  CHECK(answers[5].at("status") == "passed");
  CHECK(pipe.DaemonPid() == daemon);  // it stayed warm
  CHECK(pipe.process().Wait() == 0);
}

TEST_CASE("pipe: it ends with its daemon when nobody reads the answers, also while a run goes on") {
  Pipe pipe;
  const pid_t daemon = pipe.DaemonPid();
  pipe.Send(WithFault(1, "stall"));  // longer than kPatience
  pipe.AwaitIterations(1);
  pipe.process().CloseOutput();
  CHECK(EndsInTime(pipe.process().pid()));
  CHECK(EndsInTime(daemon));
  CHECK(pipe.process().Wait() == 1);
  CHECK(Has(pipe.process().Stderr(), "cppool: nobody reads stdout"));
}

TEST_CASE(
    "pipe: SIGTERM cancels what runs, and what waits is not begun, and SIGQUIT says where the ranks are") {
  Pipe pipe;
  const pid_t daemon = pipe.DaemonPid();
  pipe.Send(Attention(1, 10000));
  pipe.Send(Attention(2));
  pipe.Send({{"op", "stats"}, {"id", 3}});
  pipe.AwaitIterations(1);
  REQUIRE(kill(pipe.process().pid(), SIGQUIT) == 0);
  while (!Has(pipe.process().Stderr(), "rank 1")) {
  }
  pipe.AwaitIterations(1);
  REQUIRE(kill(pipe.process().pid(), SIGTERM) == 0);
  for (const int id : {1, 2, 3}) {
    const Json answer = pipe.Read();
    INFO(answer.dump(1));
    CHECK(answer.at("id") == id);
    CHECK(answer.at("failure").at("kind") == "cancelled");
  }
  CHECK_FALSE(pipe.process().ReadLine());
  CHECK(pipe.process().Wait() == 1000 + SIGTERM);
  CHECK(EndsInTime(daemon));
}

TEST_CASE("pipe: SIGTERM ends it at once when nothing runs") {
  Pipe pipe;
  const pid_t daemon = pipe.DaemonPid();
  REQUIRE(kill(pipe.process().pid(), SIGTERM) == 0);
  CHECK(EndsInTime(pipe.process().pid()));
  CHECK(pipe.process().Wait() == 1000 + SIGTERM);
  CHECK(EndsInTime(daemon));
}

TEST_CASE("pipe: every line is answered when no daemon starts") {
  Pipe pipe({"--daemon", "/nowhere/cppoold"});
  for (int id = 0; id < 7; ++id) {  // more than the failed starts after which a call throws at once
    const Json answer = pipe.Ask(Attention(id));
    CHECK(answer.at("id") == id);
    CHECK(Has(answer.at("error"), "/nowhere/cppoold"));
    CHECK(answer.at("no_answer").at("kind") == "start");
  }
  CHECK(pipe.Ask({{"op", "status"}}).at("text") == "nothing runs");
  CHECK(pipe.process().Wait() == 0);
}

TEST_CASE("pipe: attached to a server, pipes share its daemon, and a crash is answered") {
  const TemporaryFolder folder;
  const std::string socket = folder.File("socket");
  DaemonProcess server({"serve", "--socket", socket}, CPPOOL_COMMAND);
  while (!Has(server.Stderr(), "serves at")) {
  }
  Pipe one({"--attach", socket}), other({"--attach", socket});
  const pid_t daemon = one.DaemonPid();
  CHECK(other.DaemonPid() == daemon);
  one.Send(Attention(1, 10000));
  CHECK(one.AwaitIterations(1).at("running").at("id") == 1);
  CHECK(one.Ask(Cancel(1)) == Json{{"ok", true}, {"id", "c"}});
  CHECK(one.Read().at("failure").at("kind") == "cancelled");
  const Json crash = other.Ask(WithFault(2, "segfault"));
  INFO(crash.dump(1));
  CHECK(crash.at("id") == 2);
  CHECK(crash.at("no_answer").at("kind") == "died");
  CHECK(Has(crash.at("error"), "rank 1 crashed by"));
  CHECK(one.Ask(Attention(3)).at("status") == "passed");
  CHECK(one.process().Wait() == 0);
  CHECK(other.process().Wait() == 0);
  REQUIRE(kill(server.pid(), SIGTERM) == 0);
  CHECK(EndsInTime(server.pid()));
}

TEST_CASE("pipe: --load is for requests that name no library") {
  Pipe pipe({"--load", CPPOOL_ODD_CASE});
  Json run = {{"op", "run"}, {"id", 1}, {"case", "odd"}, {"params", {{"action", "iterate"}}}};
  const Json answer = pipe.Ask(run);
  CHECK(answer.at("status") == "passed");
  CHECK(answer.at("libraries").at(0).at("file") == CPPOOL_ODD_CASE);
  CHECK(Has(pipe.Ask({{"op", "list"}}).dump(), R"("name":"odd")"));
  run["load"] = Json::array();
  CHECK(Has(pipe.Ask(run).at("error"), "odd"));
  CHECK(pipe.process().Wait() == 0);
}

}  // namespace cppool::test
