// Always built with ThreadSanitizer, and run by race_test.cpp: race_probe SCENARIO wait|no-wait
//
// In each scenario two streams use the same memory. Without the wait there is no happens-before relation
// between them, and ThreadSanitizer must report a race for every schedule of the threads. `Happened` makes
// one access follow the other in time without a happens-before relation. This is the hardest case, because a
// lock that both threads take would add such a relation and hide the missing wait.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "kernels/backend.h"
#include "kernels/ring_transfers.h"
#include "kernels/runtime.h"
#include "kernels/runtime/host/rank.h"

using namespace cppool::kernels;

namespace {

// Signals another thread without a happens-before relation (relaxed atomics).
class Happened {
 public:
  void Say() { happened_.store(true, std::memory_order_relaxed); }
  void Await() const {
    while (!happened_.load(std::memory_order_relaxed)) std::this_thread::yield();
  }

 private:
  std::atomic<bool> happened_{false};
};

struct Scene {
  cppool_runtime* rt;
  bool wait;
  Stream first, second;
  Event event;
  Happened happened;
  // On another cache line than `happened`: ThreadSanitizer remembers four accesses for each eight bytes, and
  // accesses to `happened` would evict the one that matters.
  alignas(64) int value = 0;

  Scene(cppool_runtime* runtime, bool with_wait)
      : rt(runtime), wait(with_wait), first(rt), second(rt), event(rt) {}
  void Order() {
    if (!wait) return;
    event.Record(first.get());
    event.Wait(second.get());
  }
  // The rank's thread enqueues work on both streams many times.
  void Feed() {
    for (int i = 0; i < 100; ++i) {
      Enqueue(rt, first.get(), [] {});
      Enqueue(rt, second.get(), [] {});
    }
  }
  void End() {
    Check(rt, rt->stream_synchronize(rt, first.get()));
    Check(rt, rt->stream_synchronize(rt, second.get()));
  }
};

// One stream writes and the other reads, after the rank's thread has enqueued more work on both.
void Write(Scene& s) {
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  s.Feed();
  s.Order();
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
}

// Without the wait, the second stream waits only for an event that was recorded too early.
void OtherEvent(Scene& s) {
  Event early(s.rt);
  early.Record(s.first.get());
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  s.Order();
  early.Wait(s.second.get());
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
}

// Memory is allocated in the order of the first stream and used on the second.
void Allocated(Scene& s) {
  Buffer buffer(s.rt, 1024, s.first.get());
  Enqueue(s.rt, s.first.get(), [&] { s.happened.Say(); });
  s.happened.Await();
  s.Order();
  Check(s.rt, s.rt->fill(s.rt, buffer.get(), 0, 1024, s.second.get()));
  s.End();
}

// Memory is released in the order of the second stream and used on the first.
void Released(Scene& s) {
  Buffer buffer(s.rt, 1024, s.second.get());
  Check(s.rt, s.rt->stream_synchronize(s.rt, s.second.get()));
  Check(s.rt, s.rt->fill(s.rt, buffer.get(), 0, 1024, s.first.get()));
  Enqueue(s.rt, s.first.get(), [&] { s.happened.Say(); });
  s.happened.Await();
  s.Order();
  buffer.Reset();
}

// Both streams also allocate and release other memory.
void Allocator(Scene& s) {
  const auto churn = [&] {
    for (int i = 0; i < 20; ++i) Buffer(s.rt, 5000, s.first.get()), Buffer(s.rt, 5000, s.second.get());
  };
  churn();
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  churn();
  s.Order();
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
}

// Destroying a stream does not wait for its work.
void Destroyed(Scene& s) {
  cppool_stream stream = nullptr;
  Check(s.rt, s.rt->stream_create(s.rt, &stream));
  Enqueue(s.rt, stream, [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  if (s.wait) {
    s.event.Record(stream);
    s.event.Wait(s.second.get());
  }
  Check(s.rt, s.rt->stream_destroy(s.rt, stream));
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
}

// A stream that is created after another one was destroyed is not ordered after the work of that one.
void Recreated(Scene& s) {
  {
    const Stream stream(s.rt);
    Enqueue(s.rt, stream.get(), [&] { s.value = 1, s.happened.Say(); });
    s.happened.Await();
    if (s.wait) s.event.Record(stream.get());
  }
  const Stream stream(s.rt);
  if (s.wait) s.event.Wait(stream.get());
  Enqueue(s.rt, stream.get(), [&] { s.value += 1; });
  Check(s.rt, s.rt->stream_synchronize(s.rt, stream.get()));
}

// Each of the two streams uses its own communicator, which does not order one after the other.
void Communicators(Scene& s) {
  const Group pair = GetGroup(s.rt, CPPOOL_PAIR), stride = GetGroup(s.rt, CPPOOL_STRIDE);
  std::int32_t a = 1, b = 1;
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1; });
  Check(s.rt, s.rt->all_reduce(s.rt, &a, &a, 1, CPPOOL_INT32, CPPOOL_SUM, pair.comm, s.first.get()));
  Enqueue(s.rt, s.first.get(), [&] { s.happened.Say(); });
  s.happened.Await();
  s.Order();
  Check(s.rt, s.rt->all_reduce(s.rt, &b, &b, 1, CPPOOL_INT32, CPPOOL_SUM, stride.comm, s.second.get()));
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
  s.End();
}

// The threads of the ranks meet to make a communicator, which does not order the streams.
void NewCommunicator(Scene& s) {
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  s.Order();
  (void)GetGroup(s.rt, GroupShape{1, 1});
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
  s.End();
}

// A collective reads memory that another stream has written.
void Collective(Scene& s) {
  const Group group = GetGroup(s.rt, CPPOOL_WORLD);
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  s.Order();
  std::int32_t sum = 0;
  Check(s.rt,
        s.rt->all_reduce(s.rt, &s.value, &sum, 1, CPPOOL_INT32, CPPOOL_SUM, group.comm, s.second.get()));
  s.End();
}

constexpr int kRanks = 4;
Happened pushed[kRanks];  // by rank: its piece is with the next rank

// Pushes `value` to the next rank, where it lands in `slot`, and says so.
Arrivals Push(Scene& s, int& slot) {
  const Group world = GetGroup(s.rt, CPPOOL_WORLD);
  RingTransfers transfers;
  transfers.into[0] = reinterpret_cast<std::byte*>(&slot);
  RingPiece piece;
  piece.to = (world.rank + 1) % world.size;
  piece.parts[0] = {reinterpret_cast<const std::byte*>(&s.value), 0, 0, sizeof s.value, sizeof s.value, 1};
  piece.stage = "pushed";
  transfers.leaving = {piece};
  transfers.arriving = {{(world.rank + world.size - 1) % world.size, "value"}};
  const Arrivals arrivals = RuntimeOf(s.rt).StartRing(std::move(transfers), world.comm, s.first.get());
  Enqueue(s.rt, s.first.get(), [rank = world.rank] { pushed[rank].Say(); });
  return arrivals;
}

// A kernel reads a piece that another rank has pushed.
void RingPieceRead(Scene& s) {
  alignas(64) int slot = 0;
  const Arrivals arrivals = Push(s, slot);
  Enqueue(s.rt, s.second.get(), [&s, &slot, arrivals, from = (s.rt->rank + kRanks - 1) % kRanks] {
    if (s.wait) arrivals.await(0);
    pushed[from].Await();
    slot += 1;
  });
  s.End();
}

// A piece is pushed to memory that its receiver has used on another stream.
void RingMemoryUsed(Scene& s) {
  alignas(64) int slot = 0;
  Enqueue(s.rt, s.second.get(), [&] { slot = 1, s.happened.Say(); });
  s.happened.Await();
  if (s.wait) {
    s.event.Record(s.second.get());
    s.event.Wait(s.first.get());
  }
  const Arrivals arrivals = Push(s, slot);
  Enqueue(s.rt, s.second.get(), [arrivals] { arrivals.await(0); });
  s.End();
}

const std::map<std::string, void (*)(Scene&)> kScenarios{
    {"write", Write},           {"other-event", OtherEvent},      {"allocated", Allocated},
    {"released", Released},     {"allocator", Allocator},         {"destroyed", Destroyed},
    {"recreated", Recreated},   {"communicators", Communicators}, {"new-communicator", NewCommunicator},
    {"collective", Collective}, {"ring-piece", RingPieceRead},    {"ring-memory", RingMemoryUsed}};

}  // namespace

int main(int argc, char** argv) {
  const auto scenario = argc == 3 ? kScenarios.find(argv[1]) : kScenarios.end();
  if (scenario == kScenarios.end()) return 2;
  auto backend = CreateHostBackend(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      auto rank = backend->OpenRank(r);
      rank->BeginCase();
      rank->BeginTrace(1000);  // recording orders nothing, and is ordered by what orders the streams' work
      {
        Scene scene(rank->seam(), std::strcmp(argv[2], "wait") == 0);
        scenario->second(scene);
        scene.End();
      }
      rank->EndCase();
      rank->TakeTrace();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::puts("done");
  return 0;
}
