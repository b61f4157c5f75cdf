// A world that cannot start, and one that is aborted.
#include <atomic>
#include <chrono>
#include <thread>

#include "catch.h"
#include "cuda_world.h"

namespace cppool::kernels::test {

using namespace std::chrono_literals;

TEST_CASE("More ranks than devices: an error that says so", "[gpu]") {
  if (!HaveDevices(1)) return;
  const int devices = CountCudaDevices();
  try {
    CreateCudaBackend(devices + 1);
    FAIL("a rank without a device");
  } catch (const RuntimeError& error) {
    CHECK(error.status() == CPPOOL_CUDA);
    CHECK(std::string(error.what()).find(std::to_string(devices) + " are visible") != std::string::npos);
  }
  CHECK_THROWS_AS(CreateCudaBackend(0), RuntimeError);
}

TEST_CASE("An abort ends a collective that waits for a rank which does not come", "[gpu]") {
  if (!HaveDevices(2)) return;
  CudaWorld world(2);
  std::atomic<bool> waiting{false};
  std::jthread watchdog([&](const std::stop_token& ended) {
    while (!waiting && !ended.stop_requested()) std::this_thread::yield();
    std::this_thread::sleep_for(50ms);
    world.backend().Abort("rank 1 stayed away");
    world.backend().Abort("too late to be the reason");
  });
  world.Run([&](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    if (rt->rank == 1) return;
    void* data = nullptr;
    Check(rt, rt->alloc(rt, 1024, rt->stream, &data));
    Check(rt, rt->all_reduce(rt, data, data, 256, CPPOOL_FLOAT32, CPPOOL_SUM, GetGroup(rt, CPPOOL_WORLD).comm,
                             rt->stream));
    waiting = true;
    Expect(rt->stream_synchronize(rt, rt->stream) == CPPOOL_NCCL, "the wait ends");
    Expect(std::string(rt->last_error(rt)).find("rank 1 stayed away") != std::string::npos,
           rt->last_error(rt));
    Expect(rt->group_start(rt) == CPPOOL_NCCL, "and nothing begins afterwards");
    bool idle = false;
    for (int i = 0; i < 1000 && !idle; ++i) {
      std::this_thread::sleep_for(10ms);
      idle = IsIdle(rt->stream);
    }
    Expect(idle, "the device's part ends, too");
  });
  watchdog.join();
  CHECK_FALSE(world.backend().Recover());
  CHECK_THROWS_AS(world.Run([](RankRuntime& rank) { rank.BeginCase(); }), RuntimeError);
}

}  // namespace cppool::kernels::test
