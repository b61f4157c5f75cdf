// A world that cannot start, and one that is aborted.
#include <atomic>
#include <chrono>
#include <thread>

#include "catch.h"
#include "cuda_world.h"

namespace cppool::kernels::test {

using namespace std::chrono_literals;

TEST_CASE("More ranks than devices: an error of NCCL's that says so, and the reason for the transport peer",
          "[gpu]") {
  if (!HaveDevices(1)) return;
  const int devices = CountCudaDevices();
  try {
    CreateCudaBackend(devices + 1, Transport::kNccl);
    FAIL("a rank without a device");
  } catch (const RuntimeError& error) {
    CHECK(error.status() == CPPOOL_CUDA);
    CHECK(std::string(error.what())
              .find(std::to_string(devices) + (devices == 1 ? " is" : " are") + " visible") !=
          std::string::npos);
    CHECK(std::string(error.what()).find("peer") != std::string::npos);
  }
  CHECK(CreateCudaBackend(devices + 1, Transport::kAuto)->transport() == "peer");
  CHECK(CreateCudaBackend(devices, Transport::kAuto)->transport() == "nccl");
  CHECK(CreateCudaBackend(devices, Transport::kPeer)->transport() == "peer");
  CHECK_THROWS_AS(CreateCudaBackend(0), RuntimeError);
}

TEST_CASE("An abort ends a collective that waits for a rank which does not come, nccl", "[gpu]") {
  if (!HaveDevices(2)) return;
  CudaWorld world(2, Transport::kNccl);
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

TEST_CASE("An abort ends every call that waits for a rank which does not come, and the world goes on, peer",
          "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(2, Transport::kPeer);
  const int call = GENERATE(0, 1, 2);
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
    const cppool_comm comm = GetGroup(rt, CPPOOL_WORLD).comm;
    void* data = nullptr;
    Check(rt, rt->alloc(rt, 1024, rt->stream, &data));
    waiting = true;
    const cppool_status status =
        call == 0   ? rt->all_reduce(rt, data, data, 256, CPPOOL_FLOAT32, CPPOOL_SUM, comm, rt->stream)
        : call == 1 ? rt->send(rt, data, 256, 1, comm, rt->stream)
                    : rt->recv(rt, data, 256, 1, comm, rt->stream);
    Expect(status == CPPOOL_INTERNAL, "the call ends");
    Expect(std::string(rt->last_error(rt)).find("rank 1 stayed away") != std::string::npos,
           rt->last_error(rt));
    Expect(rt->group_start(rt) == CPPOOL_INTERNAL, "and nothing begins afterwards");
  });
  watchdog.join();
  CHECK_THROWS_AS(world.Run([](RankRuntime& rank) { rank.BeginCase(); }), RuntimeError);
  CHECK(world.backend().Recover());
  world.RunCase([](cppool_runtime* rt) {
    const Buffer sum = ToDevice(rt, std::vector<int>{rt->rank + 1});
    Check(rt, rt->all_reduce(rt, sum.get(), sum.get(), 1, CPPOOL_INT32, CPPOOL_SUM,
                             GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
    Expect(ToHost<int>(rt, sum) == std::vector<int>{3}, "the next case is sound");
  });
}

TEST_CASE("After an abort the world does not go on while work on the device does not end, peer", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(2, Transport::kPeer);
  Gate gate;
  world.Run([&](RankRuntime& rank) {
    rank.BeginCase();
    if (rank.seam()->rank == 1) gate.Hold(rank.seam(), rank.seam()->stream);
  });
  world.backend().Abort("rank 1 is stuck");
  CHECK_FALSE(world.backend().Recover());
  gate.Open();
  CHECK(world.backend().Recover());
  world.RunCase([](cppool_runtime*) {});
}

}  // namespace cppool::kernels::test
