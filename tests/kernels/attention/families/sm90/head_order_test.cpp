// The order of the forward kernel's items: every tile of every head once, whole groups of heads one after
// another.
#include "kernels/attention/families/sm90/head_order.h"

#include <vector>

#include "tests/catch.h"

namespace cppool::kernels::cuda::sm90::test {
namespace {

// The heads of each group, from the items themselves.
std::vector<int> GroupsOf(const HeadOrder& order, int heads, int tiles) {
  std::vector<int> taken(static_cast<std::size_t>(heads * tiles)), groups;
  int first = 0, before = 0;  // heads of the groups so far, and items
  for (int item = 0; item < heads * tiles; ++item) {
    const Item at = ItemOf(order, tiles, item);
    REQUIRE((at.tile >= 0 && at.tile < tiles && at.head >= 0 && at.head < heads));
    CHECK(++taken[static_cast<std::size_t>(at.head * tiles + at.tile)] == 1);
    if (groups.empty() || item == before + groups.back() * tiles) {
      if (!groups.empty()) first += groups.back(), before += groups.back() * tiles;
      groups.push_back(groups.empty() ? order.first : order.next);
    }
    // Within a group one tile of each of its heads before the next tile.
    CHECK(at.tile == (item - before) / groups.back());
    CHECK(at.head == first + (item - before) % groups.back());
  }
  return groups;
}

}  // namespace

TEST_CASE("every tile of every head is one item, whatever the order of heads") {
  for (int heads = 1; heads <= 12; ++heads) {
    for (int first = 1; first <= heads; ++first) {
      for (int next = 1; next <= heads; ++next) {
        if ((heads - first) % next == 0) GroupsOf({first, next}, heads, 3);
      }
    }
  }
}

TEST_CASE("keys that arrive: the first heads fill the multiprocessors once, and the last ones to the end") {
  for (int heads = 1; heads <= 64; ++heads) {
    for (const int tiles : {1, 2, 3, 11, 22, 43, 44, 64, 86, 128, 171, 256, 512}) {
      CAPTURE(heads, tiles);
      const HeadOrder order = OrderOfArrivals(heads, tiles, 132);
      CHECK(order.first >= 1);
      CHECK(order.first <= heads);
      CHECK((heads - order.first) % order.next == 0);
      CHECK((order.first == heads || order.first * tiles >= 132));
    }
  }
  using Groups = std::vector<int>;
  // 8K tokens per GPU, tiles of 128 rows: these groups measured well.
  CHECK(GroupsOf(OrderOfArrivals(16, 64, 132), 16, 64) == Groups{4, 4, 4, 4});
  // Of 192 rows: four heads' 172 tiles would leave a third of the last round's processors idle.
  CHECK(GroupsOf(OrderOfArrivals(16, 43, 132), 16, 43) == Groups{4, 12});
  CHECK(GroupsOf(OrderOfArrivals(16, 44, 132), 16, 44) == Groups{4, 12});
  CHECK(GroupsOf(OrderOfArrivals(4, 256, 132), 4, 256) == Groups{1, 1, 1, 1});
}

TEST_CASE("keys that are there: about four tiles for each multiprocessor come at a time") {
  for (int heads = 1; heads <= 64; ++heads) {
    for (const int tiles : {1, 3, 11, 22, 43, 64, 86, 128, 171, 256, 512, 2000}) {
      CAPTURE(heads, tiles);
      const HeadOrder order = OrderOfHeads(heads, tiles, 132);
      CHECK(order.first >= 1);
      CHECK(order.first <= heads);
      CHECK((heads - order.first) % order.next == 0);
      CHECK((order.next == 1 || order.next * tiles <= 4 * 132));
      CHECK((order.first == heads || order.first * tiles > 3 * 132));  // a few tiles for each
    }
  }
  using Groups = std::vector<int>;
  CHECK(GroupsOf(OrderOfHeads(16, 128, 132), 16, 128) == Groups{4, 4, 4, 4});
  CHECK(GroupsOf(OrderOfHeads(16, 43, 132), 16, 43) == Groups{16});
  CHECK(GroupsOf(OrderOfHeads(16, 86, 132), 16, 86) == Groups{10, 6});
}

}  // namespace cppool::kernels::cuda::sm90::test
