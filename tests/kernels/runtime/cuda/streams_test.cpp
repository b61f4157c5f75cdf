// Tests of streams, events and host functions: only events order two streams, and host functions run in
// stream order.
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {

using namespace std::chrono_literals;

TEST_CASE("An event orders two streams", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.RunCase([](cppool_runtime* rt) {
    const Stream side(rt);
    Event filled(rt);
    const Buffer source(rt, 1024, rt->stream);
    const Buffer seen(rt, 1024, rt->stream);
    Event allocated(rt);
    Check(rt, rt->fill(rt, source.get(), 1, 1024, rt->stream));
    allocated.Record(rt->stream);
    allocated.Wait(side.get());
    EnqueueDelay(side.get(), 50);
    Check(rt, rt->fill(rt, source.get(), 2, 1024, side.get()));
    filled.Record(side.get());
    filled.Wait(rt->stream);
    Check(rt, rt->copy(rt, seen.get(), source.get(), 1024, rt->stream));
    for (unsigned char byte : ToHost<unsigned char>(rt, seen))
      Expect(byte == 2, "the copy waited for the side stream");
  });
}

TEST_CASE(
    "Streams without an event do not wait for each other, and waiting for an unrecorded event has no effect",
    "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  // The second case reuses events and streams of the first.
  for (int repeat = 0; repeat < 2; ++repeat) {
    world.RunCase([](cppool_runtime* rt) {
      Gate gate;
      const Stream side(rt);
      {
        Event pending(rt);
        gate.Hold(rt, side.get());
        pending.Record(side.get());
      }
      // More events than the runtime keeps for reuse, so that a wrongly reused pending event would be among
      // them.
      std::vector<std::unique_ptr<Event>> fresh;
      for (int i = 0; i < 100; ++i) {
        fresh.push_back(std::make_unique<Event>(rt));
        fresh.back()->Wait(rt->stream);
      }
      EnqueueDelay(rt->stream, 1);
      bool done = false;
      for (int i = 0; i < 500 && !done; ++i) {
        std::this_thread::sleep_for(10ms);
        done = IsIdle(rt->stream);
      }
      Expect(done, "the main stream is not blocked");
      gate.Open();
    });
  }
}

TEST_CASE("A destroyed stream with pending work is not reused", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.RunCase([](cppool_runtime* rt) {
    Gate gate;
    cppool_stream busy = nullptr;
    {
      const Stream side(rt);
      busy = side.get();
      gate.Hold(rt, busy);
    }
    const Stream next(rt);
    const bool other = next.get() != busy;
    gate.Open();
    Expect(other, "a busy stream is not reused");
  });
  world.RunCase([](cppool_runtime* rt) {
    cppool_stream first = nullptr;
    {
      const Stream side(rt);
      first = side.get();
    }
    const Stream next(rt);
    Expect(next.get() == first, "an idle stream is reused");
  });
}

TEST_CASE("Host functions run in stream order, and stream_synchronize reports their exceptions", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.RunCase([](cppool_runtime* rt) {
    static std::vector<int> order;
    order.clear();
    static const int numbers[] = {0, 1, 2, 3};
    EnqueueDelay(rt->stream, 20);
    for (const int& number : numbers) {
      Check(rt, rt->enqueue(
                    rt, rt->stream, [](void* n) { order.push_back(*static_cast<int*>(n)); },
                    const_cast<int*>(&number)));
    }
    Expect(order.empty(), "enqueue returned before the work was done");
    Check(rt, rt->stream_synchronize(rt, rt->stream));
    Expect(order == std::vector<int>{0, 1, 2, 3}, "the functions ran in order");

    Check(rt, rt->enqueue(
                  rt, rt->stream, [](void*) { throw std::runtime_error("a test's error"); }, nullptr));
    Expect(rt->stream_synchronize(rt, rt->stream) == CPPOOL_INTERNAL, "the failure is reported");
    Expect(std::string(rt->last_error(rt)).find("a test's error") != std::string::npos, rt->last_error(rt));
    Expect(rt->stream_synchronize(rt, rt->stream) == CPPOOL_OK, "the failure is reported once");
  });
  // A failure that no call has reported fails its own case, not the next.
  world.Run([](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    Check(rt, rt->enqueue(
                  rt, rt->stream, [](void*) { throw 1; }, nullptr));
    bool thrown = false;
    try {
      rank.EndCase();
    } catch (const RuntimeError& error) {
      thrown = error.status() == CPPOOL_INTERNAL;
    }
    Expect(thrown, "EndCase reports it");
    rank.BeginCase();
    rank.EndCase();
    // A failure of a case without EndCase does not fail the next case, which waits for the work.
    rank.BeginCase();
    EnqueueDelay(rt->stream, 20);
    Check(rt, rt->enqueue(
                  rt, rt->stream, [](void*) { throw 1; }, nullptr));
    rank.BeginCase();
    Expect(ErrorOfEnd(rank) == "", "the next case does not fail");
  });
}

TEST_CASE("Pointers and streams that the case did not create are refused", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.RunCase([](cppool_runtime* rt) {
    int local = 0;
    Expect(rt->free(rt, &local, rt->stream) == CPPOOL_INTERNAL, "free refuses it");
    Expect(rt->free_host(rt, &local) == CPPOOL_INTERNAL, "free_host refuses it");
    Expect(rt->stream_destroy(rt, rt->stream) == CPPOOL_INTERNAL, "the main stream cannot be destroyed");
    Expect(rt->free(rt, nullptr, rt->stream) == CPPOOL_OK && rt->free_host(rt, nullptr) == CPPOOL_OK,
           "NULL is allowed");
  });
}

}  // namespace cppool::kernels::test
