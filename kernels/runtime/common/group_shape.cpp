#include "kernels/group_shape.h"

#include "kernels/error.h"

namespace cppool::kernels {

std::vector<int> GroupShape::Ranks(int rank) const {
  std::vector<int> ranks;
  for (int member = 0; member < size; ++member) ranks.push_back(WorldRank(rank, member));
  return ranks;
}

GroupShape CheckedShape(int size, int stride, int world_size) {
  if (size < 1 || stride < 1 || world_size % size != 0 || world_size / size % stride != 0) {
    throw RuntimeError(
        CPPOOL_INVALID_REQUEST,
        "group_of(" + std::to_string(size) + ", " + std::to_string(stride) +
            "): size and stride must be positive, and size * stride must divide the world size " +
            std::to_string(world_size));
  }
  return {size, size == 1 ? 1 : stride};  // a rank alone is the same group for every stride
}

std::optional<GroupShape> ShapeOf(cppool_group which, int world_size) {
  const bool divided = world_size >= 4 && world_size % 2 == 0;
  switch (which) {
    case CPPOOL_WORLD:
      return GroupShape{world_size, 1};
    case CPPOOL_PAIR:
      return divided ? std::optional(GroupShape{2, 1}) : std::nullopt;
    case CPPOOL_STRIDE:
      return divided ? std::optional(GroupShape{world_size / 2, 2}) : std::nullopt;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such group: " + std::to_string(static_cast<int>(which)));
}

std::vector<GroupShape> UsualShapes(int world_size) {
  std::vector<GroupShape> shapes;
  for (const cppool_group which : {CPPOOL_WORLD, CPPOOL_PAIR, CPPOOL_STRIDE}) {
    if (const auto shape = ShapeOf(which, world_size)) shapes.push_back(*shape);
  }
  return shapes;
}

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string CommunicatorOf(const std::vector<int>& ranks, int world_size) {
  if (ranks.size() == static_cast<std::size_t>(world_size)) return "the world communicator";
  return "the communicator of " + RankList(ranks);
}

}  // namespace cppool::kernels
