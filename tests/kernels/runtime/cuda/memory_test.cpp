// Tests of device and page-locked memory: leaks of a case are released, Trim returns pooled memory, and out
// of memory is an error with the sizes.
#include <cstdint>
#include <cstring>
#include <random>

#include "tests/catch.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kKept = 32 * kMiB;  // what a trimmed pool may keep

}  // namespace

TEST_CASE("EndCase releases the memory of a case to the pool, and Trim returns it to the device", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.Run([](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.Trim();
    Expect(rank.Memory().held_bytes <= kKept, "at most 32 MiB are held after the start");
    const std::size_t free_before = rank.Memory().free_bytes;
    for (int round = 0; round < 3; ++round) {
      rank.BeginCase();
      void* device = nullptr;
      void* host = nullptr;
      Check(rt, rt->alloc(rt, 256 * kMiB, rt->stream, &device));
      Check(rt, rt->alloc_host(rt, kMiB, &host));
      cppool_stream stream = nullptr;
      cppool_event event = nullptr;
      Check(rt, rt->stream_create(rt, &stream));
      Check(rt, rt->event_create(rt, &event));
      Expect(rank.Memory().live_allocations == 2, "both allocations are counted");
      Expect(rank.Memory().held_bytes >= 256 * kMiB && rank.Memory().held_bytes < 512 * kMiB,
             "the pool holds the memory once");
      Expect(rank.Memory().free_bytes + 256 * kMiB <= free_before, "the memory is not free");
      rank.EndCase();
      Expect(rank.Memory().live_allocations == 0, "EndCase releases both");
      Expect(rank.Memory().held_bytes >= 256 * kMiB, "the pool keeps the memory");
    }
    rank.Trim();
    Expect(rank.Memory().held_bytes <= kKept, "Trim empties the pool");
    Expect(rank.Memory().free_bytes + 64 * kMiB >= free_before, "the memory is free on the device");
  });
}

TEST_CASE("Out of memory is an error with the sizes, and the next allocation works", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  const std::size_t total = world.backend().Devices()[0].total_bytes;
  REQUIRE(total > 0);
  world.RunCase([&](cppool_runtime* rt) {
    void* out = nullptr;
    Expect(rt->alloc(rt, 2 * total, rt->stream, &out) == CPPOOL_OUT_OF_MEMORY, "out of memory");
    const std::string text = rt->last_error(rt);
    Expect(
        text.find(std::to_string(2 * total)) != std::string::npos && text.find("free") != std::string::npos,
        text);
    Expect(ToHost<int>(rt, ToDevice(rt, std::vector<int>{7})) == std::vector<int>{7},
           "the rank can still allocate");
    void* nothing = &out;
    Check(rt, rt->alloc(rt, 0, rt->stream, &nothing));
    Expect(nothing == nullptr, "an allocation of 0 bytes returns NULL");
  });
}

TEST_CASE("Freed memory is reused only after the work on its stream", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.RunCase([](cppool_runtime* rt) {
    // Memory is freed after a delay on its stream: a buffer of another stream must not get it while it is
    // still written.
    const Stream side(rt);
    Buffer other(rt, 4 * kMiB, side.get());
    Check(rt, rt->fill(rt, other.get(), 5, other.bytes(), side.get()));
    {
      const Buffer slow(rt, 4 * kMiB, rt->stream);
      EnqueueDelay(rt->stream, 50);
      Check(rt, rt->fill(rt, slow.get(), 9, slow.bytes(), rt->stream));
    }
    const Buffer quick(rt, 4 * kMiB, side.get());
    Check(rt, rt->fill(rt, quick.get(), 6, quick.bytes(), side.get()));
    Check(rt, rt->stream_synchronize(rt, side.get()));
    Check(rt, rt->stream_synchronize(rt, rt->stream));
    for (unsigned char byte : ToHost<unsigned char>(rt, quick))
      Expect(byte == 6, "quick was not written by slow's work");
  });
  std::thread([&] { CHECK(world.rank(0).Memory().live_allocations == 0); }).join();
}

TEST_CASE("Page-locked allocations are aligned, do not overlap, and are reused", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(1);
  world.RunCase([](cppool_runtime* rt) {
    struct Piece {
      unsigned char* data;
      std::size_t bytes;
      unsigned char byte;
    };
    std::vector<Piece> pieces;
    std::mt19937 random(17);
    const auto whole = [](const Piece& piece) {
      for (std::size_t i = 0; i < piece.bytes; ++i) {
        if (piece.data[i] != piece.byte) return false;
      }
      return true;
    };
    for (int step = 0; step < 2000; ++step) {
      if (pieces.size() > 20 || (random() % 3 == 0 && !pieces.empty())) {
        const std::size_t index = random() % pieces.size();
        Expect(whole(pieces[index]), "the piece still contains its own bytes");
        Check(rt, rt->free_host(rt, pieces[index].data));
        pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(index));
      } else {
        const std::size_t bytes = 1 + random() % (step % 100 == 0 ? 6 * kMiB : 60000);
        void* data = nullptr;
        Check(rt, rt->alloc_host(rt, bytes, &data));
        Expect(reinterpret_cast<std::uintptr_t>(data) % 256 == 0, "the piece is aligned");
        pieces.push_back({static_cast<unsigned char*>(data), bytes, static_cast<unsigned char>(random())});
        std::memset(data, pieces.back().byte, bytes);
      }
    }
    for (const Piece& piece : pieces) Check(rt, rt->free_host(rt, piece.data));
    void* large = nullptr;
    Check(rt, rt->alloc_host(rt, 3 * kMiB, &large));
    const Buffer device(rt, 3 * kMiB, rt->stream);
    std::memset(large, 3, 3 * kMiB);
    Check(rt, rt->copy(rt, device.get(), large, 3 * kMiB, rt->stream));
    for (unsigned char byte : ToHost<unsigned char>(rt, device))
      Expect(byte == 3, "the device reads the page-locked memory");
  });
}

}  // namespace cppool::kernels::test
