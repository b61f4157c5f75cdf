// Requests that overtake, over a fake world: what becomes of a run that is cancelled, and what `status` and
// the lines on the progress say of one that goes on.
#include <algorithm>
#include <future>
#include <latch>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/daemon/fake_case.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

using protocol::IncomingRequest;
using protocol::RequestQueue;

// A dispatcher with a queue. `Start` runs a request on a thread of its own.
struct Overtaking {
  explicit Overtaking(int world_size = 2, std::chrono::milliseconds grace = std::chrono::milliseconds(30))
      : inside(world_size, {grace, std::chrono::milliseconds(2000), std::chrono::milliseconds(2000)}) {}

  void Push(const Json& request) {
    queue.Push(std::make_shared<IncomingRequest>(protocol::LineReader::Line{request.dump()}));
  }
  std::future<Json> Start(const Json& request) {
    Push(request);
    return std::async(std::launch::async, [this, entry = queue.Pop()] {
      const auto answer = inside.dispatcher->Handle(entry);
      fatal = answer->fatal;
      return Json::parse(answer->text);
    });
  }
  // The answers to a request that overtakes.
  std::vector<Json> Send(const Json& request) {
    const IncomingRequest incoming(protocol::LineReader::Line{request.dump()});
    std::vector<Json> answers;
    std::istringstream lines(inside.dispatcher->Overtake(incoming, queue));
    for (std::string line; std::getline(lines, line);) answers.push_back(Json::parse(line));
    return answers;
  }
  std::vector<Json> Cancel(const Json& id) { return Send({{"op", "cancel"}, {"id", "c"}, {"cancels", id}}); }
  Json Status() { return Send({{"op", "status"}, {"id", "s"}}).at(0); }
  // Waits until the status has this part in its text.
  Json AwaitStatus(const std::string& part) {
    for (int i = 0; i < 60000; ++i) {
      Json status = Status();
      if (Has(status.at("text"), part)) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    FAIL("no status with " << part);
    return {};
  }
  std::size_t Count(const std::string& call) {
    const std::lock_guard lock(inside.fake->mutex);
    return static_cast<std::size_t>(std::count(inside.fake->calls.begin(), inside.fake->calls.end(), call));
  }

  Inside inside;
  RequestQueue queue;
  bool fatal = false;
};

Json RunOf(const std::string& action, int id = 7) {
  return {{"op", "run"}, {"id", id}, {"case", "fake"}, {"params", {{"action", action}, {"rank", 1}}}};
}

const Json kDone = {{"ok", true}, {"id", "c"}};

void CheckCancelled(const Json& answer, const std::string& error) {
  INFO(answer);
  CHECK(answer.at("ok") == false);
  CHECK(answer.at("id") == 7);
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("error") == error);
  CHECK(answer.at("failure") ==
        Json{{"kind", "cancelled"}, {"rank", nullptr}, {"stage", nullptr}, {"detail", error}});
}

}  // namespace

TEST_CASE("a waiting run that is cancelled is answered at once, before the cancel") {
  Overtaking overtaking;
  overtaking.Push(RunOf("pass"));
  const auto answers = overtaking.Cancel(7);
  REQUIRE(answers.size() == 2);
  CheckCancelled(answers[0], "cancelled before its first iteration");
  CHECK(answers[1] == kDone);
  const auto again = overtaking.Cancel(7);
  REQUIRE(again.size() == 1);
  CHECK(again[0].at("failure").at("kind") == "invalid_request");
  CHECK(Has(again[0].at("error"), "no `run` or `validate` with the id 7"));
  const Json stats = overtaking.inside.Ask(R"({"op": "stats"})");
  CHECK(stats.at("requests") == 4);
  CHECK(stats.at("errors") == 2);
}

TEST_CASE("all ranks of a cancelled run stop before the same iteration, and nothing is aborted or probed") {
  for (const int at : {0, 3}) {
    Overtaking overtaking;
    std::vector<Json> cancelled;
    std::latch sent(1);
    overtaking.inside.fake->on_iteration = [&](int rank, int index) {
      if (rank == 0 && index == at + 1) sent.wait();  // else it may have begun all of them
      if (rank == 1 && index == at) {
        cancelled = overtaking.Cancel(7);
        sent.count_down();
      }
    };
    Json request = RunOf("iterate together");
    request["warmup"] = 2;
    request["repeat"] = 10000;
    const Json answer = overtaking.Start(request).get();
    CHECK(cancelled == std::vector<Json>{kDone});
    CHECK_FALSE(overtaking.fatal);
    const std::string error = answer.at("error");
    const int begun = std::stoi(error.substr(error.find("after ") + 6));
    CHECK(begun >= at + 3);
    CheckCancelled(answer, "cancelled after " + std::to_string(begun) + " of 10002 iterations");
    for (const char* rank : {"0", "1"}) {
      CHECK(overtaking.Count(rank + (" iteration " + std::to_string(begun - 3))) == 1);
      CHECK(overtaking.Count(rank + (" iteration " + std::to_string(begun - 2))) == 0);
      CHECK(overtaking.Count(std::string(rank) + " cancel: cancelled") == 1);
    }
    CHECK(overtaking.Count("abort") == 0);
    CHECK(overtaking.Count("recover") == 0);
    overtaking.inside.fake->on_iteration = nullptr;
    CHECK(overtaking.inside.Run().at("status") == "passed");
  }
}

TEST_CASE("ranks that are past the last iteration do not run their checks when the run is cancelled") {
  Overtaking overtaking;
  overtaking.inside.fake->on_iteration = [&](int rank, int index) {
    if (rank == 0 && index == 2) overtaking.Cancel(7);
  };
  Json request = RunOf("iterate, then check");
  request["repeat"] = 3;
  const Json answer = overtaking.Start(request).get();
  CheckCancelled(answer, "cancelled after 3 of 3 iterations");
}

TEST_CASE(
    "a cancelled run whose ranks do not stop is aborted, and the daemon goes on if its world is sound") {
  Overtaking overtaking;
  auto answer = overtaking.Start(RunOf("hang"));
  overtaking.AwaitStatus("rank 0: finished; rank 1: p2p step 2 of 4, 1.50 s");
  CHECK(overtaking.Cancel(7) == std::vector<Json>{kDone});
  CHECK(overtaking.Status().value("text", "") != "");
  const Json cancelled = answer.get();
  CheckCancelled(cancelled,
                 "cancelled before its first iteration: rank 1: released: the request was cancelled");
  CHECK_FALSE(overtaking.fatal);
  CHECK(overtaking.Count("abort") == 1);
  CHECK(overtaking.inside.Run().at("status") == "passed");
}

TEST_CASE("a cancelled run with a rank that never returns is fatal, and says which") {
  Overtaking overtaking;
  overtaking.inside.fake->recovers = false;
  auto answer = overtaking.Start(RunOf("hang"));
  overtaking.AwaitStatus("rank 0: finished");
  overtaking.Cancel(7);
  const Json cancelled = answer.get();
  CHECK(overtaking.fatal);
  CheckCancelled(
      cancelled,
      "cancelled before its first iteration: rank 1: released: the request was cancelled; not sound "
      "afterwards: it cannot start anew");
}

TEST_CASE("a run that fails for another reason after it was cancelled is cancelled, and says so") {
  Overtaking overtaking;
  overtaking.inside.fake->on_end = [&] { overtaking.Cancel(7); };  // when its work is done
  const Json failed = overtaking.Start(RunOf("fail while others iterate")).get();
  CheckCancelled(failed, "cancelled before its first iteration: rank 1: it broke");
  const Json passed = overtaking.Start(RunOf("pass")).get();
  CheckCancelled(passed, "cancelled before its first iteration");
  CHECK(overtaking.inside.Ask(R"({"op": "stats"})").at("passed") == 0);
}

TEST_CASE("status says that nothing runs, or where every rank is, and ends nothing") {
  Overtaking overtaking;
  CHECK(overtaking.Status() ==
        Json{{"ok", true}, {"id", "s"}, {"running", nullptr}, {"text", "nothing runs"}, {"waiting", 0}});
  auto answer = overtaking.Start(RunOf("hang"));
  overtaking.Push(RunOf("pass", 8));
  Json status = overtaking.AwaitStatus("rank 0: finished; rank 1: p2p step 2 of 4, 1.50 s");
  INFO(status);
  CHECK(status.at("waiting") == 1);
  CHECK(status.at("awaited") == 1);
  CHECK(status.at("ranks").at(0) == Json{{"rank", 0},
                                         {"finished", true},
                                         {"where", "finished"},
                                         {"stage", "p2p step 2 of 4"},
                                         {"awaits", Json::array()}});
  CHECK(status.at("ranks").at(1).at("finished") == false);
  Json& running = status.at("running");
  CHECK(running.at("wall_ms").get<double>() >= 0);
  running.erase("wall_ms");
  CHECK(running == Json{{"id", 7},
                        {"case", "fake"},
                        {"stage", "p2p step 2 of 4"},
                        {"iteration", 0},
                        {"iterations", 1},
                        {"cancelled", false}});
  overtaking.Cancel(7);
  answer.get();
  CHECK(overtaking.Status().at("running").is_null());
}

TEST_CASE(
    "lines on the progress come for a run that wants them, when something has changed, until its answer is "
    "made") {
  Overtaking overtaking(1);
  std::vector<Json> lines;
  const auto tick = [&] {
    overtaking.inside.dispatcher->Progress(
        [&](std::string_view line) { lines.push_back(Json::parse(line)); });
  };
  overtaking.inside.fake->on_iteration = [&](int, int index) {
    if (index == 1) tick(), tick();
  };
  overtaking.inside.fake->on_end = tick;
  tick();
  Json request = RunOf("iterate together");
  request["params"]["rank"] = 0;
  request["warmup"] = 1;
  request["repeat"] = 3;
  CHECK(overtaking.Start(request).get().at("status") == "passed");
  CHECK(lines.empty());
  request["progress"] = true;
  CHECK(overtaking.Start(request).get().at("status") == "passed");
  tick();
  REQUIRE(lines.size() == 2);
  const auto line = [](int iteration) {
    return Json{
        {"id", 7},
        {"progress",
         {{"case", "fake"}, {"stage", "p2p step 2 of 4"}, {"iteration", iteration}, {"iterations", 4}}}};
  };
  CHECK(lines[0] == line(3));
  CHECK(lines[1] == line(4));
}

}  // namespace cppool::test
