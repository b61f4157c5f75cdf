// Streams, events and host functions: only events order two streams, and host functions run in stream order.
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
    "Streams without an event do not wait for each other, and an event that was never recorded is no wait",
    "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  // The second time with events and streams that were used before.
  for (int repeat = 0; repeat < 2; ++repeat) {
    world.RunCase([](cppool_runtime* rt) {
      Gate gate;
      const Stream side(rt);
      {
        Event pending(rt);
        gate.Hold(rt, side.get());
        pending.Record(side.get());
      }
      // More than are kept, so that the pending one would be among them.
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
      Expect(done, "the main stream is not held up");
      gate.Open();
    });
  }
}

TEST_CASE("A stream that was given back with work pending is not handed out again", "[gpu]") {
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
    Expect(other, "another stream while the first has work");
  });
  world.RunCase([](cppool_runtime* rt) {
    cppool_stream first = nullptr;
    {
      const Stream side(rt);
      first = side.get();
    }
    const Stream next(rt);
    Expect(next.get() == first, "an idle stream is used again");
  });
}

TEST_CASE("Host functions run in stream order, and their exceptions come back from the stream", "[gpu]") {
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
    Expect(order == std::vector<int>{0, 1, 2, 3}, "in order");

    Check(rt, rt->enqueue(
                  rt, rt->stream, [](void*) { throw std::runtime_error("spilt milk"); }, nullptr));
    Expect(rt->stream_synchronize(rt, rt->stream) == CPPOOL_INTERNAL, "the failure is reported");
    Expect(std::string(rt->last_error(rt)).find("spilt milk") != std::string::npos, rt->last_error(rt));
    Expect(rt->stream_synchronize(rt, rt->stream) == CPPOOL_OK, "once");
  });
  // A failure that no call reported ends its own case, not the next.
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
    // Nor does one of a case without an end, which the next one waits for.
    rank.BeginCase();
    EnqueueDelay(rt->stream, 20);
    Check(rt, rt->enqueue(
                  rt, rt->stream, [](void*) { throw 1; }, nullptr));
    rank.BeginCase();
    Expect(ErrorOfEnd(rank) == "", "the case before had a host function that failed");
  });
}

TEST_CASE("What the case interface does not own is refused", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.RunCase([](cppool_runtime* rt) {
    int local = 0;
    Expect(rt->free(rt, &local, rt->stream) == CPPOOL_INTERNAL, "free");
    Expect(rt->free_host(rt, &local) == CPPOOL_INTERNAL, "free_host");
    Expect(rt->stream_destroy(rt, rt->stream) == CPPOOL_INTERNAL, "the main stream is the runtime's");
    Expect(rt->free(rt, nullptr, rt->stream) == CPPOOL_OK && rt->free_host(rt, nullptr) == CPPOOL_OK,
           "NULL is allowed");
  });
}

}  // namespace cppool::kernels::test
