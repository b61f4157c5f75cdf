// Tests of worlds that cannot start, and of worlds that are aborted.
#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/backend.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {

using namespace std::chrono_literals;

TEST_CASE("With more ranks than devices NCCL is an error, and the automatic transport is peer", "[gpu]") {
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

TEST_CASE("An abort ends a collective that waits for a missing rank, nccl", "[gpu]") {
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
    Expect(rt->group_start(rt) == CPPOOL_NCCL, "calls after the abort fail");
    bool idle = false;
    for (int i = 0; i < 1000 && !idle; ++i) {
      std::this_thread::sleep_for(10ms);
      idle = IsIdle(rt->stream);
    }
    Expect(idle, "the work on the device ends");
  });
  watchdog.join();
  CHECK_THROWS_AS(world.backend().Recover(1s), RuntimeError);
  CHECK_THROWS_AS(world.Run([](RankRuntime& rank) { rank.BeginCase(); }), RuntimeError);
}

TEST_CASE("An abort ends every call that waits for a missing rank, and the world recovers, peer", "[gpu]") {
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
    Expect(rt->group_start(rt) == CPPOOL_INTERNAL, "calls after the abort fail");
  });
  watchdog.join();
  CHECK_THROWS_AS(world.Run([](RankRuntime& rank) { rank.BeginCase(); }), RuntimeError);
  world.backend().Recover(30s);
  world.RunCase([](cppool_runtime* rt) {
    const Buffer sum = ToDevice(rt, std::vector<int>{rt->rank + 1});
    Check(rt, rt->all_reduce(rt, sum.get(), sum.get(), 1, CPPOOL_INT32, CPPOOL_SUM,
                             GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
    Expect(ToHost<int>(rt, sum) == std::vector<int>{3}, "the next case works");
  });
}

TEST_CASE("Recover fails after an abort while work on the device does not end, peer", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(2, Transport::kPeer);
  Gate gate;
  world.Run([&](RankRuntime& rank) {
    rank.BeginCase();
    if (rank.seam()->rank == 1) gate.Hold(rank.seam(), rank.seam()->stream);
  });
  world.backend().Abort("rank 1 is stuck");
  CHECK_THROWS_AS(world.backend().Recover(300ms), RuntimeError);
  gate.Open();
  world.backend().Recover(30s);
  world.RunCase([](cppool_runtime*) {});
}

TEST_CASE("Out of device memory is an error of the rank itself, and the world stays usable", "[gpu]") {
  const Transport transport = GENERATE(Transport::kNccl, Transport::kPeer);
  if (!HaveDevices(transport == Transport::kNccl ? 2 : 1)) return;
  CudaWorld world(2, transport);
  world.Run([](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    void* data = nullptr;
    if (rt->rank == 0) {
      Expect(rt->alloc(rt, std::size_t{1} << 50, rt->stream, &data) == CPPOOL_OUT_OF_MEMORY, "out of memory");
      Expect(rt->last_failure(rt)->culprit == CPPOOL_CULPRIT_SELF, "the culprit is the rank itself");
    }
    rank.EndCase();
  });
  world.backend().Recover(30s);
  world.RunCase([&](cppool_runtime* rt) { ProbeGroups(world.rank(rt->rank), 1); });
}

TEST_CASE("A group of calls that is left open is discarded by peer, and is an error of Recover with NCCL",
          "[gpu]") {
  const Transport transport = GENERATE(Transport::kNccl, Transport::kPeer);
  if (!HaveDevices(transport == Transport::kNccl ? 2 : 1)) return;
  CudaWorld world(2, transport);
  world.Run([](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    Expect(!rank.InGroup(), "the rank is in no group of calls at first");
    {
      GroupedCalls ended(rt);
      Expect(rank.InGroup(), "the rank is in a group of calls");
      ended.End();
    }
    Expect(!rank.InGroup(), "the group of calls has ended");
    if (rt->rank == 0) {
      void* data = nullptr;
      Check(rt, rt->alloc(rt, 1024, rt->stream, &data));
      Check(rt, rt->group_start(rt));
      Check(rt, rt->send(rt, data, 1024, 1, GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
      Expect(rank.InGroup(), "the rank is in a group of calls that does not end");
    }
    rank.EndCase();
  });
  if (transport == Transport::kNccl) {
    CHECK_THROWS_WITH(world.backend().Recover(30s),
                      "rank 0 is in a group of calls, which NCCL cannot forget");
    world.Run([](RankRuntime& rank) {
      if (rank.seam()->rank == 1) return;
      try {
        rank.BeginCase();
      } catch (const RuntimeError&) {
        return;
      }
      Expect(false, "the next case does not begin");
    });
    return;
  }
  world.backend().Recover(30s);
  world.RunCase([&](cppool_runtime* rt) { ProbeGroups(world.rank(rt->rank), 1); });
}

TEST_CASE("Peer: ranks that wait for a finished rank get an error at once that names it", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(4, Transport::kPeer);
  world.Run([&](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    if (rt->rank == 1) {
      rank.EndCase();
      world.backend().Finished(1);
      return;
    }
    void* data = nullptr;
    Check(rt, rt->alloc(rt, 1024, rt->stream, &data));
    Expect(rt->all_reduce(rt, data, data, 256, CPPOOL_FLOAT32, CPPOOL_SUM, GetGroup(rt, CPPOOL_WORLD).comm,
                          rt->stream) == CPPOOL_INTERNAL,
           "the call ends");
    Expect(rt->last_failure(rt)->culprit == 1, "rank 1 is the culprit");
    const std::string error = rt->last_error(rt);
    Expect(error.find("rank 1 has finished the case") != std::string::npos, error);
    Expect(ErrorOfEnd(rank) == error, "EndCase reports the same error");
  });
  world.backend().Recover(30s);
  world.RunCase([&](cppool_runtime* rt) { ProbeGroups(world.rank(rt->rank), 1); });
}

}  // namespace cppool::kernels::test
