// Tests of streams, events, memory and failures of one rank.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <utility>

#include "kernels/runtime/host/memory.h"
#include "kernels/runtime/host/rank.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::Latch;
using cppool::test::Sync;
using cppool::test::World;

namespace {

struct OneRank {
  World world{1};
  RankRuntime& rank = world.rank(0);
  cppool_runtime* rt = rank.seam();
  OneRank() { rank.BeginCase(); }
};

// The number of threads of this process.
std::ptrdiff_t Threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                       std::filesystem::directory_iterator());
}

}  // namespace

TEST_CASE("host stream: work runs in order, on another thread than the one that enqueues it") {
  OneRank one;
  Latch latch;
  std::vector<int> seen;
  std::thread::id where;
  Enqueue(one.rt, one.rt->stream, [&] { latch.Wait(), where = std::this_thread::get_id(); });
  for (int i = 0; i < 1000; ++i) Enqueue(one.rt, one.rt->stream, [&seen, i] { seen.push_back(i); });
  latch.Open();  // the calls above have returned before any of the work runs
  Sync(one.rt);
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  CHECK(seen == expected);
  CHECK(where != std::this_thread::get_id());
}

TEST_CASE("host stream: a cancelled rank waits for its work, and makes no call until the next case") {
  OneRank one;
  bool ran = false, made = false;
  Enqueue(one.rt, one.rt->stream, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ran = true;
  });
  one.rank.Cancel("nobody wants it");
  CHECK(ran);
  const auto work = [](void* done) { *static_cast<bool*>(done) = true; };
  CHECK(one.rt->enqueue(one.rt, one.rt->stream, work, &made) == CPPOOL_CANCELLED);
  CHECK(one.rt->stream_synchronize(one.rt, one.rt->stream) == CPPOOL_CANCELLED);
  CHECK(one.rt->last_failure(one.rt)->status == CPPOOL_CANCELLED);
  CHECK(std::string(one.rt->last_error(one.rt)) == "nobody wants it");
  one.rank.EndCase();
  CHECK_FALSE(made);
  one.rank.BeginCase();
  CHECK(one.rt->last_failure(one.rt)->status == CPPOOL_OK);
  CHECK(one.rt->enqueue(one.rt, one.rt->stream, work, &made) == CPPOOL_OK);
  Sync(one.rt);
  CHECK(made);
}

TEST_CASE("host stream: iterations are begun at most two ahead of their work, where they take long") {
  OneRank one;
  // Whether it waits for the work that `release` lets end.
  const auto keep_up = [&](const auto& release) {
    std::atomic<bool> kept_up{false};
    std::thread waits([&] {
      one.rank.KeepUp();
      kept_up = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK_FALSE(kept_up);
    release();
    waits.join();
  };
  std::atomic<int> done{0}, may_end{0};
  for (int i = 0; i < 8; ++i) {
    if (i < 2)
      one.rank.KeepUp();
    else
      keep_up([&] { ++may_end; });
    CHECK(i - done < 2);
    one.rank.BeginIteration(i);
    Enqueue(one.rt, one.rt->stream, [&, i] {
      while (may_end <= i) std::this_thread::yield();
      ++done;
    });
  }
  may_end = 8;
  one.rank.EndCase();
  one.rank.BeginCase();  // how long an iteration takes is not known any more
  Latch latch;
  for (int i = 0; i < 2; ++i) {
    one.rank.KeepUp();
    one.rank.BeginIteration(i);
    Enqueue(one.rt, one.rt->stream, [&] { latch.Wait(); });
  }
  keep_up([&] { latch.Open(); });
}

TEST_CASE("host stream: copy and fill run in stream order") {
  OneRank one;
  Buffer a(one.rt, 1000, one.rt->stream), b(one.rt, 1000, one.rt->stream);
  std::vector<unsigned char> host(1000);
  Check(one.rt, one.rt->fill(one.rt, a.get(), 0x5a, 1000, one.rt->stream));
  Check(one.rt, one.rt->copy(one.rt, b.get(), a.get(), 1000, one.rt->stream));
  Check(one.rt, one.rt->fill(one.rt, a.get(), 0, 1000, one.rt->stream));
  Check(one.rt, one.rt->copy(one.rt, host.data(), b.get(), 1000, one.rt->stream));
  Sync(one.rt);
  CHECK(host == std::vector<unsigned char>(1000, 0x5a));
}

TEST_CASE("host stream: a copy or fill of bytes at NULL is an error of the call, and nothing of zero bytes") {
  OneRank one;
  cppool_runtime* rt = one.rt;
  Buffer a(rt, 8, rt->stream);
  CHECK(rt->copy(rt, nullptr, nullptr, 8, rt->stream) == CPPOOL_INTERNAL);
  CHECK(std::string(rt->last_error(rt)) == "copy of 8 bytes to NULL");
  CHECK(rt->copy(rt, a.get(), nullptr, 8, rt->stream) == CPPOOL_INTERNAL);
  CHECK(std::string(rt->last_error(rt)) == "copy of 8 bytes from NULL");
  CHECK(rt->copy(rt, nullptr, a.get(), 8, rt->stream) == CPPOOL_INTERNAL);
  CHECK(rt->fill(rt, nullptr, 0, 8, rt->stream) == CPPOOL_INTERNAL);
  CHECK(rt->copy(rt, nullptr, nullptr, 0, rt->stream) == CPPOOL_OK);
  CHECK(rt->fill(rt, nullptr, 0, 0, rt->stream) == CPPOOL_OK);
  Sync(rt);
}

TEST_CASE("host stream: a new stream does not wait for pending work of a destroyed one") {
  OneRank one;
  std::atomic<bool> open{false}, in_time{false};
  {
    const Stream first(one.rt);
    Enqueue(one.rt, first.get(), [&] {  // would reach the limit if the work of `second` ran after this
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!open && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
      in_time = open.load();
    });
  }
  const Stream second(one.rt);
  Enqueue(one.rt, second.get(), [&] { open = true; });
  one.rank.EndCase();
  CHECK(in_time);
}

TEST_CASE(
    "host stream: a case that makes and destroys many streams has few threads, and new streams are idle "
    "without a stage") {
  OneRank one;
  const auto before = Threads();
  std::ptrdiff_t most = 0;
  bool idle = true;
  for (int i = 0; i < 1000; ++i) {
    const Stream stream(one.rt);
    idle = idle && one.rank.Progress()[1].idle && one.rank.Progress()[1].stage.empty();
    Check(one.rt, one.rt->mark(one.rt, stream.get(), "never ended"));
    Sync(one.rt, stream.get());
    most = std::max(most, Threads() - before);
  }
  CHECK(idle);
  CHECK(most < 20);
  one.rank.EndCase();
  one.rank.BeginCase();
  one.rank.Trim();
  CHECK(Threads() - before < 20);
}

TEST_CASE("host event: a wait refers to the latest record at the time of the call") {
  OneRank one;
  Stream side(one.rt), other(one.rt);
  Event event(one.rt);
  Latch first, second;
  std::vector<int> order;
  std::mutex order_mutex;
  const auto note = [&](int what) {
    std::lock_guard lock(order_mutex);
    order.push_back(what);
  };
  Enqueue(one.rt, side.get(), [&] { first.Wait(), note(1); });
  event.Record(side.get());
  event.Wait(one.rt->stream);  // waits for note(1), even if the event is recorded again
  Enqueue(one.rt, one.rt->stream, [&] { note(2), second.Open(); });
  Enqueue(one.rt, side.get(), [&] { second.Wait(), note(3); });
  event.Record(side.get());
  event.Wait(other.get());
  Enqueue(one.rt, other.get(), [&] { note(4); });
  first.Open();
  for (cppool_stream stream : {side.get(), other.get(), one.rt->stream}) Sync(one.rt, stream);
  // If the main stream waited for the later record, there would be a deadlock, because its work opens
  // `second`.
  CHECK(order == std::vector<int>{1, 2, 3, 4});
}

TEST_CASE("host event: records of one event on two streams are independent") {
  OneRank one;
  Stream a(one.rt), b(one.rt);
  Event event(one.rt);
  Latch latch;
  std::atomic<bool> done{false};
  Enqueue(one.rt, a.get(), [&] { latch.Wait(), done = true; });
  event.Record(a.get());
  event.Wait(one.rt->stream);
  event.Record(b.get());  // done long before the first
  Sync(one.rt, b.get());
  bool seen = false;
  Enqueue(one.rt, one.rt->stream, [&] { seen = done; });
  latch.Open();
  Sync(one.rt);
  CHECK(seen);
}

TEST_CASE(
    "host event: waiting for an unrecorded event has no effect, and a wait for a destroyed event still "
    "holds") {
  OneRank one;
  Stream side(one.rt);
  Latch latch;
  std::atomic<bool> done{false};
  {
    Event never(one.rt), gone(one.rt);
    never.Wait(one.rt->stream);
    Sync(one.rt);
    Enqueue(one.rt, side.get(), [&] { latch.Wait(), done = true; });
    gone.Record(side.get());
    gone.Wait(one.rt->stream);
  }
  bool seen = false;
  Enqueue(one.rt, one.rt->stream, [&] { seen = done; });
  latch.Open();
  Sync(one.rt);
  CHECK(seen);
}

TEST_CASE("host memory: allocations are aligned, filled with NaN, counted, and released in stream order") {
  OneRank one;
  const std::size_t before = one.rank.Memory().held_bytes;
  Latch latch;
  Buffer buffer(one.rt, 4 * 333, one.rt->stream);
  CHECK(reinterpret_cast<std::uintptr_t>(buffer.get()) % 256 == 0);
  int not_nan = 0;
  Enqueue(one.rt, one.rt->stream, [&] {
    for (int i = 0; i < 333; ++i) not_nan += !std::isnan(buffer.get<float>()[i]);
  });
  Sync(one.rt);
  CHECK(not_nan == 0);
  CHECK(one.rank.Memory().held_bytes == before + 4 * 333);
  CHECK(one.rank.Memory().live_allocations == 1);
  float* raw = buffer.get<float>();
  float kept = 0;
  Enqueue(one.rt, one.rt->stream, [&latch, &kept, raw] { latch.Wait(), raw[0] = 7, kept = raw[0]; });
  buffer.Reset();  // enqueued after the work that uses it
  CHECK(one.rank.Memory().live_allocations == 0);
  CHECK(one.rank.Memory().held_bytes == before + 4 * 333);
  latch.Open();
  Sync(one.rt);
  CHECK(kept == 7);
  CHECK(one.rank.Memory().held_bytes == before);
}

TEST_CASE("host memory: an abort ends the filling of memory, which would keep a rank for seconds") {
  OneRank one;
  constexpr std::size_t kBytes = std::size_t{256}
                                 << 20;  // more than malloc takes from memory that was used before
  Latch latch;
  Enqueue(one.rt, one.rt->stream, [&latch] { latch.Wait(); });
  Buffer buffer(one.rt, kBytes, one.rt->stream);
  one.world.backend().Abort("a test");
  latch.Open();
  Sync(one.rt);
  CHECK(buffer.get<unsigned char>()[kBytes - 1] == 0);
  buffer.Reset();
  Sync(one.rt);
  one.world.backend().Recover(std::chrono::seconds(30));
  Buffer next(one.rt, kBytes, one.rt->stream);
  Sync(one.rt);
  CHECK(next.get<unsigned char>()[kBytes - 1] == 0xFF);
}

TEST_CASE("host memory: an allocation of 0 bytes is NULL, and a double free is an error") {
  OneRank one;
  void* ptr = &one;
  Check(one.rt, one.rt->alloc(one.rt, 0, one.rt->stream, &ptr));
  CHECK(ptr == nullptr);
  CHECK(one.rt->free(one.rt, nullptr, one.rt->stream) == CPPOOL_OK);
  Check(one.rt, one.rt->alloc(one.rt, 10, one.rt->stream, &ptr));
  CHECK(one.rt->free(one.rt, ptr, one.rt->stream) == CPPOOL_OK);
  CHECK(one.rt->free(one.rt, ptr, one.rt->stream) == CPPOOL_INTERNAL);
  void* host = nullptr;
  Check(one.rt, one.rt->alloc_host(one.rt, 100, &host));
  std::memset(host, 0, 100);  // usable at once
  CHECK(one.rt->free_host(one.rt, host) == CPPOOL_OK);
  CHECK(one.rt->free_host(one.rt, host) == CPPOOL_INTERNAL);
}

TEST_CASE("host memory: an allocation larger than the free memory is refused without trying it") {
  OneRank one;
  const std::size_t total = one.world.backend().Devices()[0].total_bytes;
  CHECK(one.rank.Memory().free_bytes > 0);
  CHECK(one.rank.Memory().free_bytes < total);
  for (const std::size_t bytes : {total, 4 * total, SIZE_MAX, SIZE_MAX - 100, SIZE_MAX / 2 + 1}) {
    void* ptr = &one;
    CHECK(one.rt->alloc(one.rt, bytes, one.rt->stream, &ptr) == CPPOOL_OUT_OF_MEMORY);
    CHECK(ptr == nullptr);
    CHECK_THAT(one.rt->last_error(one.rt), Catch::Matchers::ContainsSubstring(std::to_string(bytes)));
    CHECK(one.rt->alloc_host(one.rt, bytes, &ptr) == CPPOOL_OUT_OF_MEMORY);
  }
  CHECK(one.rank.Memory().held_bytes == 0);
  Buffer buffer(one.rt, 1 << 20, one.rt->stream);  // a smaller allocation works afterwards
  CHECK(buffer.get() != nullptr);
}

TEST_CASE("host memory: reservations that are not touched yet reduce the free memory") {
  host::MemoryGate gate;
  const std::size_t step = gate.Free() / 3;  // the test only reserves memory, without allocating it
  int given = 0;
  while (given < 10 && gate.Reserve(step)) ++given;
  CHECK(given >= 2);
  CHECK(given <= 4);
  CHECK_FALSE(gate.Reserve(step));
  CHECK(gate.Free() < step);
  for (int i = 0; i < given; ++i) gate.Touched(step);
  CHECK(gate.Reserve(step));
}

TEST_CASE("host memory: memory that is touched while a reservation asks the system counts once") {
  std::size_t available = 100 << 20;
  host::MemoryGate* touches = nullptr;
  host::MemoryGate gate([&] {
    if (auto* const now = std::exchange(touches, nullptr)) available -= 60 << 20, now->Touched(60 << 20);
    return available;
  });
  REQUIRE(gate.Reserve(60 << 20));
  touches = &gate;
  CHECK(gate.Reserve(30 << 20));  // 40 MiB are left, of which a sixteenth stays
  CHECK_FALSE(gate.Reserve(30 << 20));
}

TEST_CASE("host memory: within a limit, memory counts once while it is filled") {
  const auto resident = [] {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    return pages * 4096;
  };
  const std::size_t before = resident();
  constexpr std::size_t kLimit = std::size_t{4} << 30, kBytes = std::size_t{512} << 20;
  const auto world = std::make_shared<host::HostWorld>(
      1, [&] { return kLimit - std::min(kLimit, std::max(resident(), before) - before); });
  host::HostRank rank(world, 0);
  rank.BeginCase();
  const std::size_t free = rank.Memory().free_bytes;
  const Buffer buffer(rank.seam(), kBytes, rank.seam()->stream);
  std::size_t least = free;
  while (!rank.Idle()) least = std::min(least, rank.Memory().free_bytes);
  CHECK(free - least > kBytes - (64 << 20));
  CHECK(free - least < kBytes + (128 << 20));  // twice would be 512 MiB more
}

TEST_CASE("host memory: a refused reservation of one rank does not reduce the memory for another") {
  host::MemoryGate gate;
  std::atomic<bool> end{false};
  int given = 0;
  std::thread greedy([&] {
    while (!end) given += gate.Reserve(std::size_t{1} << 47);
  });
  int refused = 0;
  for (int i = 0; i < 300; ++i) {  // large enough that each reservation reads the system's free memory
    const std::size_t bytes = gate.Free() / 32;
    gate.Reserve(bytes) ? gate.Touched(bytes) : static_cast<void>(++refused);
  }
  end = true;
  greedy.join();
  CHECK(given == 0);
  CHECK(refused == 0);
}

TEST_CASE("host stream: a failure skips later work on every stream of the rank, and is reported") {
  OneRank one;
  Stream side(one.rt);
  Event event(one.rt);
  bool later = false, on_main = false;
  Enqueue(one.rt, side.get(), [] { throw RuntimeError(CPPOOL_OUT_OF_MEMORY, "no room at all"); });
  Enqueue(one.rt, side.get(), [&] { later = true; });
  event.Record(side.get());
  event.Wait(one.rt->stream);  // does not block, although the work was skipped
  Enqueue(one.rt, one.rt->stream, [&] { on_main = true; });
  CHECK(one.rt->stream_synchronize(one.rt, one.rt->stream) == CPPOOL_OUT_OF_MEMORY);
  CHECK_THAT(one.rt->last_error(one.rt), Catch::Matchers::Equals("no room at all"));
  CHECK(one.rt->stream_synchronize(one.rt, side.get()) == CPPOOL_OUT_OF_MEMORY);
  CHECK_FALSE(later);
  CHECK_FALSE(on_main);
  CHECK_THROWS_WITH(one.rank.EndCase(), "no room at all");
  one.rank.BeginCase();
  Enqueue(one.rt, one.rt->stream, [&] { on_main = true; });
  Sync(one.rt);
  CHECK(on_main);
  CHECK_NOTHROW(one.rank.EndCase());
}

TEST_CASE(
    "host stream: after a failure that EndCase reports, the progress has the stage where the stream "
    "stopped") {
  OneRank one;
  Check(one.rt, one.rt->mark(one.rt, one.rt->stream, "stopped here"));
  Enqueue(one.rt, one.rt->stream, [] { throw RuntimeError(CPPOOL_INTERNAL, "late"); });
  Check(one.rt, one.rt->mark(one.rt, one.rt->stream, "never reached"));
  CHECK_THROWS_WITH(one.rank.EndCase(), "late");
  CHECK_FALSE(one.rank.FailedInStage().has_value());
  CHECK(one.rank.Progress().at(0).stage == "stopped here");
  one.rank.BeginCase();
  CHECK(one.rank.FailedInStage() == "");
  CHECK(one.rank.Progress().at(0).stage.empty());
}

TEST_CASE("host stream: an exception of any type is a failure with a text") {
  OneRank one;
  Enqueue(one.rt, one.rt->stream, [] { throw std::logic_error("thought wrong"); });
  CHECK(one.rt->stream_synchronize(one.rt, one.rt->stream) == CPPOOL_INTERNAL);
  CHECK_THAT(one.rt->last_error(one.rt), Catch::Matchers::Equals("thought wrong"));
  one.rank.BeginCase();
  Enqueue(one.rt, one.rt->stream, [] { throw 7; });
  CHECK(one.rt->stream_synchronize(one.rt, one.rt->stream) == CPPOOL_INTERNAL);
  CHECK_THAT(one.rt->last_error(one.rt), Catch::Matchers::ContainsSubstring("not a std::exception"));
}

TEST_CASE("host case: EndCase completes the work of a case and releases its memory, streams and events") {
  OneRank one;
  std::atomic<int> ran{0};
  for (int round = 0; round < 20; ++round) {
    cppool_stream stream = nullptr;
    cppool_event event = nullptr;
    void *ptr = nullptr, *host = nullptr;
    Check(one.rt, one.rt->stream_create(one.rt, &stream));
    Check(one.rt, one.rt->event_create(one.rt, &event));
    Check(one.rt, one.rt->alloc(one.rt, 1 << 16, stream, &ptr));
    Check(one.rt, one.rt->alloc_host(one.rt, 1 << 16, &host));
    Check(one.rt, one.rt->event_record(one.rt, event, stream));
    CHECK_FALSE(one.rank.InGroup());
    Check(one.rt, one.rt->group_start(one.rt));  // never ended
    CHECK(one.rank.InGroup());
    Enqueue(one.rt, stream, [&] { ++ran; });
    CHECK(one.rank.Memory().live_allocations == 2);
    one.rank.EndCase();
    CHECK(ran == round + 1);
    CHECK(one.rank.Memory().live_allocations == 0);
    CHECK(one.rank.Memory().held_bytes == 0);
    CHECK(one.rank.Progress().size() == 1);
    one.rank.BeginCase();
    CHECK(one.rt->stream_synchronize(one.rt, stream) == CPPOOL_INTERNAL);  // the handles are invalid now
    CHECK(one.rt->event_record(one.rt, event, one.rt->stream) == CPPOOL_INTERNAL);
    CHECK(one.rt->group_end(one.rt) == CPPOOL_INTERNAL);
  }
}

TEST_CASE("host runtime: an invalid handle is an error that names its kind") {
  OneRank one;
  CHECK(one.rt->fill(one.rt, &one, 0, 0, nullptr) == CPPOOL_INTERNAL);
  CHECK_THAT(one.rt->last_error(one.rt), Catch::Matchers::ContainsSubstring("not a stream"));
  CHECK(one.rt->stream_destroy(one.rt, one.rt->stream) == CPPOOL_INTERNAL);
  CHECK(one.rt->all_gather(one.rt, nullptr, nullptr, 0, nullptr, one.rt->stream) == CPPOOL_INTERNAL);
  CHECK_THAT(one.rt->last_error(one.rt), Catch::Matchers::ContainsSubstring("not a communicator"));
  CHECK(one.rt->abi == CPPOOL_RUNTIME_ABI);
  CHECK(one.rt->struct_size == sizeof(cppool_runtime));
  CHECK(one.rt->device == -1);
}
