// How a world is divided into groups of ranks that share a communicator.
#pragma once

#include <cppool/runtime.h>

#include <compare>
#include <optional>
#include <string>
#include <vector>

namespace cppool::kernels {

// Groups of `size` ranks that are `stride` apart. Every rank of the world is in exactly one of them. In a
// world of 8 ranks, {4, 1} is 0-3 and 4-7, and {2, 4} is 0,4 and 1,5 and 2,6 and 3,7.
struct GroupShape {
  int size = 1;
  int stride = 1;
  auto operator<=>(const GroupShape&) const = default;

  // Where `rank` of the world is: the group's number in the world, its first rank, and the rank's place in
  // it.
  int Index(int rank) const { return rank / (size * stride) * stride + rank % stride; }
  int First(int rank) const { return rank / (size * stride) * (size * stride) + rank % stride; }
  int Member(int rank) const { return rank / stride % size; }
  // The rank in the world of a member of the group that `rank` is in.
  int WorldRank(int rank, int member) const { return First(rank) + member * stride; }
  std::vector<int> Ranks(int rank) const;  // of the group that `rank` is in, in the order of the members
};

// The shape that `group_of(size, stride)` means. Throws RuntimeError: CPPOOL_INVALID_REQUEST when the numbers
// do not divide the world.
GroupShape CheckedShape(int size, int stride, int world_size);
// The shape of a group of the C interface; none: the world has no such groups. Throws RuntimeError when
// `which` is not a cppool_group.
std::optional<GroupShape> ShapeOf(cppool_group which, int world_size);
// The shapes that are made with the world: the world itself first, then pairs and strides where it has them.
std::vector<GroupShape> UsualShapes(int world_size);

// Returns "rank 3", "ranks 0 and 1" or "ranks 0, 2 and 4".
std::string RankList(const std::vector<int>& ranks);
// Returns "the world communicator" or "the communicator of ranks 0 and 1".
std::string CommunicatorOf(const std::vector<int>& ranks, int world_size);

}  // namespace cppool::kernels
