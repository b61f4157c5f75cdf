// Tests of the progress of a stuck stream on the host runtime: the call and the ranks that it waits for.
#include <fstream>
#include <string>
#include <thread>

#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::Latch;
using cppool::test::Sync;
using cppool::test::World;

namespace {

// Polls the progress of a rank's stream until `holds` returns true.
template <typename Holds>
StreamProgress Eventually(World& world, int rank, std::size_t stream, Holds holds) {
  StreamProgress progress;
  for (int i = 0; i < 10000; ++i) {
    const auto all = world.rank(rank).Progress();
    if (stream < all.size()) progress = all[stream];
    if (holds(progress)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return progress;
}

StreamProgress OnceWaiting(World& world, int rank, std::size_t stream) {
  return Eventually(world, rank, stream, [](const auto& p) { return !p.doing.empty(); });
}

}  // namespace

TEST_CASE(
    "host progress: a stream reports the rank whose message it waits for, and the stream that it waits for") {
  World world(4);
  Latch seen;
  std::thread reader([&] {
    const StreamProgress side = OnceWaiting(world, 3, 1);
    CHECK(side.stage == "step 2 of 4");
    CHECK(side.doing == "waiting for recv from rank 1");
    CHECK(side.awaits == std::vector<int>{1});
    std::string name;
    std::getline(std::ifstream("/proc/self/task/" + std::to_string(side.thread) + "/comm"), name);
    CHECK(name == "rank 3 stream 1");
    CHECK_FALSE(side.idle);
    const StreamProgress main = Eventually(world, 3, 0, [](const auto& p) { return !p.behind.empty(); });
    CHECK(main.behind == "stream 1");
    CHECK(main.awaits.empty());
    const StreamProgress sender = OnceWaiting(world, 0, 0);
    CHECK(sender.doing == "waiting for send to rank 2");
    CHECK(sender.awaits == std::vector<int>{2});
    CHECK_FALSE(sender.idle);  // although it has no stage
    seen.Open();
  });
  world.Case([&](cppool_runtime* rt) {
    const Group strides = GetGroup(rt, CPPOOL_STRIDE);  // progress names ranks of the world, not of the group
    Buffer data(rt, 64, rt->stream);
    const int peer = 1 - strides.rank;
    if (rt->rank == 3) {
      Stream side(rt);
      Event allocated(rt), arrived(rt);
      allocated.Record(rt->stream);
      allocated.Wait(side.get());
      {
        const Stage stage(rt, side.get(), "step 2 of 4");
        GroupedCalls calls(rt);  // two equal waits are reported once
        for (int i = 0; i < 2; ++i) Check(rt, rt->recv(rt, data.get(), 32, peer, strides.comm, side.get()));
        calls.End();
      }
      arrived.Record(side.get());
      arrived.Wait(rt->stream);
      Sync(rt);
    } else if (rt->rank == 0) {
      Check(rt, rt->send(rt, data.get(), 64, peer, strides.comm, rt->stream));
    } else {
      seen.Wait();
      for (int i = 0; i < 2 && rt->rank == 1; ++i)
        Check(rt, rt->send(rt, data.get(), 32, peer, strides.comm, rt->stream));
      if (rt->rank == 2) Check(rt, rt->recv(rt, data.get(), 64, peer, strides.comm, rt->stream));
    }
    Sync(rt);
    const StreamProgress main = world.rank(rt->rank).Progress()[0];
    // Throws, because Catch2's macros may not be used on the threads of ranks.
    if (!main.doing.empty() || !main.behind.empty() || !main.idle)
      throw std::runtime_error("the main stream is not idle: '" + main.doing + "' '" + main.behind + "'");
  });
  reader.join();
}

TEST_CASE("host progress: a stage without work left is reported as such") {
  World world(1);
  world.Case([&](cppool_runtime* rt) {
    const Stage stage(rt, rt->stream, "step 1 of 1");
    Sync(rt);
    const auto progress = world.rank(0).Progress();
    CHECK(progress[0].doing == "with no work left");
    CHECK_FALSE(progress[0].idle);
  });
}
