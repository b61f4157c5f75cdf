// Failures on ranks: the answer has the cause first, waiting ranks are released, and the world is kept if it
// is sound.
#include <algorithm>
#include <chrono>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "tests/daemon/fake_case.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

bool Called(FakeWorld& world, const std::string& call) {
  const std::lock_guard lock(world.mutex);
  return std::find(world.calls.begin(), world.calls.end(), call) != world.calls.end();
}

}  // namespace

TEST_CASE("a failed check gives the status failed, whatever the rank returns, and aborts nothing") {
  Inside inside(4);
  for (const char* action : {"check fails", "check fails and returns an error"}) {
    const Json answer = inside.Run({{"action", action}, {"rank", 2}});
    INFO(answer);
    CHECK(answer.at("ok") == false);
    CHECK(answer.at("status") == "failed");
    CHECK(answer.at("failure").at("kind") == "mismatch");
    CHECK(answer.at("failure").at("rank") == 2);
    CHECK(Has(answer.at("failure").at("detail"), "dq"));
    CHECK(answer.at("ranks").at(2).at("ok") == false);
    CHECK(answer.at("ranks").at(0).at("ok") == true);
    for (const Json& check : answer.at("checks"))  // only for checks against the oracle
      CHECK(check.value("ratio", 0.0) == (check.at("against") == "oracle" ? 0.5 : 0.0));
    CHECK_FALSE(inside.last_fatal);
  }
  CHECK(inside.Run({{"action", "nan"}}).at("status") == "failed");
  const Json mismatch = inside.Run({{"action", "mismatch"}});
  CHECK(mismatch.at("status") == "failed");
  CHECK(Has(mismatch.at("error"), "7 is not 8"));
  // A mismatch does not abort ranks that are still running, however long they take.
  CHECK(inside.Run({{"action", "mismatch while others are busy"}}).at("ranks").at(1).at("ok") == true);
  CHECK_FALSE(Called(*inside.fake, "abort"));
  CHECK(inside.Run().at("status") == "passed");
}

TEST_CASE("the answer has the kind, rank, stage and text of a rank's error") {
  Inside inside(4, kPatient);
  const std::vector<std::vector<std::string>> expected = {
      {"fail", "internal", "it broke"},          {"last error", "internal", "the runtime's last error"},
      {"throw", "internal", "thrown by a case"}, {"throw 7", "internal", "not a std::exception"},
      {"misuse", "internal", "another type"},    {"bad result", "internal", "not JSON"},
      {"result ok", "internal", "has already"},
  };
  for (const auto& e : expected) {
    const Json answer = inside.Run({{"action", e[0]}, {"rank", 3}});
    INFO(answer);
    CHECK(answer.at("status") == "error");
    CHECK(answer.at("failure").at("kind") == e[1]);
    CHECK(answer.at("failure").at("rank") == 3);
    CHECK(answer.at("failure").at("stage") == "p2p step 2 of 4");
    CHECK(Has(answer.at("failure").at("detail"), e[2]));
    CHECK(Has(answer.at("ranks").at(3).at("error"), e[2]));
    CHECK(answer.at("ranks").at(2).at("ok") == true);
    CHECK_FALSE(answer.contains("fatal"));
  }
  for (const auto& [action, kind] : {std::pair("cannot", "unsupported"), {"does not fit", "inapplicable"}}) {
    const Json skipped = inside.Run({{"action", action}});
    CHECK(skipped.at("status") == "skipped");
    CHECK(skipped.at("failure").at("kind") == kind);
  }
  CHECK_FALSE(Called(*inside.fake, "abort"));
  CHECK(inside.Run().at("status") == "passed");
}

TEST_CASE("ranks that wait for a failed rank are released, and the failed rank's error comes first") {
  for (const int world_size : {2, 4, 8}) {
    Inside inside(world_size);
    for (const char* action : {"fail while others wait", "throw while others wait"}) {
      const Json answer = inside.Run({{"action", action}, {"rank", 1}});
      INFO(answer);
      CHECK(answer.at("status") == "error");
      CHECK(answer.at("failure").at("kind") == "internal");
      CHECK(answer.at("failure").at("rank") == 1);
      CHECK(Has(answer.at("ranks").at(0).at("error"), "rank 1 failed first"));
      CHECK_FALSE(answer.contains("fatal"));  // this world recovers
      CHECK(inside.Run().at("status") == "passed");
    }
  }
}

TEST_CASE(
    "when a rank fails before its first iteration, no rank begins one, and nothing needs to be aborted") {
  for (const int world_size : {2, 4, 8}) {
    Inside inside(world_size, kPatient);
    for (const auto& [action, status] :
         {std::pair("fail", "error"), {"cannot", "skipped"}, {"throw", "error"}}) {
      const Json answer = inside.Run({{"action", action + std::string(" while others begin")}, {"rank", 1}});
      INFO(answer);
      CHECK(answer.at("status") == status);
      CHECK(answer.at("failure").at("rank") == 1);
      CHECK(answer.at("ranks").at(0).at("error") ==
            "no iteration was begun, since rank 1 failed before its first one");
      CHECK_FALSE(answer.contains("fatal"));
    }
    CHECK_FALSE(Called(*inside.fake, "abort"));
    // A rank that iterates not at all, or whose check does not hold, keeps nobody from it.
    for (const char* action : {"pass while others iterate", "mismatch while others iterate"})
      CHECK(inside.Run({{"action", action}, {"rank", 1}}).at("ranks").at(0).at("ok") == true);
    CHECK(inside.Run().at("status") == "passed");
  }
}

TEST_CASE("if a world does not recover, the answer is fatal and says why") {
  Inside inside;
  inside.fake->recovers = false;
  const Json answer = inside.Run({{"action", "fail while others wait"}, {"rank", 1}});
  CHECK(answer.at("fatal") == true);
  CHECK(inside.last_fatal);
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(answer.at("error") == "rank 1: it broke; not sound afterwards: it cannot start anew");
  CHECK(answer.at("failure").at("detail") == "it broke");
}

// Checks that the daemon has probed its world, clears the record of it, and checks that the next case passes.
void CheckProbedAndWarm(Inside& inside) {
  CHECK(Called(*inside.fake, "recover"));
  {
    const std::lock_guard lock(inside.fake->mutex);
    CHECK(inside.fake->sums > 0);
    inside.fake->calls.clear();
    inside.fake->sums = 0;
  }
  CHECK(inside.Run().at("status") == "passed");
}

TEST_CASE("after any error the daemon probes its world, and keeps it if it is sound") {
  Inside inside(4);
  for (const char* action : {"cuda", "memory", "throw", "fail", "fail while others wait"}) {
    const Json answer = inside.Run({{"action", action}, {"rank", 2}});
    INFO(answer);
    CHECK(answer.at("status") == "error");
    CHECK_FALSE(answer.contains("fatal"));
    CheckProbedAndWarm(inside);
  }
  // A failed check causes no probe.
  for (const char* action : {"check fails", "mismatch", "cannot", "does not fit", "pass"})
    inside.Run({{"action", action}, {"rank", 2}});
  CHECK_FALSE(Called(*inside.fake, "recover"));
  CHECK(inside.fake->sums == 0);
}

TEST_CASE(
    "a group of calls that a case leaves open is its error if it has no other, and the world recovers") {
  Inside inside(4);
  const std::vector<std::vector<std::string>> expected = {
      {"pass", "error", "rank 2: the case left a group of calls open"},
      {"throw", "error", "thrown by a case"},
      {"cannot", "skipped", "no kernel"},
      {"mismatch", "failed", "7 is not 8"},
      {"check fails", "failed", "dq against oracle"},
      {"fail while others wait", "error", "it broke"},
  };
  for (const auto& e : expected) {
    const Json answer = inside.Run({{"action", "begin a group, " + e[0]}, {"rank", 2}});
    INFO(answer);
    CHECK(answer.at("status") == e[1]);
    CHECK(answer.at("failure").at("rank") == 2);
    CHECK(Has(answer.at("error"), e[2]));
    CHECK_FALSE(answer.contains("fatal"));
    CheckProbedAndWarm(inside);
  }
  CHECK_FALSE(Called(*inside.fake, "recover"));
}

TEST_CASE("the world is probed after an unsupported case whose end fails") {
  Inside inside(4);
  inside.fake->unsound_rank = 2;
  inside.fake->unsound = FakeWorld::Unsound::kCommunicator;
  const Json answer = inside.Run({{"action", "cannot"}, {"rank", 2}});
  INFO(answer);
  CHECK(answer.at("fatal") == true);
  CHECK(Has(answer.at("error"), "not sound afterwards: rank 2: a communicator failed"));
}

TEST_CASE("if a probe after an error fails, the answer is fatal and says what is wrong") {
  using Unsound = FakeWorld::Unsound;
  struct Wrong {
    Unsound what;
    std::string part;
  };
  const Wrong wrong =
      GENERATE(Wrong{Unsound::kSum, "rank 2: a sum over the world communicator is wrong: element 512 is"},
               Wrong{Unsound::kMessage, ": a message from rank 2 over the world communicator is wrong"},
               Wrong{Unsound::kStaleMessage, ": a message from rank 2 over the world communicator is wrong"},
               Wrong{Unsound::kCommunicator, "rank 2: a communicator failed"},
               Wrong{Unsound::kHangs, "did not return from small collectives within 100 ms"});
  Inside inside(4, {std::chrono::milliseconds(30), std::chrono::milliseconds(2000),
                    std::chrono::milliseconds(wrong.what == Unsound::kHangs ? 100 : 20000)});
  inside.fake->unsound_rank = 2;
  CHECK_FALSE(inside.Run({{"action", "fail"}, {"rank", 1}})
                  .contains("fatal"));  // its probe sends the message that kStaleMessage repeats
  inside.fake->unsound = wrong.what;
  const Json answer = inside.Run({{"action", "fail"}, {"rank", 1}});
  INFO(answer);
  CHECK(answer.at("fatal") == true);
  CHECK(inside.last_fatal);
  CHECK(Has(answer.at("error"), "rank 1: it broke; not sound afterwards: "));
  CHECK(Has(answer.at("error"), wrong.part));
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(answer.at("failure").at("detail") == "it broke");
  inside.fake->Release();
}

TEST_CASE("a rank's own error is the cause, not an earlier error of a communicator or another rank") {
  Inside inside(4);
  inside.fake->failure.culprit = kernels::RuntimeError::kElsewhere;
  const Json device =
      inside.Run({{"action", "a communicator fails, then the rank itself while others say so"}, {"rank", 1}});
  INFO(device);
  CHECK(device.at("failure").at("kind") == "cuda");
  CHECK(device.at("failure").at("rank") == 1);
  CHECK(device.at("error") == "rank 1: an illegal address");
  CHECK(Has(device.at("ranks").at(0).at("error"), "the runtime's last error"));
  inside.fake->failure.culprit = 3;
  const Json pointed = inside.Run({{"action", "pass while others point"}, {"rank", 3}});
  INFO(pointed);
  CHECK(pointed.at("status") == "error");
  CHECK(pointed.at("failure").at("rank") == 3);  // rank 3 reports nothing itself
  CHECK(pointed.at("error") == "the runtime's last error");
  const Json mismatch = inside.Run({{"action", "nothing, then a mismatch while others point"}, {"rank", 3}});
  INFO(mismatch);
  CHECK(mismatch.at("status") == "failed");  // the reason why rank 3 did not join the other ranks
  CHECK(mismatch.at("failure").at("rank") == 3);
  CHECK(Has(mismatch.at("error"), "7 is not 8"));
}

TEST_CASE("fields, not texts, name the rank that caused a failure") {
  Inside inside(4);
  inside.fake->failure.culprit = 3;
  const auto rank_of = [&](const std::string& action, const std::string& detail) {
    const Json answer = inside.Run({{"action", action}, {"rank", 1}});
    INFO(answer);
    CHECK(Has(answer.at("failure").at("detail"), detail));
    return answer.at("failure").at("rank").get<int>();
  };
  CHECK(rank_of("fail", "it broke") == 3);  // the status of the runtime's failure, with another text
  CHECK(rank_of("last error", "the runtime's last error") == 3);
  CHECK(rank_of("quote", "not this") == 1);  // the text of the runtime's failure, with another status
  CHECK(rank_of("fail by 2", "rank 2 broke it") == 2);
  CHECK(rank_of("fail by itself", "it broke") == 1);
  CHECK(rank_of("fail by nobody", "named 9 as a culprit") == 1);
  CHECK(rank_of("throw", "the case threw: thrown by a case") == 1);
  inside.fake->failure.status = CPPOOL_NCCL;
  CHECK(rank_of("fail", "it broke") == 1);
  inside.fake->failure = {sizeof(cppool_failure), CPPOOL_OK, CPPOOL_CULPRIT_SELF, ""};
  CHECK(rank_of("last error", "the case returned status 8 without a reason") == 1);
}

TEST_CASE("the backend is notified of ranks that finish, but not of ranks that fail") {
  Inside inside(4);
  const auto finished = [&] {
    std::vector<int> ranks = std::exchange(inside.fake->finished, {});
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  };
  inside.Run();
  CHECK(finished() == std::vector<int>{0, 1, 2, 3});
  inside.Run({{"action", "fail"}, {"rank", 1}});
  CHECK(finished() == std::vector<int>{0, 2, 3});
  inside.Run({{"action", "mismatch"}, {"rank", 1}});
  CHECK(finished() == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("no rank runs a case if one rank has no clean state") {
  auto fake = std::make_shared<FakeWorld>();
  fake->rank_that_cannot_begin = 1;
  Inside inside(4, kPatient, fake);
  const Json answer = inside.Run({{"action", "pass"}});
  INFO(answer);
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(Has(answer.at("failure").at("detail"), "no clean state"));
  CHECK(Has(answer.at("ranks").at(0).at("error"), "not started"));
  CHECK(answer.at("checks").empty());
}

TEST_CASE("work on a stream that fails after the case has returned is the rank's error") {
  auto fake = std::make_shared<FakeWorld>();
  fake->rank_that_cannot_end = 0;
  Inside inside(2, {}, fake);
  const Json answer = inside.Run({{"action", "pass"}});
  CHECK(answer.at("failure").at("rank") == 0);
  CHECK(Has(answer.at("error"), "the work failed"));
}

TEST_CASE("the watchdog's answer to a passed deadline has the stage of each rank") {
  Inside inside;
  std::promise<std::string> answered;
  daemon::Watchdog watchdog(
      0, -1, {[&] { answered.set_value(inside.dispatcher->TimeoutAnswer()); }, nullptr, nullptr});
  inside.Dispatch({}, &watchdog);
  // Rank 1 hangs, rank 0 has finished. A daemon would exit after the answer; this test releases the rank.
  auto handled = std::async(std::launch::async, [&] {
    return inside.Handle(
        {R"({"op": "run", "id": "t", "case": "fake", "deadline_ms": 50, "params": {"action": "hang", "rank": 1}})",
         false, 0});
  });
  auto future = answered.get_future();
  REQUIRE(future.wait_for(std::chrono::seconds(60)) == std::future_status::ready);
  const Json answer = Json::parse(future.get());
  INFO(answer);
  CHECK(answer.at("id") == "t");
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("fatal") == true);
  CHECK(answer.at("failure").at("kind") == "timeout");
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(answer.at("failure").at("stage") == "p2p step 2 of 4");
  CHECK(Has(answer.at("error"), "rank 0: finished"));
  CHECK(Has(answer.at("error"), "rank 1: p2p step 2 of 4, 1.50 s, in "));
  inside.fake->changed.notify_all();
  FakeBackend(inside.fake, 2).Abort("the test is over");
  CHECK_FALSE(handled.get());  // the watchdog has answered, not the dispatcher
}

TEST_CASE("if a device is lost between two runs, the next answer is fatal") {
  const std::string line = GENERATE(R"({"op": "stats", "id": 5})",
                                    R"({"op": "run", "id": 5, "case": "fake", "params": {"needs": 1}})",
                                    R"({"op": "validate", "id": 5, "case": "fake", "params": {"needs": 1}})");
  Inside inside;
  CHECK(inside.Run().at("status") == "passed");
  inside.world.threads().Wait();  // until the trim has ended
  inside.fake->device_lost = true;
  const Json answer = inside.Ask(line);
  INFO(answer);
  CHECK(answer.at("ok") == false);
  CHECK(answer.at("id") == 5);
  CHECK(answer.at("failure").at("kind") == "cuda");
  CHECK(Has(answer.at("error"), "the device is lost"));
  CHECK(answer.at("fatal") == true);
  CHECK(inside.last_fatal);
}

TEST_CASE("if a device is lost while memory is trimmed, the next run's answer is fatal") {
  Inside inside;
  inside.fake->device_lost = true;
  CHECK(inside.Run().at("status") == "passed");  // this run does not use the device
  const Json answer = inside.Run();
  INFO(answer);
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("kind") == "cuda");
  CHECK(Has(answer.at("error"), "the device is lost"));
  CHECK(inside.last_fatal);
}

TEST_CASE("a rank that does not return from an abort makes the answer fatal") {
  Inside inside(2, {std::chrono::milliseconds(20), std::chrono::milliseconds(50)});
  const Json answer = inside.Run({{"action", "fail while others are stuck"}, {"rank", 1}});
  INFO(answer);
  CHECK(answer.at("fatal") == true);
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(Has(answer.at("failure").at("detail"), "it broke"));
  CHECK(Has(answer.at("ranks").at(0).at("error"), "did not return"));
  inside.fake->Release();
}

// To read the results of a rank that has not returned would be a data race, and could crash the daemon
// instead of an answer.
TEST_CASE("the answer has no results of a rank that has not returned") {
  Inside inside(2, {std::chrono::milliseconds(20), std::chrono::milliseconds(50)});
  const Json answer =
      inside.Run({{"action", "work, a failed check and an error while others add work"}, {"rank", 0}});
  INFO(answer);
  CHECK(answer.at("status") == "failed");
  CHECK(answer.at("fatal") == true);
  CHECK(Has(answer.at("ranks").at(1).at("error"), "did not return"));
  CHECK(answer.at("tflops").empty());
  inside.fake->Release();
}

TEST_CASE("a world that one rank cannot join does not open, and the error names the rank and the cause") {
  auto fake = std::make_shared<FakeWorld>();
  fake->rank_that_cannot_open = 2;
  daemon::World world(std::make_unique<FakeBackend>(fake, 4));
  try {
    world.Open(std::chrono::steady_clock::now() + std::chrono::seconds(60));
    FAIL("the world opened");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find("rank 2 could not open: the device is gone") != std::string::npos);
  }
  CHECK(Called(*fake, "abort"));
}

TEST_CASE("NarrowDevices keeps as many visible devices as the world has ranks") {
  CHECK(daemon::NarrowDevices(nullptr, 3) == "0,1,2");
  CHECK(daemon::NarrowDevices("3,GPU-a,MIG-b,1", 2) == "3,GPU-a");
  CHECK(daemon::NarrowDevices("5", 4) == "5");
  CHECK(daemon::NarrowDevices("", 4).empty());
  CHECK(daemon::NarrowDevices("1,,2", 2) == "1,");
  CHECK(daemon::NarrowDevices("0,-1,1", 3) == "0,-1,1");
  CHECK(daemon::NarrowDevices("2,1,0,", 3) == "2,1,0");
  // CUDA sees no device in this list, and must not see one in the result.
  CHECK(daemon::NarrowDevices("0,1,0", 1) == "0,1,0");
  CHECK(daemon::NarrowDevices("GPU-a,GPU-b,GPU-b1", 2) == "GPU-a,GPU-b,GPU-b1");
}

}  // namespace cppool::test
