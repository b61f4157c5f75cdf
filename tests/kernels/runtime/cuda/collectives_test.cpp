// Tests of communication with every transport, at every world size for which the machine has enough devices
// (`peer` needs one). Inputs are small integers, so every result is exact.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"

#include "tests/catch.h"
#include "tests/kernels/runtime/common/all_shapes.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {
namespace {

float Value(int rank, std::size_t i) {
  return static_cast<float>(static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 64) - 20);
}

template <typename T>
T As(float value) {
  return static_cast<T>(value);
}

struct Bf16 {
  std::uint16_t bits;
  bool operator==(const Bf16& other) const { return bits == other.bits; }
};
template <>
Bf16 As<Bf16>(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return {static_cast<std::uint16_t>(bits >> 16)};  // exact for small integers
}

template <typename T, typename Expected>
void ExpectAll(const std::vector<T>& values, Expected expected, const std::string& what) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!(values[i] == expected(i)))
      throw std::runtime_error(what + ": element " + std::to_string(i) + " is wrong");
  }
}

template <typename T>
void TestReductions(cppool_runtime* rt, const Group& group, const std::vector<int>& members,
                    cppool_dtype dtype, cppool_reduce reduce, std::size_t count) {
  const auto reduced = [&](std::size_t i) {
    float result = Value(members[0], i);
    for (std::size_t m = 1; m < members.size(); ++m) {
      const float value = Value(members[m], i);
      result = reduce == CPPOOL_SUM ? result + value : std::max(result, value);
    }
    return As<T>(result);
  };
  std::vector<T> in(count * members.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = As<T>(Value(rt->rank, i));
  const Buffer input = ToDevice(rt, in);
  const Buffer part(rt, count * sizeof(T), rt->stream);
  Check(rt, rt->reduce_scatter(rt, input.get(), part.get(), count, dtype, reduce, group.comm, rt->stream));
  const std::string of = " of dtype " + std::to_string(dtype) + (reduce == CPPOOL_SUM ? ", sum" : ", max");
  ExpectAll(
      ToHost<T>(rt, part),
      [&](std::size_t i) { return reduced(static_cast<std::size_t>(group.rank) * count + i); },
      "reduce_scatter" + of);
  Check(rt, rt->all_reduce(rt, input.get(), input.get(), in.size(), dtype, reduce, group.comm,
                           rt->stream));  // in place
  ExpectAll(ToHost<T>(rt, input), reduced, "all_reduce" + of);
}

void TestGroup(cppool_runtime* rt, const Group& group, const std::vector<int>& members) {
  const std::size_t size = members.size();
  Expect(group.comm != nullptr && group.size == static_cast<int>(size), "the group has the right size");
  Expect(members[static_cast<std::size_t>(group.rank)] == rt->rank, "the rank in the group is right");

  for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{1} << 20}) {
    for (const cppool_reduce reduce : {CPPOOL_SUM, CPPOOL_MAX}) {
      TestReductions<float>(rt, group, members, CPPOOL_FLOAT32, reduce, count);
      TestReductions<double>(rt, group, members, CPPOOL_FLOAT64, reduce, count);
      TestReductions<std::int32_t>(rt, group, members, CPPOOL_INT32, reduce, count);
      TestReductions<std::int64_t>(rt, group, members, CPPOOL_INT64, reduce, count);
      if (size <= 4)
        TestReductions<Bf16>(rt, group, members, CPPOOL_BFLOAT16, reduce, count);  // sums to 256 are exact
    }
    std::vector<float> in(count);
    for (std::size_t i = 0; i < count; ++i) in[i] = Value(rt->rank, i);
    const Buffer input = ToDevice(rt, in);
    const Buffer gathered(rt, count * size * sizeof(float), rt->stream);
    Check(rt, rt->all_gather(rt, input.get(), gathered.get(), count * sizeof(float), group.comm, rt->stream));
    const std::vector<float> all = ToHost<float>(rt, gathered);
    ExpectAll(
        all, [&](std::size_t i) { return Value(members[i / count], i % count); }, "all_gather");

    // A ring, then an all-to-all that includes messages of a rank to itself.
    const int next = (group.rank + 1) % group.size;
    const int previous = (group.rank + group.size - 1) % group.size;
    const Buffer received(rt, count * size * sizeof(float), rt->stream);
    Check(rt, rt->fill(rt, received.get(), 0, received.bytes(), rt->stream));
    {
      GroupedCalls calls(rt);
      Check(rt, rt->send(rt, input.get(), input.bytes(), next, group.comm, rt->stream));
      Check(rt, rt->recv(rt, received.get(), input.bytes(), previous, group.comm, rt->stream));
      calls.End();
    }
    std::vector<float> ring = ToHost<float>(rt, received);
    ring.resize(count);
    ExpectAll(
        ring, [&](std::size_t i) { return Value(members[static_cast<std::size_t>(previous)], i); }, "ring");
    {
      GroupedCalls calls(rt);
      for (std::size_t peer = 0; peer < size; ++peer) {
        Check(rt, rt->send(rt, input.get(), input.bytes(), static_cast<int>(peer), group.comm, rt->stream));
        Check(rt, rt->recv(rt, received.at(peer * input.bytes()), input.bytes(), static_cast<int>(peer),
                           group.comm, rt->stream));
      }
      calls.End();
    }
    Expect(ToHost<float>(rt, received) == all, "all to all");
  }
}

void TestWorld(int size, Transport transport) {
  if (!HaveDevices(transport == Transport::kNccl ? size : 1)) return;
  CudaWorld world(size, transport);
  CHECK(world.backend().transport() == (transport == Transport::kNccl ? "nccl" : "peer"));
  std::string init;
  double sum = 0;
  for (const auto& [stage, ms] : world.backend().InitTimes()) {
    init += stage + " " + std::to_string(ms) + " ms, ";
    sum += ms;
  }
  WARN("start of " << size << " ranks: " << init << "sum " << sum << " ms");
  REQUIRE(world.backend().Devices().size() == static_cast<std::size_t>(size));
  for (const DeviceInfo& device : world.backend().Devices()) {
    CHECK_FALSE(device.name.empty());
    CHECK(device.uuid.size() == 40);
    CHECK(device.total_bytes > 0);
  }
  // Groups of all shapes are made during a case, between other communication, and are kept.
  const std::vector<GroupShape> shapes = AllShapes(size);
  std::vector<std::vector<cppool_comm>> handles(static_cast<std::size_t>(size));
  for (int round = 0; round < 2; ++round) {
    world.RunCase([&](cppool_runtime* rt) {
      auto& mine = handles[static_cast<std::size_t>(rt->rank)];
      const Group all = GetGroup(rt, CPPOOL_WORLD);
      const Stream side(rt);
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        // Work on another stream is still pending when the communicator is made.
        const Buffer pending(rt, sizeof(float), side.get());
        Check(rt, rt->fill(rt, pending.get(), 0, sizeof(float), side.get()));
        EnqueueDelay(side.get(), 2);
        Check(rt, rt->all_reduce(rt, pending.get(), pending.get(), 1, CPPOOL_FLOAT32, CPPOOL_SUM, all.comm,
                                 side.get()));
        const Group group = GetGroup(rt, shapes[i]);
        TestGroup(rt, group, shapes[i].Ranks(rt->rank));
        if (round == 0) mine.push_back(group.comm);
        Expect(group.comm == mine[i], "the communicator is kept");
        Check(rt, rt->stream_synchronize(rt, side.get()));
      }
      for (const cppool_group which : {CPPOOL_WORLD, CPPOOL_PAIR, CPPOOL_STRIDE}) {
        const auto shape = ShapeOf(which, size);
        const Group group = GetGroup(rt, which);
        const Group expected = shape ? GetGroup(rt, *shape) : Group{nullptr, 0, 0};
        Expect(group.comm == expected.comm && group.rank == expected.rank && group.size == expected.size,
               "group and group_of agree");
      }
      cppool_comm none = nullptr;
      Expect(rt->group_of(rt, size + 1, 1, &none, nullptr, nullptr) == CPPOOL_INVALID_REQUEST && !none,
             "a size that does not divide the world size is refused");
    });
  }
  CHECK(world.rank(0).Groups().size() == shapes.size());
  world.backend().Recover(std::chrono::seconds(30));
  world.RunCase([&](cppool_runtime* rt) { ProbeGroups(world.rank(rt->rank), 1); });
}

}  // namespace

TEST_CASE("Collectives of 1 rank, nccl", "[gpu]") { TestWorld(1, Transport::kNccl); }
TEST_CASE("Collectives of 2 ranks, nccl", "[gpu]") { TestWorld(2, Transport::kNccl); }
TEST_CASE("Collectives of 4 ranks, nccl", "[gpu]") { TestWorld(4, Transport::kNccl); }
TEST_CASE("Collectives of 8 ranks, nccl", "[gpu]") { TestWorld(8, Transport::kNccl); }
TEST_CASE("Collectives of 1 rank, peer", "[gpu]") { TestWorld(1, Transport::kPeer); }
TEST_CASE("Collectives of 2 ranks, peer", "[gpu]") { TestWorld(2, Transport::kPeer); }
TEST_CASE("Collectives of 4 ranks, peer", "[gpu]") { TestWorld(4, Transport::kPeer); }
TEST_CASE("Collectives of 6 ranks, peer", "[gpu]") { TestWorld(6, Transport::kPeer); }
TEST_CASE("Collectives of 8 ranks, peer", "[gpu]") { TestWorld(8, Transport::kPeer); }

// Ranks wait for each other in host memory, so that the wait can be reported and ended with every transport.
TEST_CASE("Ranks that wait in group_of for a finished rank get an error, and the world stays usable",
          "[gpu]") {
  const Transport transport = GENERATE(Transport::kNccl, Transport::kPeer);
  if (!HaveDevices(transport == Transport::kNccl ? 4 : 1)) return;
  CudaWorld world(4, transport);
  std::atomic<bool> seen{false};
  world.Run([&](RankRuntime& rank) {
    cppool_runtime* rt = rank.seam();
    rank.BeginCase();
    cppool_comm comm = nullptr;
    if (rt->rank == 1) {
      StreamProgress main;
      for (int i = 0; i < 10000 && main.doing != "waiting for rank 1 in group_of(1, 1)"; ++i) {
        const auto streams = world.rank(3).Progress();
        if (!streams.empty()) main = streams[0];  // none before the rank's case has begun
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      seen = main.awaits == std::vector<int>{1} && !main.idle;
      rank.EndCase();
      world.backend().Finished(1);
      return;
    }
    Expect(rt->group_of(rt, 1, 1, &comm, nullptr, nullptr) == CPPOOL_INTERNAL, "the wait ends");
    const std::string error = rt->last_error(rt);
    Expect(error.find("rank 1 has finished the case") == 0, error);
    Expect(rt->last_failure(rt)->culprit == 1, "rank 1 is the culprit");
    rank.EndCase();
  });
  CHECK(seen);
  world.backend().Recover(std::chrono::seconds(30));
  world.RunCase([&](cppool_runtime* rt) { ProbeGroups(world.rank(rt->rank), 1); });
  world.RunCase([&](cppool_runtime* rt) { TestGroup(rt, GetGroup(rt, GroupShape{1, 1}), {rt->rank}); });
}

TEST_CASE("Wrong arguments of a collective are errors", "[gpu]") {
  if (!HaveDevices(1)) return;
  const Transport transport = GENERATE(Transport::kNccl, Transport::kPeer);
  CudaWorld world(1, transport);
  world.RunCase([&](cppool_runtime* rt) {
    const Buffer buffer(rt, 64, rt->stream);
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    Expect(rt->all_reduce(rt, buffer.get(), buffer.get(), 1, static_cast<cppool_dtype>(99), CPPOOL_SUM,
                          group.comm, rt->stream) == CPPOOL_INTERNAL,
           "an unknown dtype is an error");
    Expect(rt->send(rt, buffer.get(), 4, 5, group.comm, rt->stream) ==
               (transport == Transport::kNccl ? CPPOOL_NCCL : CPPOOL_INTERNAL),
           "an unknown peer is an error");
    Expect(std::strlen(rt->last_error(rt)) > 0, "the error has a text");
  });
}

}  // namespace cppool::kernels::test
