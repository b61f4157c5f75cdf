// Tests of the members of groups, for every shape and world size.
#include "kernels/group_shape.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "kernels/error.h"
#include "tests/catch.h"

namespace cppool::kernels::test {
namespace {

cppool_status StatusOf(int size, int stride, int world) {
  try {
    CheckedShape(size, stride, world);
  } catch (const RuntimeError& error) {
    return error.status();
  }
  return CPPOOL_OK;
}

}  // namespace

TEST_CASE("group shapes: every rank is in one group, in the order of the ranks") {
  for (int world = 1; world <= 64; ++world) {
    for (int size = 1; size <= world; ++size) {
      for (int stride = 1; size * stride <= world; ++stride) {
        CAPTURE(world, size, stride);
        if (world % (size * stride) != 0) {
          REQUIRE(StatusOf(size, stride, world) == CPPOOL_INVALID_REQUEST);
          continue;
        }
        const GroupShape shape = CheckedShape(size, stride, world);
        REQUIRE(shape.size == size);
        REQUIRE(shape.stride == (size == 1 ? 1 : stride));
        // The definition in cppool/runtime.h: blocks of size * stride ranks, and in each block one group for
        // every remainder.
        std::vector<std::vector<int>> groups;
        for (int block = 0; block < world; block += size * stride) {
          for (int first = block; first < block + stride; ++first) {
            groups.emplace_back();
            for (int i = 0; i < size; ++i) groups.back().push_back(first + i * stride);
          }
        }
        REQUIRE(groups.size() == static_cast<std::size_t>(world / size));
        for (int rank = 0; rank < world; ++rank) {
          const std::vector<int>& group = groups[static_cast<std::size_t>(shape.Index(rank))];
          REQUIRE(shape.Ranks(rank) == group);
          REQUIRE(shape.First(rank) == group[0]);
          REQUIRE(group[static_cast<std::size_t>(shape.Member(rank))] == rank);
          for (int member = 0; member < size; ++member)
            REQUIRE(shape.WorldRank(rank, member) == group[static_cast<std::size_t>(member)]);
        }
      }
    }
  }
}

TEST_CASE("group shapes: an error names a size and stride that do not divide the world size") {
  for (const auto& [size, stride] :
       {std::pair{0, 1}, {1, 0}, {-2, 1}, {2, -1}, {3, 1}, {4, 4}, {16, 1}, {1 << 30, 4}, {2, 1 << 30}}) {
    CAPTURE(size, stride);
    CHECK(StatusOf(size, stride, 8) == CPPOOL_INVALID_REQUEST);
  }
  CHECK_THROWS_WITH(
      CheckedShape(3, 2, 8),
      "group_of(3, 2): size and stride must be positive, and size * stride must divide the world "
      "size 8");
}

TEST_CASE("group shapes: the groups of the C interface have the documented shapes") {
  for (int world = 1; world <= 64; ++world) {
    CAPTURE(world);
    CHECK(ShapeOf(CPPOOL_WORLD, world) == GroupShape{world, 1});
    const bool divided = world >= 4 && world % 2 == 0;
    CHECK(ShapeOf(CPPOOL_PAIR, world) == (divided ? std::optional(GroupShape{2, 1}) : std::nullopt));
    CHECK(ShapeOf(CPPOOL_STRIDE, world) ==
          (divided ? std::optional(GroupShape{world / 2, 2}) : std::nullopt));
    CHECK(UsualShapes(world).size() == (divided ? 3 : 1));
    CHECK(UsualShapes(world)[0] == GroupShape{world, 1});
  }
  CHECK_THROWS_WITH(ShapeOf(static_cast<cppool_group>(3), 4), "no such group: 3");
}

TEST_CASE("group shapes: messages name ranks and communicators") {
  CHECK(RankList({3}) == "rank 3");
  CHECK(RankList({0, 1}) == "ranks 0 and 1");
  CHECK(RankList({0, 2, 4}) == "ranks 0, 2 and 4");
  CHECK(CommunicatorOf({0, 1, 2}, 3) == "the world communicator");
  CHECK(CommunicatorOf({0, 2}, 4) == "the communicator of ranks 0 and 2");
}

}  // namespace cppool::kernels::test
