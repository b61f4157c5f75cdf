// Tests of the transport `peer` with ranks that share a device: the order of their work, reductions, and the
// shared memory.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>

#include "tests/catch.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {
namespace {

constexpr std::size_t kBytes = std::size_t{1} << 20;

void Fill(cppool_runtime* rt, const Buffer& buffer, int byte, cppool_stream stream) {
  Check(rt, rt->fill(rt, buffer.get(), byte, buffer.bytes(), stream));
}

void ExpectBytes(cppool_runtime* rt, const Buffer& buffer, std::size_t begin, std::size_t end, int byte,
                 const std::string& what) {
  const auto bytes = ToHost<unsigned char>(rt, buffer);
  for (std::size_t i = begin; i < end; ++i) Expect(bytes[i] == byte, what + ", byte " + std::to_string(i));
}

std::uint16_t ToBf16(float value) {  // exact for the values of these tests
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

template <typename T>
std::vector<T> AllReduced(cppool_runtime* rt, const std::vector<T>& in, cppool_dtype dtype,
                          cppool_reduce reduce) {
  const Buffer buffer = ToDevice(rt, in);
  Check(rt, rt->all_reduce(rt, buffer.get(), buffer.get(), in.size(), dtype, reduce,
                           GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
  return ToHost<T>(rt, buffer);
}

// Rank `late` delays its stream before it writes its data, and rank `slow` before it reads. Every rank
// overwrites its buffers as soon as its stream allows.
template <typename Exchange>
void TestOrder(int late, int slow, Exchange exchange) {
  CudaWorld world(4, Transport::kPeer);
  world.RunCase([&](cppool_runtime* rt) {
    const Buffer out(rt, 4 * kBytes, rt->stream);
    const Buffer in(rt, 4 * kBytes, rt->stream);
    Fill(rt, out, 0, rt->stream);
    Fill(rt, in, 0xEE, rt->stream);
    Check(rt, rt->stream_synchronize(rt, rt->stream));
    if (rt->rank == late || rt->rank == slow) EnqueueDelay(rt->stream, 50);
    Fill(rt, out, rt->rank + 1, rt->stream);
    exchange(rt, out, in);
    Fill(rt, out, 0xDD, rt->stream);
  });
}

}  // namespace

TEST_CASE("Peer: recv waits for the sender's earlier work, and work after send waits for the receiver",
          "[gpu]") {
  if (!HaveDevices(1)) return;
  for (int rank = 0; rank < 4; ++rank) {
    TestOrder(rank, (rank + 2) % 4, [](cppool_runtime* rt, const Buffer& out, const Buffer& in) {
      const Group group = GetGroup(rt, CPPOOL_WORLD);
      const int next = (rt->rank + 1) % 4, previous = (rt->rank + 3) % 4;
      const Stream side(rt);
      Event ready(rt), done(rt);
      ready.Record(rt->stream);
      ready.Wait(side.get());
      {  // two messages on two streams
        GroupedCalls calls(rt);
        Check(rt, rt->send(rt, out.get(), kBytes, next, group.comm, rt->stream));
        Check(rt, rt->send(rt, out.at(kBytes), kBytes, next, group.comm, side.get()));
        Check(rt, rt->recv(rt, in.get(), kBytes, previous, group.comm, side.get()));
        Check(rt, rt->recv(rt, in.at(kBytes), kBytes, previous, group.comm, rt->stream));
        calls.End();
      }
      done.Record(side.get());
      done.Wait(rt->stream);
      Check(rt, rt->fill(rt, out.get(), 0xDD, kBytes * 2, rt->stream));
      ExpectBytes(rt, in, 0, kBytes * 2, previous + 1, "bytes from the previous rank");
      ExpectBytes(rt, in, kBytes * 2, kBytes * 4, 0xEE, "bytes that were not sent");
    });
  }
}

TEST_CASE("Peer: a collective waits for the earlier work of all ranks, and later work waits for all readers",
          "[gpu]") {
  if (!HaveDevices(1)) return;
  for (int rank = 0; rank < 4; ++rank) {
    TestOrder(rank, (rank + 1) % 4, [](cppool_runtime* rt, const Buffer& out, const Buffer& in) {
      Check(rt, rt->all_gather(rt, out.get(), in.get(), kBytes, GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
      Fill(rt, out, 0xDD, rt->stream);
      for (std::size_t r = 0; r < 4; ++r)
        ExpectBytes(rt, in, r * kBytes, (r + 1) * kBytes, static_cast<int>(r) + 1, "all_gather");
    });
    TestOrder(rank, (rank + 1) % 4, [](cppool_runtime* rt, const Buffer& out, const Buffer& in) {
      Check(rt, rt->reduce_scatter(rt, out.get(), in.get(), kBytes, CPPOOL_UINT8, CPPOOL_SUM,
                                   GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
      Fill(rt, out, 0xDD, rt->stream);
      ExpectBytes(rt, in, 0, kBytes, 10, "reduce_scatter");
    });
    TestOrder(rank, (rank + 1) % 4, [](cppool_runtime* rt, const Buffer& out, const Buffer& in) {
      Check(rt, rt->all_reduce(rt, out.get(), in.get(), 4 * kBytes, CPPOOL_UINT8, CPPOOL_SUM,
                               GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
      Fill(rt, out, 0xDD, rt->stream);
      ExpectBytes(rt, in, 0, 4 * kBytes, 10, "all_reduce");
    });
    TestOrder(rank, (rank + 1) % 4, [](cppool_runtime* rt, const Buffer& out, const Buffer& in) {
      Check(rt, rt->all_reduce(rt, out.get(), out.get(), 4 * kBytes, CPPOOL_UINT8, CPPOOL_MAX,
                               GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
      Check(rt, rt->copy(rt, in.get(), out.get(), 4 * kBytes, rt->stream));
      Fill(rt, out, 0xDD, rt->stream);
      ExpectBytes(rt, in, 0, 4 * kBytes, 4, "all_reduce in place");
    });
  }
}

TEST_CASE("Peer: calls return before the work is done", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(2, Transport::kPeer);
  Gate gate;
  std::atomic<int> returned{0};
  world.RunCase([&](cppool_runtime* rt) {
    const Buffer buffer(rt, kBytes, rt->stream);
    gate.Hold(rt, rt->stream);
    Check(rt, rt->all_reduce(rt, buffer.get(), buffer.get(), kBytes / 4, CPPOOL_INT32, CPPOOL_SUM,
                             GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
    Expect(!IsIdle(rt->stream), "the stream is still blocked");
    if (++returned == 2) gate.Open();
  });
  CHECK(returned == 2);
}

TEST_CASE("Peer: calls match even if ranks divide them into different groups of calls", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(2, Transport::kPeer);
  world.RunCase([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    const Buffer a = ToDevice(rt, std::vector<int>{rt->rank + 1}), b = ToDevice(rt, std::vector<int>{5});
    const auto reduce = [&](const Buffer& buffer) {
      Check(rt, rt->all_reduce(rt, buffer.get(), buffer.get(), 1, CPPOOL_INT32, CPPOOL_SUM, group.comm,
                               rt->stream));
    };
    if (rt->rank == 0) {
      GroupedCalls calls(rt);
      reduce(a);
      reduce(b);
      calls.End();
    } else {
      reduce(a);
      reduce(b);
    }
    Expect(ToHost<int>(rt, a) == std::vector<int>{3} && ToHost<int>(rt, b) == std::vector<int>{10}, "sums");
  });
  // A group of calls that a case leaves open does not affect the next case.
  world.RunCase([](cppool_runtime* rt) {
    const Buffer buffer(rt, 4, rt->stream);
    Check(rt, rt->group_start(rt));
    Check(rt, rt->send(rt, buffer.get(), 4, 1 - rt->rank, GetGroup(rt, CPPOOL_WORLD).comm, rt->stream));
  });
  world.RunCase([](cppool_runtime* rt) {
    Expect(rt->group_end(rt) == CPPOOL_INTERNAL, "no group of calls is open");
    Expect(AllReduced<int>(rt, {1}, CPPOOL_INT32, CPPOOL_SUM) == std::vector<int>{2}, "all_reduce works");
  });
}

TEST_CASE("Peer: calls with different arguments are an error on all ranks that names the arguments",
          "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(2, Transport::kPeer);
  world.Run([](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    const Buffer buffer(rt, 1024, rt->stream);
    Expect(rt->all_reduce(rt, buffer.get(), buffer.get(), rt->rank ? 8 : 16, CPPOOL_INT32, CPPOOL_SUM,
                          group.comm, rt->stream) == CPPOOL_INTERNAL,
           "different counts are an error");
    const std::string error = rt->last_error(rt);
    Expect(error.find("rank 0 called all_reduce (sum) of 16 int32, rank 1 all_reduce (sum) of 8 int32") !=
               std::string::npos,
           error);
    const cppool_status status = rt->rank ? rt->send(rt, buffer.get(), 24, 0, group.comm, rt->stream)
                                          : rt->recv(rt, buffer.get(), 32, 1, group.comm, rt->stream);
    Expect(status == CPPOOL_INTERNAL, "different message sizes are an error");
    const std::string sizes = rt->last_error(rt);
    Expect(sizes.find("24") != std::string::npos && sizes.find("32") != std::string::npos, sizes);
    Expect(AllReduced<int>(rt, {1}, CPPOOL_INT32, CPPOOL_SUM) == std::vector<int>{2}, "the next call works");
    EnqueueDelay(rt->stream, 30);
    Expect(rt->stream_synchronize(rt, rt->stream) == CPPOOL_OK,
           "the next stream_synchronize waits for the work");
    Expect(ErrorOfEnd(rank) == error, "EndCase reports the first error");
  });
}

TEST_CASE(
    "Peer: 16-bit types are added in fp32 and rounded once, integers wrap, and a maximum with NaN is NaN",
    "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(4, Transport::kPeer);
  world.RunCase([](cppool_runtime* rt) {
    // 256 + 1 + 1 + 1: if bfloat16 were rounded after each step, the sum would stay 256.
    Expect(AllReduced<std::uint16_t>(rt, {ToBf16(rt->rank == 0 ? 256.f : 1.f)}, CPPOOL_BFLOAT16,
                                     CPPOOL_SUM) == std::vector<std::uint16_t>{ToBf16(260)},
           "bfloat16");
    // 2048 + 1 + 1 + 1 = 2051 in binary16, whose values from 2048 on are even: 2052 (a tie, rounded to an
    // even mantissa).
    Expect(AllReduced<std::uint16_t>(rt, {static_cast<std::uint16_t>(rt->rank == 0 ? 0x6800 : 0x3C00)},
                                     CPPOOL_FLOAT16, CPPOOL_SUM) == std::vector<std::uint16_t>{0x6802},
           "float16");
    Expect(AllReduced<std::uint8_t>(rt, {100}, CPPOOL_UINT8, CPPOOL_SUM) == std::vector<std::uint8_t>{144},
           "uint8");
    Expect(AllReduced<std::int32_t>(rt, {1 << 30}, CPPOOL_INT32, CPPOOL_SUM) == std::vector<std::int32_t>{0},
           "int32");
    Expect(AllReduced<std::int32_t>(rt, {-5 - rt->rank}, CPPOOL_INT32, CPPOOL_MAX) ==
               std::vector<std::int32_t>{-5},
           "the largest of negative numbers");
    const float infinity = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const auto largest = AllReduced<float>(rt, {-infinity, rt->rank == 1 ? nan : 3.f, -1.f - rt->rank},
                                           CPPOOL_FLOAT32, CPPOOL_MAX);
    Expect(largest[0] == -infinity && std::isnan(largest[1]) && largest[2] == -1.f, "float32");
  });
}

TEST_CASE("Peer: buffers of any alignment and length are reduced", "[gpu]") {
  if (!HaveDevices(1)) return;
  CudaWorld world(4, Transport::kPeer);
  world.RunCase([](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    for (const std::size_t offset : {0, 1, 3}) {
      for (const std::size_t count : {0, 1, 15, 16, 17, 63, 65, 1000, 100003}) {
        std::vector<float> in(count + 8, -1.f);
        for (std::size_t i = 0; i < count; ++i)
          in[offset + i] = static_cast<float>((i * 3 + static_cast<std::size_t>(rt->rank)) % 50);
        const Buffer buffer = ToDevice(rt, in);
        Check(rt, rt->all_reduce(rt, buffer.get<float>() + offset, buffer.get<float>() + offset, count,
                                 CPPOOL_FLOAT32, CPPOOL_SUM, group.comm, rt->stream));
        const std::vector<float> out = ToHost<float>(rt, buffer);
        for (std::size_t i = 0; i < out.size(); ++i) {
          float expected = -1;
          if (i >= offset && i < offset + count) {
            expected = 0;
            for (std::size_t r = 0; r < 4; ++r) expected += static_cast<float>(((i - offset) * 3 + r) % 50);
          }
          Expect(out[i] == expected, "element " + std::to_string(i) + " of " + std::to_string(count) +
                                         " at " + std::to_string(offset));
        }
      }
    }
  });
}

TEST_CASE("Ranks that share a device share its memory pool, which is counted once and reused across ranks",
          "[gpu]") {
  if (!HaveDevices(1)) return;
  const int size = 2 * CountCudaDevices();
  CudaWorld world(size, Transport::kPeer);
  const auto devices = world.backend().Devices();
  for (int r = 0; r < size; ++r) CHECK(devices[static_cast<std::size_t>(r)].ordinal == r / 2);
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  const std::size_t held_before = world.rank(0).Memory().held_bytes;
  const std::size_t free_before = world.rank(0).Memory().free_bytes;
  const std::size_t large = free_before / 5 * 3;
  world.Run([&](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    Expect(rt->device == rt->rank / 2, "two ranks share each device");
    rank.BeginCase();
    const auto together = [&] {
      Expect(AllReduced<int>(rt, {1}, CPPOOL_INT32, CPPOOL_SUM) == std::vector<int>{rt->world_size},
             "all_reduce as a barrier");
    };
    {
      const Buffer mine(rt, 256 * kMiB, rt->stream);
      together();
      const MemoryInfo memory = rank.Memory();
      Expect(memory.held_bytes >= 512 * kMiB && memory.held_bytes < held_before + 640 * kMiB,
             "the pool holds both buffers");
      Expect(memory.free_bytes + 512 * kMiB <= free_before + kMiB, "neither buffer is free");
      Expect(memory.live_allocations == 1, "only this rank's allocation is counted");
      Expect(!rank.HasRoom(static_cast<double>(free_before)), "there is less room than before");
      together();
    }
    together();
    // One rank after the other, without Trim: the second rank must get the memory that the first has freed.
    for (int turn = 0; turn < 2; ++turn) {
      if (rt->rank % 2 == turn) {
        Expect(rank.HasRoom(static_cast<double>(large)), "there is room for most of the device");
        const Buffer most(rt, large, rt->stream);
        Check(rt, rt->fill(rt, most.get(), 1, most.bytes(), rt->stream));
        Check(rt, rt->stream_synchronize(rt, rt->stream));
      }
      Check(rt, rt->stream_synchronize(rt, rt->stream));
      together();
    }
    rank.EndCase();
  });
  world.Run([](RankRuntime& rank) { rank.Trim(); });
  CHECK(world.rank(0).Memory().held_bytes < held_before + 64 * kMiB);
}

}  // namespace cppool::kernels::test
