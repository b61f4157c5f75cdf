// Requests that overtake: cancel, status, and lines on the progress.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

std::vector<std::string> WithOdd(int world_size) {
  return {"--world-size",  std::to_string(world_size), "--backend", "host", "--case", CPPOOL_ODD_CASE,
          "--allow-faults"};
}

Json Attention(int id, int repeat) {
  return {
      {"op", "run"}, {"id", id}, {"repeat", repeat}, {"params", {{"max_seqlen_q", 64}, {"num_heads", 4}}}};
}
Json Cancel(const Json& id) { return {{"op", "cancel"}, {"id", "c"}, {"cancels", id}}; }
Json Status() { return {{"op", "status"}, {"id", "s"}}; }

// Waits until a run has begun iterations.
void AwaitIterations(DaemonProcess& daemon, int iterations) {
  while (true) {
    const Json running = daemon.Ask(Status()).at("running");
    if (!running.is_null() && running.at("iteration") >= iterations) return;
  }
}

}  // namespace

TEST_CASE("a run under way is cancelled between two iterations, and the next run passes on the same daemon") {
  const int world_size = GENERATE(1, 2, 4);
  const bool user = GENERATE(false, true);  // a case that heeds no status
  INFO(world_size << " " << user);
  DaemonProcess daemon(WithOdd(world_size));
  Json run = Attention(7, 10000);
  if (user) run.update({{"case", "odd"}, {"params", {{"action", "iterate"}}}});
  for (int round = 0; round < 3; ++round) {
    daemon.Send(run.dump());
    AwaitIterations(daemon, 5);
    CHECK(daemon.Ask(Cancel(7)) == Json{{"ok", true}, {"id", "c"}});
    const Json answer = daemon.ReadAnswer();
    INFO(answer.dump(1));
    CHECK(answer.at("id") == 7);
    CHECK(answer.at("status") == "error");
    CHECK(answer.at("failure").at("kind") == "cancelled");
    CHECK_FALSE(answer.contains("fatal"));
    CHECK_FALSE(answer.contains("leaks"));
    CHECK(daemon.Ask(Attention(8, 1)).at("status") == "passed");
  }
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("requests that wait keep their order, and those that overtake are answered at once") {
  DaemonProcess daemon(WithOdd(2));
  daemon.Send(Attention(1, 10000).dump());
  for (int id = 2; id < 6; ++id) daemon.Send(Attention(id, 1).dump());
  const Json first = daemon.Ask(Cancel(3));
  CHECK(first.at("id") == 3);  // the run that waited, before the cancel's own answer
  CHECK(first.at("failure").at("kind") == "cancelled");
  CHECK(daemon.ReadAnswer() == Json{{"ok", true}, {"id", "c"}});
  const Json unknown = daemon.Ask(Cancel(3));
  CHECK(unknown.at("failure").at("kind") == "invalid_request");
  CHECK(Has(unknown.at("error"), "(1 runs, 2 waits, 4 waits, 5 waits)"));
  CHECK(daemon.Ask(Status()).at("waiting") == 3);
  CHECK(daemon.Ask(Cancel(1)).at("ok") == true);
  for (const int id : {1, 2, 4, 5}) {
    const Json answer = daemon.ReadAnswer();
    CHECK(answer.at("id") == id);
    CHECK(answer.at("status") == (id == 1 ? "error" : "passed"));
  }
  const Json stats = daemon.Ask({{"op", "stats"}});
  CHECK(stats.at("passed") == 3);
  CHECK(stats.at("errors") == 3);
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("status says where a stalled rank is, and a cancel ends the run within the limits of a failure") {
  DaemonProcess daemon(WithOdd(2));
  Json run = Attention(7, 1);
  run["fault"] = {{"kind", "stall"}, {"rank", 1}, {"stage", "forward/"}};
  daemon.Send(run.dump());
  Json status;
  do {
    status = daemon.Ask(Status());
  } while (!Has(status.at("text"), "waiting for recv from rank 1") || status.at("awaited") != 1 ||
           !status.at("ranks").at(1).at("stage").get<std::string>().starts_with("forward/"));
  CHECK(daemon.Ask(Cancel(7)).at("ok") == true);
  const Json answer = daemon.ReadAnswer();
  INFO(answer.dump(1));
  CHECK(answer.at("failure").at("kind") == "cancelled");
  CHECK(Has(answer.at("error"), "not sound afterwards: rank 1 did not return"));
  CHECK(answer.at("fatal") == true);
  CHECK_FALSE(daemon.ReadLine());
  CHECK(daemon.Wait() == 3);
}

TEST_CASE("lines on the progress have the run's id, and its answer is the first line without progress") {
  DaemonProcess daemon(WithOdd(2));
  Json run = Attention(7, 10000);
  run["progress"] = true;
  daemon.Send(run.dump());
  int last = -1;
  for (int i = 0; i < 3; ++i) {
    const Json line = daemon.ReadAnswer();
    INFO(line.dump(1));
    CHECK(line.at("id") == 7);
    CHECK(line.at("progress").at("case") == "attention");
    CHECK(line.at("progress").at("iterations") == 10000);
    CHECK(line.at("progress").at("iteration") >= last);
    last = line.at("progress").at("iteration");
  }
  CHECK(last > 0);
  daemon.Send(Cancel(7).dump());
  Json line;
  while ((line = daemon.ReadAnswer()).contains("progress")) {
  }
  CHECK(line.at("id") == "c");
  while ((line = daemon.ReadAnswer()).contains("progress")) {
  }
  CHECK(line.at("failure").at("kind") == "cancelled");
  CHECK(daemon.Ask(Attention(8, 1)).at("id") == 8);
  CHECK(daemon.Wait() == 0);
}

// The daemon blocks when it writes answers that nobody reads; it must still end at the deadline.
TEST_CASE("a client that does not read cannot keep a daemon from its end at the deadline") {
  DaemonProcess daemon(WithOdd(1));
  CHECK(daemon.Ask({{"op", "hello"}}).at("ok") == true);
  daemon.Send(Json{
      {"op", "run"}, {"id", 1}, {"case", "odd"}, {"deadline_ms", 1000}, {"params", {{"action", "sleep"}}}}
                  .dump());
  std::thread flood([&] {  // more than a pipe holds
    const std::string padding(100000, 'x');
    for (int i = 0; i < 60; ++i) daemon.Send(Json{{"op", "status"}, {"id", padding}}.dump());
  });
  CHECK(EndsInTime(daemon.pid()));
  CHECK(daemon.Wait() == 3);
  flood.join();
}

}  // namespace cppool::test
