// Built with ThreadSanitizer always, and run by race_test.cpp: race_probe SCENARIO wait|no-wait
//
// Each scenario has two streams that use the same memory. Without the wait there is no order between them, however the threads happen to
// run: ThreadSanitizer has to say so. `Happened` makes the accesses truly one after the other without ordering them, which is the hardest
// case: a lock that both sides pass would be taken for order, and hide the missing wait.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "kernels/backend.h"
#include "kernels/runtime.h"

using namespace cppool::kernels;

namespace {

// Says that something has happened, to a thread that wants to know, with no order in it.
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
  // Apart from `happened`: ThreadSanitizer remembers four accesses to eight bytes, and those to it would drive the one
  // that matters out.
  alignas(64) int value = 0;

  Scene(cppool_runtime* runtime, bool with_wait)
      : rt(runtime), wait(with_wait), first(rt), second(rt), event(rt) {}
  void Order() {
    if (!wait) return;
    event.Record(first.get());
    event.Wait(second.get());
  }
  // The rank's thread feeds both streams, again and again.
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

// What one stream wrote, the other reads, after the rank's thread has gone on feeding both.
void Write(Scene& s) {
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  s.Feed();
  s.Order();
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
}

// A wait for another event than the one that matters.
void OtherEvent(Scene& s) {
  Event early(s.rt);
  early.Record(s.first.get());
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  s.Order();
  early.Wait(s.second.get());
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
}

// Memory is allocated in the order of the first stream.
void Allocated(Scene& s) {
  Buffer buffer(s.rt, 1024, s.first.get());
  Enqueue(s.rt, s.first.get(), [&] { s.happened.Say(); });
  s.happened.Await();
  s.Order();
  Check(s.rt, s.rt->fill(s.rt, buffer.get(), 0, 1024, s.second.get()));
  s.End();
}

// Memory is released in the order of the second stream, used by the first.
void Released(Scene& s) {
  Buffer buffer(s.rt, 1024, s.second.get());
  Check(s.rt, s.rt->stream_synchronize(s.rt, s.second.get()));
  Check(s.rt, s.rt->fill(s.rt, buffer.get(), 0, 1024, s.first.get()));
  Enqueue(s.rt, s.first.get(), [&] { s.happened.Say(); });
  s.happened.Await();
  s.Order();
  buffer.Reset();
}

// Both streams allocate and release other memory all the time.
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

// A stream that is destroyed is not waited for.
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

// A stream made after another one was destroyed has nothing to do with that one, even when its work is done.
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

// Each stream communicates with its own kind on a communicator of its own; that does not order the two.
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

// The ranks' threads meet to make a communicator; that does not order the streams.
void NewCommunicator(Scene& s) {
  Enqueue(s.rt, s.first.get(), [&] { s.value = 1, s.happened.Say(); });
  s.happened.Await();
  s.Order();
  (void)GetGroup(s.rt, GroupShape{1, 1});
  Enqueue(s.rt, s.second.get(), [&] { s.value += 1; });
  s.End();
}

// What a collective reads was written on another stream.
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

const std::map<std::string, void (*)(Scene&)> kScenarios{
    {"write", Write},          {"other-event", OtherEvent},      {"allocated", Allocated},
    {"released", Released},    {"allocator", Allocator},         {"destroyed", Destroyed},
    {"recreated", Recreated},  {"communicators", Communicators}, {"new-communicator", NewCommunicator},
    {"collective", Collective}};

}  // namespace

int main(int argc, char** argv) {
  const auto scenario = argc == 3 ? kScenarios.find(argv[1]) : kScenarios.end();
  if (scenario == kScenarios.end()) return 2;
  constexpr int kRanks = 4;
  auto backend = CreateHostBackend(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      auto rank = backend->OpenRank(r);
      rank->BeginCase();
      {
        Scene scene(rank->seam(), std::strcmp(argv[2], "wait") == 0);
        scenario->second(scene);
        scene.End();
      }
      rank->EndCase();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::puts("done");
  return 0;
}
