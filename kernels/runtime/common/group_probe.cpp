#include "kernels/backend.h"

#include <cstddef>
#include <string>

#include "kernels/group_shape.h"
#include "kernels/runtime.h"

namespace cppool::kernels {
namespace {

constexpr int kCount = 1024;
constexpr std::size_t kBytes = kCount * sizeof(std::int32_t);

// Less than 2^20, so that a sum over the ranks of a world fits. splitmix64's mixing (Steele, Lea, Flood
// 2014).
std::int32_t Value(std::uint64_t round, int rank, int i) {
  std::uint64_t x = (round << 32) + (static_cast<std::uint64_t>(rank) << 16) + static_cast<std::uint64_t>(i);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<std::int32_t>((x ^ (x >> 31)) >> 44);
}

std::int32_t* HostInts(cppool_runtime* rt) {
  void* data = nullptr;
  Check(rt, rt->alloc_host(rt, kBytes, &data));
  return static_cast<std::int32_t*>(data);
}

template <typename Expected>
void Compare(const std::int32_t* data, const std::string& what, Expected expected) {
  for (int i = 0; i < kCount; ++i) {
    if (data[i] == expected(i)) continue;
    throw RuntimeError(CPPOOL_INTERNAL, what + " is wrong: element " + std::to_string(i) + " is " +
                                            std::to_string(data[i]) + ", not " + std::to_string(expected(i)));
  }
}

void ProbeGroup(cppool_runtime* rt, GroupShape shape, std::uint64_t round) {
  const Group group = GetGroup(rt, shape);
  const std::string name = CommunicatorOf(shape.Ranks(rt->rank), rt->world_size);
  const auto world_rank = [&](int member) { return shape.WorldRank(rt->rank, member); };
  const int neighbours[] = {(group.rank + 1) % group.size, (group.rank + group.size - 1) % group.size};
  const cppool_stream stream = rt->stream;
  std::int32_t* const mine = HostInts(rt);
  std::int32_t* const sum = HostInts(rt);
  std::int32_t* const received[] = {HostInts(rt), HostInts(rt)};
  for (int i = 0; i < kCount; ++i) mine[i] = Value(round, rt->rank, i);

  const Buffer in(rt, kBytes, stream), out(rt, kBytes, stream), from(rt, 2 * kBytes, stream);
  Check(rt, rt->fill(rt, out.get(), 0xff, kBytes, stream));
  Check(rt, rt->fill(rt, from.get(), 0xff, 2 * kBytes, stream));
  Check(rt, rt->copy(rt, in.get(), mine, kBytes, stream));
  Check(rt, rt->all_reduce(rt, in.get(), out.get(), kCount, CPPOOL_INT32, CPPOOL_SUM, group.comm, stream));
  GroupedCalls calls(rt);
  for (const int neighbour : neighbours)
    Check(rt, rt->send(rt, in.get(), kBytes, neighbour, group.comm, stream));
  // The message to the next rank comes from the previous one. In a group of two they are the same rank:
  // messages keep their order.
  Check(rt, rt->recv(rt, from.at(kBytes), kBytes, neighbours[1], group.comm, stream));
  Check(rt, rt->recv(rt, from.at(0), kBytes, neighbours[0], group.comm, stream));
  calls.End();
  Check(rt, rt->copy(rt, sum, out.get(), kBytes, stream));
  for (int i = 0; i < 2; ++i)
    Check(rt, rt->copy(rt, received[i], from.at(static_cast<std::size_t>(i) * kBytes), kBytes, stream));
  Check(rt, rt->stream_synchronize(rt, stream));

  Compare(sum, "a sum over " + name, [&](int i) {
    std::int32_t expected = 0;
    for (int member = 0; member < group.size; ++member) expected += Value(round, world_rank(member), i);
    return expected;
  });
  for (int n = 0; n < 2; ++n) {
    const int sender = world_rank(neighbours[n]);
    Compare(received[n], "a message from rank " + std::to_string(sender) + " over " + name,
            [&](int i) { return Value(round, sender, i); });
  }
}

}  // namespace

void ProbeGroups(RankRuntime& rank, std::uint64_t round) {
  for (const GroupShape shape : rank.Groups()) ProbeGroup(rank.seam(), shape, round);
}

}  // namespace cppool::kernels
