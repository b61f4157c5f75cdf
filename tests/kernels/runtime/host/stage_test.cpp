// Tests of marks: stage times, and the progress of a rank that is stuck.
#include <algorithm>
#include <map>

#include "kernels/runtime/common/stage_tally.h"
#include "kernels/wait_stages.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::Latch;
using cppool::test::Sync;
using cppool::test::World;

namespace {

void Sleep(cppool_runtime* rt, cppool_stream stream, int ms) {
  Enqueue(rt, stream, [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
}

double TimeOf(const StageTimes& times, const std::string& stage) {
  for (const auto& [name, ms] : times) {
    if (name == stage) return ms;
  }
  return -1;
}

std::vector<std::string> Names(const StageTimes& times) {
  std::vector<std::string> names;
  for (const auto& [name, ms] : times) names.push_back(name);
  return names;
}

}  // namespace

TEST_CASE("stage tally: times are sums in an iteration and medians over iterations, with parents") {
  StageTally tally;
  tally.Add(StageTally::kOnce, "inputs", true, 3);
  tally.Add(StageTally::kOnce, "inputs", true, 4);
  for (const auto& [iteration, ms] : std::map<int, double>{{0, 10}, {1, 2}, {2, 6}}) {
    tally.Add(iteration, "forward/attend 1", true, ms);
    tally.Add(iteration, "forward/merge", true, 1);
    tally.Add(iteration, "side/copy", false, ms);
  }
  tally.Add(0, "even", true, 1);
  tally.Add(1, "even", true, 2);
  const StageTimes expected{{"inputs", 7},        {"forward", 7},   {"forward/attend 1", 6},
                            {"forward/merge", 1}, {"side/copy", 6}, {"even", 1.5}};
  CHECK(tally.Times() == expected);
  // Whole stages of the main stream, in iterations.
  CHECK(tally.Samples() == StageSamples{{"forward", {11, 3, 7}}, {"even", {1, 2}}});
}

TEST_CASE("host marks: stages are in call order, and the warm-up is not counted") {
  World world(1);
  RankRuntime& rank = world.rank(0);
  cppool_runtime* rt = rank.seam();
  rank.BeginCase();
  Stream side(rt);
  Check(rt, rt->mark(rt, rt->stream, "inputs"));
  Sleep(rt, rt->stream, 5);
  Check(rt, rt->mark(rt, rt->stream, nullptr));
  // Four loops of one iteration; only the 2nd and 4th are counted.
  const int indices[] = {-2, 0, -1, 1};
  for (int i = 0; i < 4; ++i) {
    rank.BeginIteration(indices[i]);
    Check(rt, rt->mark(rt, rt->stream, indices[i] < 0 ? "only in warm-up" : "forward/attend 0"));
    Sleep(rt, rt->stream, 10);
    Check(rt, rt->mark(rt, rt->stream, "forward/attend 1"));
    Sleep(rt, rt->stream, indices[i] < 0 ? 200 : 2);
    Check(rt, rt->mark(rt, rt->stream, nullptr));
    Check(rt, rt->mark(rt, side.get(), "exchange/send"));
    Check(rt, rt->mark(rt, side.get(), nullptr));
    rank.EndIterations();
  }
  Check(rt, rt->mark(rt, rt->stream, "open"));  // ends with the case
  Sleep(rt, rt->stream, 5);
  Sync(rt);
  const StageTimes times = rank.EndCase();
  CHECK(Names(times) == std::vector<std::string>{"inputs", "forward", "forward/attend 0", "forward/attend 1",
                                                 "exchange/send", "open"});
  CHECK(TimeOf(times, "inputs") >= 5);
  CHECK(TimeOf(times, "forward/attend 0") >= 10);
  CHECK(TimeOf(times, "forward/attend 1") >= 2);
  CHECK(TimeOf(times, "forward/attend 1") < 200);  // the warm-up takes 200 ms
  CHECK(TimeOf(times, "forward") ==
        Catch::Approx(TimeOf(times, "forward/attend 0") + TimeOf(times, "forward/attend 1")));
  CHECK(TimeOf(times, "open") >= 5);
  rank.BeginCase();
  CHECK(rank.EndCase().empty());
}

TEST_CASE("host marks: the times of the iterations so far, between iterations") {
  World world(1);
  RankRuntime& rank = world.rank(0);
  cppool_runtime* rt = rank.seam();
  rank.BeginCase();
  Check(rt, rt->mark(rt, rt->stream, "inputs"));
  CHECK(rank.Samples().empty());
  for (int i = -1; i < 2; ++i) {
    rank.BeginIteration(i);
    Check(rt, rt->mark(rt, rt->stream, "forward/a"));
    Sleep(rt, rt->stream, i < 0 ? 100 : 5);
    Check(rt, rt->mark(rt, rt->stream, "forward/b"));  // open at the end of the iteration
    Sleep(rt, rt->stream, 2);
    const StageSamples samples = rank.Samples();
    REQUIRE(samples.size() == (i < 0 ? 0 : 1));
    if (i < 0) continue;
    CHECK(samples[0].first == "forward");
    REQUIRE(samples[0].second.size() == static_cast<std::size_t>(i + 1));
    CHECK(samples[0].second.back() >= 7);
    CHECK(samples[0].second.back() < 100);
  }
  rank.EndIterations();
  CHECK(Names(rank.EndCase()) == std::vector<std::string>{"inputs", "forward", "forward/a", "forward/b"});
}

TEST_CASE("wait stages: what the main stream waits for is a stage of its own") {
  World world(1);
  RankRuntime& rank = world.rank(0);
  rank.BeginCase();
  WaitStages waits(rank.seam());
  cppool_runtime* rt = waits.seam();
  {
    Stream side(rt);
    Event arrived(rt), used(rt);
    rank.BeginIteration(0);
    Sleep(rt, side.get(), 60);
    arrived.Record(side.get());
    arrived.Wait(rt->stream);  // outside of a stage
    Check(rt, rt->mark(rt, rt->stream, "forward/step"));
    Sleep(rt, rt->stream, 10);
    used.Record(rt->stream);
    used.Wait(side.get());  // another stream's wait
    Sleep(rt, side.get(), 40);
    arrived.Record(side.get());
    arrived.Wait(rt->stream);
    Sleep(rt, rt->stream, 10);
    Check(rt, rt->mark(rt, rt->stream, nullptr));
    Sync(rt);
    rank.EndIterations();
  }
  const StageTimes times = rank.EndCase();
  CHECK(Names(times) == std::vector<std::string>{"forward", "forward/step", "forward/step/waiting"});
  CHECK(TimeOf(times, "forward/step/waiting") >= 39);
  CHECK(TimeOf(times, "forward/step/waiting") < TimeOf(times, "forward") - 19);
  CHECK(TimeOf(times, "forward") >= 59);
  CHECK(TimeOf(times, "forward") == Catch::Approx(TimeOf(times, "forward/step")));
}

TEST_CASE("host progress: another thread can read it while the rank is stuck") {
  World world(1);
  RankRuntime& rank = world.rank(0);
  cppool_runtime* rt = rank.seam();
  rank.BeginCase();
  Stream side(rt);
  CHECK(rank.Progress().at(0).stage.empty());
  CHECK(rank.Progress().at(0).idle);
  Latch reached, latch;
  Check(rt, rt->mark(rt, rt->stream, "forward/attend 0"));
  Check(rt, rt->mark(rt, rt->stream, "forward/attend 1"));
  Enqueue(rt, rt->stream, [&] { reached.Open(), latch.Wait(); });
  Check(rt, rt->mark(rt, rt->stream, "forward/attend 2"));
  Check(rt, rt->mark(rt, rt->stream, nullptr));
  Check(rt, rt->mark(rt, side.get(), "send"));
  Check(rt, rt->mark(rt, side.get(), nullptr));
  Sync(rt, side.get());
  reached.Wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));

  std::vector<StreamProgress> progress;
  std::thread([&] {
    progress = rank.Progress();
  }).join();  // from another thread, while the stream is blocked
  REQUIRE(progress.size() == 2);
  CHECK(progress[0].stream == "main");
  CHECK(progress[0].stage == "forward/attend 1");
  CHECK(progress[0].seconds >= 0.02);
  CHECK_FALSE(progress[0].idle);
  CHECK(progress[1].stream == "stream 1");
  CHECK(progress[1].stage == "send");
  CHECK(progress[1].idle);
  latch.Open();
  Sync(rt);
  progress = rank.Progress();
  CHECK(progress[0].stage == "forward/attend 2");
  CHECK(progress[0].idle);
}

TEST_CASE("host progress: another thread reads it continuously while cases run") {
  World world(2);
  std::atomic<bool> stop{false};
  std::thread watchdog([&] {
    while (!stop) {
      for (int r = 0; r < 2; ++r) {
        for (const StreamProgress& progress : world.rank(r).Progress()) {
          if (progress.stream.empty() || progress.seconds < 0) stop = true;
        }
        (void)world.rank(r).Memory();
      }
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 30; ++i) {
    world.Case([&](cppool_runtime* rt) {
      Stream side(rt);
      for (int k = 0; k < 10; ++k) {
        Stage stage(rt, rt->stream, "step " + std::to_string(k + i));
        Stage other(rt, side.get(), "exchange");
        Buffer buffer(rt, 100, side.get());
      }
    });
  }
  CHECK_FALSE(stop);
  stop = true;
  watchdog.join();
}
