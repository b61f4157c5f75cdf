// Tests of mark: stage times, and the progress of streams that are stuck.
#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "kernels/runtime/common/mark_delays.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {
namespace {

using namespace std::chrono_literals;

std::vector<std::string> Names(const StageTimes& times) {
  std::vector<std::string> names;
  for (const auto& [name, ms] : times) names.push_back(name);
  return names;
}

}  // namespace

TEST_CASE("Stage times are device times of stages and their parents, without the warm-up", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  StageTimes times;
  world.Run([&](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    const Stream side(rt);
    {
      const Stage stage(rt, rt->stream, "inputs");
      EnqueueDelay(rt->stream, 5);
    }
    EnqueueDelay(rt->stream, 300);  // belongs to no stage
    const double delays[] = {400, 10, 30, 20};
    for (int i = 0; i < 4; ++i) {
      rank.BeginIteration(i - 1);  // the first is warm-up
      if (i == 0) Check(rt, rt->mark(rt, rt->stream, "only in the warm-up"));
      Check(rt, rt->mark(rt, rt->stream, "forward/attend 0"));
      EnqueueDelay(rt->stream, delays[i]);
      Check(rt, rt->mark(rt, rt->stream, "forward/attend 1"));
      EnqueueDelay(rt->stream, 5);
      Check(rt, rt->mark(rt, rt->stream, nullptr));
      Check(rt, rt->mark(rt, side.get(), "transfer/kv"));
      EnqueueDelay(side.get(), 5);
      Check(rt, rt->mark(rt, side.get(), nullptr));
    }
    rank.EndIterations();
    Check(rt, rt->mark(rt, rt->stream, "open"));
    EnqueueDelay(rt->stream, 5);  // ends with the case
    times = rank.EndCase();
    rank.BeginCase();
    Expect(rank.EndCase().empty(), "the next case has no times of this one");
  });
  CHECK(Names(times) == std::vector<std::string>{"inputs", "forward", "forward/attend 0", "forward/attend 1",
                                                 "transfer/kv", "open"});
  std::map<std::string, double> ms(times.begin(), times.end());
  // Lower bounds: the delays, less a tick of the device's clock. The upper bounds exclude the warm-up and the
  // unmarked time.
  CHECK(ms["inputs"] >= 3.9);
  CHECK(ms["inputs"] < 300);
  CHECK(ms["forward/attend 0"] >= 18.9);
  CHECK(ms["forward/attend 0"] < 400);
  CHECK(ms["forward/attend 1"] >= 3.9);
  CHECK(ms["forward"] >= ms["forward/attend 0"] + 3.8);
  CHECK(ms["transfer/kv"] >= 3.9);
  CHECK(ms["open"] >= 3.9);
}

TEST_CASE("Samples: the times of the iterations so far, between iterations", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.Run([](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    const int delays[] = {100, 5, 10};  // the first is the warm-up's
    for (int i = 0; i < 3; ++i) {
      rank.BeginIteration(i - 1);
      Check(rt, rt->mark(rt, rt->stream, "forward/a"));
      EnqueueDelay(rt->stream, delays[i]);
      Check(rt, rt->mark(rt, rt->stream, "forward/b"));  // open at the end of the iteration
      EnqueueDelay(rt->stream, 5);
      const StageSamples samples = rank.Samples();
      Expect(samples.size() == (i == 0 ? 0 : 1), "one stage, once there was a counted iteration");
      if (i == 0) continue;
      const auto& [stage, times] = samples.front();
      Expect(stage == "forward" && times.size() == static_cast<std::size_t>(i), "a time for each iteration");
      Expect(times.back() >= delays[i] + 3.8 && times.back() < 90, "both parts, without the warm-up");
    }
    rank.EndIterations();
    rank.EndCase();
  });
}

TEST_CASE("Perturb: every mark delays its stream by a time drawn from the seed, and not in the next case",
          "[gpu]") {
  if (!HaveDevices(1)) return;
  constexpr int kMarks = 2000;  // 0.1 s of delays
  CudaWorld world(1);
  double sum_ms = 0;
  MarkDelays delays(5, 0);
  for (int i = 0; i < kMarks; ++i) sum_ms += std::chrono::duration<double, std::milli>(delays.Next()).count();
  for (const bool perturbed : {true, false}) {
    StageTimes times;
    world.Run([&](RankRuntime& rank) {
      cppool_runtime* rt = rank.seam();
      rank.BeginCase();
      if (perturbed) rank.Perturb(5);
      for (int i = 0; i < kMarks; ++i) Check(rt, rt->mark(rt, rt->stream, "step"));
      times = rank.EndCase();
    });
    CAPTURE(sum_ms, times.at(0).second);
    // Each delay may be short by a tick of the device's clock. Marks without delays take a tenth of the sum.
    CHECK((times.at(0).second > 0.95 * sum_ms) == perturbed);
  }
}

TEST_CASE("Progress reports the stage of each stream while the device is stuck, without waiting", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  Gate gate;
  std::atomic<bool> enqueued{false};
  std::vector<StreamProgress> stuck;
  std::vector<StreamProgress> later;
  std::jthread watchdog([&](const std::stop_token& ended) {
    while (!enqueued && !ended.stop_requested()) std::this_thread::yield();
    // The device reaches the marks before the host function asynchronously: wait for that, then read the
    // progress twice.
    for (int i = 0; i < 1000; ++i) {
      stuck = world.rank(0).Progress();
      if (stuck.size() == 2 && stuck[0].stage == "forward/wait" && stuck[1].stage == "transfer") break;
      std::this_thread::sleep_for(10ms);
    }
    std::this_thread::sleep_for(50ms);
    later = world.rank(0).Progress();
    gate.Open();
  });
  world.Run([&](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    const Stream side(rt);
    Check(rt, rt->mark(rt, rt->stream, "forward/first"));
    Check(rt, rt->mark(rt, rt->stream, "forward/wait"));
    gate.Hold(rt, rt->stream);
    Check(rt, rt->mark(rt, rt->stream, "forward/after"));
    Check(rt, rt->mark(rt, rt->stream, nullptr));
    Check(rt, rt->mark(rt, side.get(), "transfer"));
    Check(rt, rt->mark(rt, side.get(), nullptr));
    enqueued = true;
    Check(rt, rt->stream_synchronize(rt, rt->stream));
    const std::vector<StreamProgress> done = rank.Progress();
    Expect(done.at(0).idle && done.at(0).stage == "forward/after", "the main stream is done");
    rank.EndCase();
    Expect(rank.Progress().size() == 1 && rank.Progress()[0].stage.empty(),
           "the progress is empty after the case");
  });
  watchdog.join();
  REQUIRE(stuck.size() == 2);
  CHECK(stuck[0].stream == "main");
  CHECK(stuck[0].stage == "forward/wait");
  CHECK_FALSE(stuck[0].idle);
  CHECK(stuck[1].stream == "stream 1");
  CHECK(stuck[1].stage == "transfer");
  REQUIRE(later.size() == 2);
  CHECK(later[0].stage == "forward/wait");
  CHECK_FALSE(later[0].idle);
  CHECK(later[1].stage == "transfer");
  CHECK(later[1].idle);
  CHECK(later[0].seconds >= stuck[0].seconds + 0.05);
}

TEST_CASE("Progress reports the messages of a stage and the stream it waits for", "[gpu]") {
  const auto transport = GENERATE(Transport::kNccl, Transport::kPeer);
  if (!HaveDevices(2)) return;
  CudaWorld world(2, transport);
  Gate gate;
  std::vector<StreamProgress> stuck;
  std::jthread watchdog([&](const std::stop_token& ended) {
    for (int i = 0; i < 1000 && !ended.stop_requested(); ++i) {
      stuck = world.rank(0).Progress();
      if (stuck.size() == 2 && stuck[0].stage == "use" && stuck[1].stage == "fetch") break;
      std::this_thread::sleep_for(10ms);
    }
    gate.Open();
  });
  world.Run([&](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    {
      const Group all = GetGroup(rt, CPPOOL_WORLD);
      const Stream side(rt);
      Event arrived(rt);
      Buffer data(rt, 64, side.get());
      // Rank 1's part waits for blocked work on its stream.
      if (rt->rank == 1) gate.Hold(rt, side.get());
      {
        const Stage stage(rt, side.get(), "fetch");
        GroupedCalls calls(rt);
        Check(rt, rt->send(rt, data.get(), 32, 1 - rt->rank, all.comm, side.get()));
        Check(rt, rt->recv(rt, static_cast<char*>(data.get()) + 32, 32, 1 - rt->rank, all.comm, side.get()));
        calls.End();
        arrived.Record(side.get());
      }
      Check(rt, rt->mark(rt, rt->stream, "use"));
      arrived.Wait(rt->stream);
      Check(rt, rt->mark(rt, rt->stream, nullptr));
      Check(rt, rt->stream_synchronize(rt, rt->stream));
      const std::vector<StreamProgress> done = rank.Progress();
      Expect(done.at(0).idle && done.at(0).behind.empty(), "the main stream no longer waits");
    }
    rank.EndCase();
  });
  watchdog.join();
  REQUIRE(stuck.size() == 2);
  CHECK(stuck[0].behind == "stream 1");
  CHECK(stuck[0].doing.empty());
  CHECK(stuck[1].doing == "with send to rank 1, recv from rank 1");
  CHECK_FALSE(stuck[1].idle);
}

TEST_CASE("Stage times are right with thousands of marks in several cases", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  for (int round = 0; round < 3; ++round) {
    const StageTimes times = world.RunCase([](cppool_runtime* rt) {
      for (int i = 0; i < 3000; ++i) {
        Check(rt, rt->mark(rt, rt->stream, i % 2 ? "odd" : "even"));
        if (i % 100 != 0) continue;
        Check(rt, rt->stream_synchronize(rt, rt->stream));
        EnqueueDelay(rt->stream, 2);  // in a stage that began before the synchronization
      }
      EnqueueDelay(rt->stream, 10);  // in the last stage
    });
    CHECK(Names(times) == std::vector<std::string>{"even", "odd"});
    CHECK(times.at(0).second >= 58);
    CHECK(times.at(1).second >= 8.9);
  }
}

}  // namespace cppool::kernels::test
