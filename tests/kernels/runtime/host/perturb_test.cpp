// Tests of perturbed cases: marks delay their streams by times that depend on the seed, so that a missing
// wait changes the order of work.
#include <algorithm>
#include <set>

#include "kernels/runtime/common/mark_delays.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::Sync;
using cppool::test::World;
using namespace std::chrono_literals;

namespace {

std::vector<std::chrono::nanoseconds> Delays(MarkDelays delays, int count) {
  std::vector<std::chrono::nanoseconds> all;
  for (int i = 0; i < count; ++i) all.push_back(delays.Next());
  return all;
}

// Whether work on a second stream ran before work on a first stream that was enqueued earlier.
bool SecondWasFirst(RankRuntime& rank, std::uint64_t seed, bool wait) {
  rank.BeginCase();
  rank.Perturb(seed);
  cppool_runtime* rt = rank.seam();
  const Stream first(rt), second(rt);
  Event event(rt);
  std::atomic<bool> done{false};
  bool early = false;
  Check(rt, rt->mark(rt, first.get(), "first"));
  Enqueue(rt, first.get(), [&] { done = true; });
  event.Record(first.get());
  if (wait) event.Wait(second.get());
  Check(rt, rt->mark(rt, second.get(), "second"));
  Enqueue(rt, second.get(), [&] { early = !done; });
  Sync(rt, first.get());
  Sync(rt, second.get());
  rank.EndCase();
  return early;
}

}  // namespace

TEST_CASE(
    "mark delays: zero by default, reproducible for a seed and rank, different for other seeds and ranks") {
  CHECK(Delays(MarkDelays(), 100) == std::vector<std::chrono::nanoseconds>(100));
  const auto delays = Delays(MarkDelays(7, 3), 1000);
  CHECK(delays == Delays(MarkDelays(7, 3), 1000));
  CHECK(delays != Delays(MarkDelays(8, 3), 1000));
  CHECK(delays != Delays(MarkDelays(7, 2), 1000));
  const auto zeros = std::count(delays.begin(), delays.end(), 0ns);
  CHECK(zeros > 400);
  CHECK(zeros < 600);
  const auto longest = *std::max_element(delays.begin(), delays.end());
  CHECK(longest <= 200us);
  CHECK(longest > 190us);
  CHECK(std::set(delays.begin(), delays.end()).size() > 380);  // nearly all delays differ
}

TEST_CASE("host perturb: the seed changes the order of work without a wait, but not with a wait") {
  World world(1);
  // How often the second stream ran first: with seeds that delay the first stream, and with seeds that delay
  // the second.
  int early = 0, late = 0;
  constexpr int kTries = 40;
  int tried_early = 0, tried_late = 0;
  for (std::uint64_t seed = 0; tried_early < kTries || tried_late < kTries; ++seed) {
    const auto delays = Delays(MarkDelays(seed, 0), 2);
    if (delays[0] > delays[1] + 100us && tried_early++ < kTries)
      early += SecondWasFirst(world.rank(0), seed, false);
    if (delays[1] > delays[0] + 100us && tried_late++ < kTries)
      late += SecondWasFirst(world.rank(0), seed, false);
    if (seed < 2 * kTries) CHECK_FALSE(SecondWasFirst(world.rank(0), seed, true));
  }
  CAPTURE(early, late);
  CHECK(early > kTries / 4);
  CHECK(early > late + kTries / 8);  // on a busy machine a stream may also be late by chance
}

TEST_CASE(
    "host perturb: every mark of the case waits for the delay of its seed and rank, and not in the next "
    "case") {
  constexpr int kMarks = 8000;  // 0.4 s of delays
  World world(2);
  for (const int rank : {0, 1}) {
    std::chrono::nanoseconds sum{0};
    for (const auto delay : Delays(MarkDelays(5, rank), kMarks)) sum += delay;
    const auto run = [&](bool perturb) {
      RankRuntime& runtime = world.rank(rank);
      cppool_runtime* rt = runtime.seam();
      const auto start = std::chrono::steady_clock::now();
      runtime.BeginCase();
      if (perturb) runtime.Perturb(5);
      for (int i = 0; i < kMarks; ++i) Check(rt, rt->mark(rt, rt->stream, i % 2 ? nullptr : "step"));
      runtime.EndCase();
      return std::chrono::steady_clock::now() - start;
    };
    CHECK(run(true) >= sum);
    CHECK(run(false) < sum);  // marks alone take a hundredth of it
  }
}
