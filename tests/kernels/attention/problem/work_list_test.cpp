// Compares work lists with brute force for random layouts and bands.
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "kernels/attention/layout.h"
#include "kernels/error.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/host/naive_attention.h"

namespace {

using namespace cppool::kernels;
using cppool::test::Sees;
using cppool::test::Token;
using cppool::test::TokensOf;

using Random = std::mt19937;

int Between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// Divides sequences into pieces of random length, omits some, and places the others in random order, with
// gaps between rows.
Layout RandomLayout(Random& random, int sequences, int longest) {
  Layout layout;
  std::vector<Segment> pieces;
  for (int sequence = 0; sequence < sequences; ++sequence) {
    const int length = Between(random, 0, longest);
    for (int position = 0; position < length;) {
      const int count = std::min(Between(random, 1, std::max(1, longest / 2)), length - position);
      if (Between(random, 0, 4) != 0) pieces.push_back({sequence, position, count, 0});
      position += count;
    }
  }
  std::vector<std::size_t> order(pieces.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (Between(random, 0, 1) == 0) std::shuffle(order.begin(), order.end(), random);
  layout.row_step = Between(random, 1, 3);
  std::int64_t row = 0;
  for (const std::size_t i : order) {
    if (Between(random, 0, 2) == 0) row += layout.row_step * Between(random, 1, 3);
    pieces[i].row = row;
    row += std::int64_t{pieces[i].length} * layout.row_step;
  }
  layout.segments = pieces;
  layout.rows = row;
  return layout;
}

Band RandomBand(Random& random, int longest) {
  switch (Between(random, 0, 4)) {
    case 0:
      return {-kOpen, kOpen};
    case 1:
      return {-kOpen, Between(random, -longest, longest)};
    case 2:
      return {Between(random, -longest, longest), kOpen};
    case 3:
      return {-longest - 5, -longest - 1};  // no visible pair
    default: {
      const int low = Between(random, -longest, longest);
      return {low, low + Between(random, 0, longest)};
    }
  }
}

void CheckWorkList(Side side, const Layout& query, const Layout& key, const std::vector<Band>& bands,
                   int tile_rows, bool keep_empty, int rest_step) {
  const WorkList list = BuildWorkList(side, query, key, bands, tile_rows, keep_empty, rest_step);
  const Layout& self = side == Side::kQuery ? query : key;
  const Layout& other = side == Side::kQuery ? key : query;
  const std::vector<Token> self_tokens = TokensOf(self), other_tokens = TokensOf(other);
  const auto sees = [&](const Token& of_self, const Token& of_other) {
    return side == Side::kQuery ? Sees(of_self, of_other, bands) : Sees(of_other, of_self, bands);
  };
  REQUIRE(list.self_step == self.row_step);
  REQUIRE(list.other_step == other.row_step);

  std::map<std::pair<std::int64_t, std::int64_t>, int> visited;  // visible pairs of rows
  std::set<std::int64_t> tiled;
  std::int64_t last_work = INT64_MAX;
  for (const Tile& tile : list.tiles) {
    REQUIRE(tile.length >= 1);
    REQUIRE(tile.length <= tile_rows);
    REQUIRE(tile.band == bands[static_cast<std::size_t>(tile.sequence)]);
    // A tile is inside one segment, which is divided into whole tiles from its beginning or behind a short
    // one.
    const auto segment = std::find_if(self.segments.begin(), self.segments.end(), [&](const Segment& s) {
      return s.sequence == tile.sequence && s.position <= tile.position &&
             tile.position < s.position + s.length;
    });
    REQUIRE(segment != self.segments.end());
    const int rest = segment->length % tile_rows;
    int first_rows = tile_rows;
    if (rest_step > 0 && rest > 0)
      for (first_rows = rest_step; first_rows < rest;) first_rows += rest_step;
    first_rows = std::min(first_rows, tile_rows);
    const int at = tile.position - segment->position, left = segment->length - at;
    if (at > 0) REQUIRE((at - first_rows) % tile_rows == 0);
    REQUIRE(tile.length == std::min(at == 0 ? first_rows : tile_rows, left));
    std::int64_t work = 0;
    const Range* last = nullptr;
    for (std::int32_t r = tile.range_begin; r < tile.range_end; ++r) {
      const Range& range = list.ranges[static_cast<std::size_t>(r)];
      REQUIRE(range.length >= 1);
      work += range.length;
      if (last) {
        REQUIRE(range.position >= last->position + last->length);
        const bool continues = range.position == last->position + last->length &&
                               range.row == last->row + std::int64_t{last->length} * list.other_step;
        REQUIRE_FALSE(continues);
      }
      last = &range;
      for (std::int32_t j = 0; j < range.length; ++j) {
        const std::int64_t other_row = range.row + std::int64_t{j} * list.other_step;
        const Token& token = other_tokens.at(static_cast<std::size_t>(other_row));
        REQUIRE(token.sequence == tile.sequence);
        REQUIRE(token.position == range.position + j);
        bool seen = false;
        for (std::int32_t i = 0; i < tile.length; ++i) {
          const std::int64_t self_row = tile.row + std::int64_t{i} * list.self_step;
          if (!sees(self_tokens.at(static_cast<std::size_t>(self_row)), token)) continue;
          seen = true;
          ++visited[{self_row, other_row}];
        }
        REQUIRE(seen);  // every token of a range is visible to the tile
      }
    }
    for (std::int32_t i = 0; i < tile.length; ++i) {
      const std::int64_t row = tile.row + std::int64_t{i} * list.self_step;
      const Token& token = self_tokens.at(static_cast<std::size_t>(row));
      REQUIRE(token.sequence == tile.sequence);
      REQUIRE(token.position == tile.position + i);
      REQUIRE(tiled.insert(row).second);
    }
    REQUIRE(work <= last_work);
    last_work = work;
    REQUIRE((keep_empty || work > 0));
  }
  std::int64_t pairs = 0;
  for (std::size_t i = 0; i < self_tokens.size(); ++i) {
    bool seen = false;
    for (std::size_t j = 0; j < other_tokens.size(); ++j) {
      if (!sees(self_tokens[i], other_tokens[j])) continue;
      seen = true;
      ++pairs;
      const auto found = visited.find({static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)});
      REQUIRE(found != visited.end());
      REQUIRE(found->second == 1);
    }
    const bool has_tile = tiled.count(static_cast<std::int64_t>(i)) == 1;
    if (seen || (keep_empty && self_tokens[i].sequence >= 0)) REQUIRE(has_tile);
  }
  REQUIRE(list.pairs == pairs);
}

TEST_CASE("Work lists of random layouts and bands visit every visible pair once") {
  Random random(20);
  for (int round = 0; round < 400; ++round) {
    const int sequences = Between(random, 1, 4), longest = Between(random, 1, 40);
    const Layout query = RandomLayout(random, sequences, longest),
                 key = RandomLayout(random, sequences, longest);
    std::vector<Band> bands;
    for (int s = 0; s < sequences; ++s) {
      bands.push_back(RandomBand(random, longest));
      bands.back().diagonal = Between(random, -longest, longest);
    }
    const int tile_rows = Between(random, 1, 16), rest_step = Between(random, 0, tile_rows);
    INFO("round " << round);
    std::int64_t pairs = 0;
    for (const Token& q : TokensOf(query)) {
      for (const Token& k : TokensOf(key)) pairs += Sees(q, k, bands);
    }
    REQUIRE(CountPairs(query, key, bands) == pairs);
    REQUIRE(SeesAny(query, key, bands) == (pairs > 0));
    for (const Side side : {Side::kQuery, Side::kKey}) {
      for (const bool keep_empty : {false, true})
        CheckWorkList(side, query, key, bands, tile_rows, keep_empty, rest_step);
    }
  }
}

TEST_CASE("Work lists of the layouts of ranks visit every visible pair once") {
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd);
  const auto mask = GENERATE(AttnMaskType::kNoMask, AttnMaskType::kCausal, AttnMaskType::kCausalBottomRight);
  const auto left = GENERATE(-1, 0, 7);
  AttentionSpec spec;
  spec.mask = mask;
  spec.window_left = left;
  const int world = 3;
  std::vector<Layout> parts;
  for (int rank = 0; rank < world; ++rank)
    parts.push_back(RankLayout(format, UniformSequences(2, 42), world, rank));
  const Layout all = Concatenate(parts);
  const std::vector<Band> bands(2, BandOf(spec, 36, 42));
  for (int rank = 0; rank < world; ++rank) {
    const Layout query = RankLayout(format, UniformSequences(2, 36), world, rank);
    for (const Side side : {Side::kQuery, Side::kKey}) {
      for (const Layout& key : parts) CheckWorkList(side, query, key, bands, 8, true, 4);
      CheckWorkList(side, query, all, bands, 8, false, 0);
    }
  }
}

TEST_CASE("Segments with consecutive rows and positions are joined to one range") {
  // The two chunks of rank 1 have consecutive positions and rows. In the layout of both ranks no other chunks
  // have.
  const Layout query = GlobalLayout(QkvFormat::kBshd, UniformSequences(1, 4));
  const std::vector<Band> open{{-kOpen, kOpen}};
  const WorkList middle = BuildWorkList(
      Side::kQuery, query, RankLayout(QkvFormat::kBshd, UniformSequences(1, 16), 2, 1), open, 4, false);
  CHECK(middle.ranges == std::vector<Range>{{0, 4, 8}});
  const Layout all = Concatenate({RankLayout(QkvFormat::kBshd, UniformSequences(1, 16), 2, 0),
                                  RankLayout(QkvFormat::kBshd, UniformSequences(1, 16), 2, 1)});
  const WorkList whole = BuildWorkList(Side::kQuery, query, all, open, 4, false);
  CHECK(whole.ranges == std::vector<Range>{{0, 0, 4}, {8, 4, 8}, {4, 12, 4}});
}

TEST_CASE("Ranges are in the order of the blocks of keys, and none is in two") {
  // The second block begins where the first one ends, in rows and in positions.
  Layout key{{{0, 0, 4, 8}, {0, 4, 4, 0}, {0, 8, 4, 4}, {0, 12, 4, 12}}, 16, 1};
  key.block_rows = 8;
  const Layout query{{{0, 0, 16, 0}}, 16, 1};
  WorkList list = BuildWorkList(Side::kQuery, query, key, {{-kOpen, kOpen}}, 16, true);
  CHECK(list.ranges == std::vector<Range>{{8, 0, 4}, {0, 4, 8}, {12, 12, 4}});
  OrderByBlock(list, key, false);
  CHECK(list.ranges == std::vector<Range>{{0, 4, 8}, {8, 0, 4}, {12, 12, 4}});
  OrderByBlock(list, key, true);
  CHECK(list.ranges == std::vector<Range>{{8, 0, 4}, {12, 12, 4}, {0, 4, 8}});
  key.block_rows = 4;
  CHECK(BuildWorkList(Side::kQuery, query, key, {{-kOpen, kOpen}}, 16, true).ranges ==
        std::vector<Range>{{8, 0, 4}, {0, 4, 4}, {4, 8, 4}, {12, 12, 4}});
}

TEST_CASE("Tiles are sorted by work, largest first, and tiles of equal work keep their order") {
  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(2, 12));
  const WorkList list = BuildWorkList(Side::kQuery, layout, layout, {{-kOpen, 0}, {-kOpen, 0}}, 4, true);
  std::vector<std::pair<int, int>> order;
  for (const Tile& tile : list.tiles) order.emplace_back(tile.sequence, tile.position);
  CHECK(order == std::vector<std::pair<int, int>>{{0, 8}, {1, 8}, {0, 4}, {1, 4}, {0, 0}, {1, 0}});
  CHECK(list.pairs == 2 * 78);
}

TEST_CASE("The count of pairs of long sequences does not overflow") {
  constexpr std::int64_t length = std::int64_t{1} << 24;
  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(1, length));
  CHECK(BuildWorkList(Side::kQuery, layout, layout, {{-kOpen, 0}}, 1 << 20, false).pairs ==
        length * (length + 1) / 2);
  CHECK(CountPairs(layout, layout, {{-kOpen, 0}}) == length * (length + 1) / 2);
  CHECK(BuildWorkList(Side::kKey, layout, layout, {{-kOpen, kOpen}}, 1 << 20, false).pairs ==
        length * length);
  CHECK(BuildWorkList(Side::kKey, layout, layout, {{-1, 1}}, 1 << 20, false).pairs == 3 * length - 2);
}

TEST_CASE("A sequence without a band is refused") {
  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(2, 4));
  CHECK_THROWS_AS(BuildWorkList(Side::kQuery, layout, layout, {{-kOpen, 0}}, 4, true), RuntimeError);
}

}  // namespace
