// What becomes of failures on ranks: the cause comes first, nobody is left waiting, and the world goes on where it can.
#include <algorithm>
#include <chrono>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "tests/daemon/fake_case.h"

namespace cppool::test {
namespace {

bool Has(const Json& text, const std::string& part) {
  return text.get<std::string>().find(part) != std::string::npos;
}

bool Called(FakeWorld& world, const std::string& call) {
  const std::lock_guard lock(world.mutex);
  return std::find(world.calls.begin(), world.calls.end(), call) != world.calls.end();
}

}  // namespace

TEST_CASE("a failed check is failed, whatever the rank returns, and costs nothing") {
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
    for (const Json& check : answer.at("checks"))  // only where it was compared with a plain computation
      CHECK(check.value("ratio", 0.0) == (check.at("against") == "oracle" ? 0.5 : 0.0));
    CHECK_FALSE(inside.last_fatal);
  }
  CHECK(inside.Run({{"action", "nan"}}).at("status") == "failed");
  const Json mismatch = inside.Run({{"action", "mismatch"}});
  CHECK(mismatch.at("status") == "failed");
  CHECK(Has(mismatch.at("error"), "7 is not 8"));
  // Ranks that are still at work are not aborted for it, however long they take.
  CHECK(inside.Run({{"action", "mismatch while others are busy"}}).at("ranks").at(1).at("ok") == true);
  CHECK_FALSE(Called(*inside.fake, "abort"));
  CHECK(inside.Run().at("status") == "passed");
}

TEST_CASE("a rank's error is the answer: kind, rank, stage and text") {
  Inside inside(4);
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
  const Json skipped = inside.Run({{"action", "cannot"}});
  CHECK(skipped.at("status") == "skipped");
  CHECK(skipped.at("failure").at("kind") == "unsupported");
  CHECK_FALSE(Called(*inside.fake, "abort"));
  CHECK(inside.Run().at("status") == "passed");
}

TEST_CASE("ranks that wait for a failed one are released, and its error comes first") {
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

TEST_CASE("a world that does not recover is fatal, and the answer says why") {
  Inside inside;
  inside.fake->recovers = false;
  const Json answer = inside.Run({{"action", "fail while others wait"}, {"rank", 1}});
  CHECK(answer.at("fatal") == true);
  CHECK(inside.last_fatal);
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(answer.at("error") == "rank 1: it broke; not sound afterwards: it cannot start anew");
  CHECK(answer.at("failure").at("detail") == "it broke");
}

// The daemon has probed its world (which is then forgotten), and runs the next case.
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

TEST_CASE("after any error the daemon probes its world, and stays warm while that is sound") {
  Inside inside(4);
  for (const char* action : {"cuda", "memory", "throw", "fail", "fail while others wait"}) {
    const Json answer = inside.Run({{"action", action}, {"rank", 2}});
    INFO(answer);
    CHECK(answer.at("status") == "error");
    CHECK_FALSE(answer.contains("fatal"));
    CheckProbedAndWarm(inside);
  }
  // A failed check costs no probe.
  for (const char* action : {"check fails", "mismatch", "cannot", "pass"})
    inside.Run({{"action", action}, {"rank", 2}});
  CHECK_FALSE(Called(*inside.fake, "recover"));
  CHECK(inside.fake->sums == 0);
}

TEST_CASE(
    "a group of calls that a case leaves open is its error when it has no other, and is recovered from") {
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

TEST_CASE("a case that cannot run here, and whose end fails, is probed for") {
  Inside inside(4);
  inside.fake->unsound_rank = 2;
  inside.fake->unsound = FakeWorld::Unsound::kCommunicator;
  const Json answer = inside.Run({{"action", "cannot"}, {"rank", 2}});
  INFO(answer);
  CHECK(answer.at("fatal") == true);
  CHECK(Has(answer.at("error"), "not sound afterwards: rank 2: a communicator failed"));
}

TEST_CASE("a world that is not sound after an error is fatal, and the answer says what is wrong") {
  using Unsound = FakeWorld::Unsound;
  struct Wrong {
    Unsound what;
    std::string said;
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
  CHECK_FALSE(
      inside.Run({{"action", "fail"}, {"rank", 1}}).contains("fatal"));  // the stale message is of this probe
  inside.fake->unsound = wrong.what;
  const Json answer = inside.Run({{"action", "fail"}, {"rank", 1}});
  INFO(answer);
  CHECK(answer.at("fatal") == true);
  CHECK(inside.last_fatal);
  CHECK(Has(answer.at("error"), "rank 1: it broke; not sound afterwards: "));
  CHECK(Has(answer.at("error"), wrong.said));
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(answer.at("failure").at("detail") == "it broke");
  inside.fake->Release();
}

TEST_CASE("a rank's own error is the cause, not what a communicator or another rank says of it earlier") {
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
  CHECK(pointed.at("failure").at("rank") == 3);  // it has said nothing itself
  CHECK(pointed.at("error") == "the runtime's last error");
  const Json mismatch = inside.Run({{"action", "nothing, then a mismatch while others point"}, {"rank", 3}});
  INFO(mismatch);
  CHECK(mismatch.at("status") == "failed");  // why it left the others alone
  CHECK(mismatch.at("failure").at("rank") == 3);
  CHECK(Has(mismatch.at("error"), "7 is not 8"));
}

TEST_CASE("who caused a case's failure is told by fields, whatever its text says") {
  Inside inside(4);
  inside.fake->failure.culprit = 3;
  const auto rank_of = [&](const std::string& action, const std::string& detail) {
    const Json answer = inside.Run({{"action", action}, {"rank", 1}});
    INFO(answer);
    CHECK(Has(answer.at("failure").at("detail"), detail));
    return answer.at("failure").at("rank").get<int>();
  };
  CHECK(rank_of("fail", "it broke") == 3);  // the status of the runtime's failure, in other words
  CHECK(rank_of("last error", "the runtime's last error") == 3);
  CHECK(rank_of("quote", "not this") == 1);  // its words, with another status
  CHECK(rank_of("fail by 2", "rank 2 broke it") == 2);
  CHECK(rank_of("fail by itself", "it broke") == 1);
  CHECK(rank_of("fail by nobody", "named 9 as a culprit") == 1);
  CHECK(rank_of("throw", "the case threw: thrown by a case") == 1);
  inside.fake->failure.status = CPPOOL_NCCL;
  CHECK(rank_of("fail", "it broke") == 1);
  inside.fake->failure = {sizeof(cppool_failure), CPPOOL_OK, CPPOOL_CULPRIT_SELF, ""};
  CHECK(rank_of("last error", "the case returned status 8 without a reason") == 1);
}

TEST_CASE("ranks that end in order are said to have finished, those that fail are not") {
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

TEST_CASE("no rank runs a case when one has no clean state") {
  auto fake = std::make_shared<FakeWorld>();
  fake->rank_that_cannot_begin = 1;
  Inside inside(4, {std::chrono::milliseconds(2000), std::chrono::milliseconds(2000)}, fake);
  const Json answer = inside.Run({{"action", "pass"}});
  INFO(answer);
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(Has(answer.at("failure").at("detail"), "no clean state"));
  CHECK(Has(answer.at("ranks").at(0).at("error"), "not started"));
  CHECK(answer.at("checks").empty());
}

TEST_CASE("work that fails after the function has returned is the rank's error") {
  auto fake = std::make_shared<FakeWorld>();
  fake->rank_that_cannot_end = 0;
  Inside inside(2, {}, fake);
  const Json answer = inside.Run({{"action", "pass"}});
  CHECK(answer.at("failure").at("rank") == 0);
  CHECK(Has(answer.at("error"), "the work failed"));
}

TEST_CASE("a passed deadline is answered by the watchdog with where each rank is") {
  Inside inside;
  std::promise<std::string> answered;
  daemon::Watchdog watchdog(
      0, -1, {[&] { answered.set_value(inside.dispatcher->TimeoutAnswer()); }, nullptr, nullptr});
  daemon::Dispatcher::Options options;
  options.sentinel = "";
  inside.dispatcher = std::make_unique<daemon::Dispatcher>(inside.world, inside.registry, &watchdog, options);
  // Rank 1 hangs, rank 0 is done. In a daemon the process ends now; here the rank is released.
  auto handled = std::async(std::launch::async, [&] {
    return inside.dispatcher->Handle(
        {R"({"op": "run", "id": "t", "case": "fake", "deadline_ms": 50, "params": {"action": "hang", "rank": 1}})",
         false, 0});
  });
  auto future = answered.get_future();
  REQUIRE(future.wait_for(std::chrono::seconds(30)) == std::future_status::ready);
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
  CHECK_FALSE(handled.get());  // the dispatcher knows that the answer is not its own
}

TEST_CASE("a device that is lost between two runs retires the daemon with the next answer") {
  const std::string line = GENERATE(R"({"op": "stats", "id": 5})",
                                    R"({"op": "run", "id": 5, "case": "fake", "params": {"needs": 1}})",
                                    R"({"op": "validate", "id": 5, "case": "fake", "params": {"needs": 1}})");
  Inside inside;
  CHECK(inside.Run().at("status") == "passed");
  inside.world.threads().Wait();  // for the trim
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

TEST_CASE("a device that is lost while memory is given back retires the daemon with the next run") {
  Inside inside;
  inside.fake->device_lost = true;
  CHECK(inside.Run().at("status") == "passed");  // it asks the device for nothing
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

// What the daemon reads of a rank that has not returned would be a race, and in the end a crash instead of the answer.
TEST_CASE("nothing is counted of a rank that goes on reporting while the answer is made") {
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

TEST_CASE("a world that one rank cannot join does not open, and says which and why") {
  auto fake = std::make_shared<FakeWorld>();
  fake->rank_that_cannot_open = 2;
  daemon::World world(std::make_unique<FakeBackend>(fake, 4));
  try {
    world.Open(std::chrono::steady_clock::now() + std::chrono::seconds(30));
    FAIL("it opened");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find("rank 2 could not open: the device is gone") != std::string::npos);
  }
  CHECK(Called(*fake, "abort"));
}

TEST_CASE("the devices that a world of some size sees") {
  CHECK(daemon::NarrowDevices(nullptr, 3) == "0,1,2");
  CHECK(daemon::NarrowDevices("3,GPU-a,MIG-b,1", 2) == "3,GPU-a");
  CHECK(daemon::NarrowDevices("5", 4) == "5");
  CHECK(daemon::NarrowDevices("", 4).empty());
  CHECK(daemon::NarrowDevices("1,,2", 2) == "1,");
  CHECK(daemon::NarrowDevices("0,-1,1", 3) == "0,-1,1");
  CHECK(daemon::NarrowDevices("2,1,0,", 3) == "2,1,0");
  CHECK(daemon::NarrowDevices("0,1,0", 1) == "0,1,0");  // CUDA sees none, and must not be made to see one
  CHECK(daemon::NarrowDevices("GPU-a,GPU-b,GPU-b1", 2) == "GPU-a,GPU-b,GPU-b1");
}

}  // namespace cppool::test
