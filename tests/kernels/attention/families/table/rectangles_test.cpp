// Rectangles against brute force, over random layouts and bands and over those of the schedules.
#include "kernels/attention/families/table/rectangles.h"
#include "kernels/attention/families/table/packed_sequences.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/attention/families/host/naive_attention.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::kernels::table;
using cppool::test::Sees;
using cppool::test::Token;
using cppool::test::TokensOf;

using Random = std::mt19937;
using Pairs = std::map<std::pair<std::int64_t, std::int64_t>, int>;  // (query row, key row): how often

int Between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// Sequences cut into pieces, some of which are left out; the pieces lie in random order, often without holes.
Layout RandomLayout(Random& random, int sequences, int longest) {
  Layout layout;
  layout.row_step = Between(random, 1, 2);
  for (int sequence = 0; sequence < sequences; ++sequence) {
    const int length = Between(random, 0, longest);
    for (int position = 0; position < length;) {
      const int count = std::min(Between(random, 1, std::max(1, longest / 2)), length - position);
      if (Between(random, 0, 4) != 0) layout.segments.push_back({sequence, position, count, 0});
      position += count;
    }
  }
  std::vector<std::size_t> order(layout.segments.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (Between(random, 0, 1) == 0) std::shuffle(order.begin(), order.end(), random);
  std::int64_t row = 0;
  for (const std::size_t i : order) {
    if (Between(random, 0, 4) == 0) row += layout.row_step;
    layout.segments[i].row = row;
    row += std::int64_t{layout.segments[i].length} * layout.row_step;
  }
  layout.rows = row;
  return layout;
}

Band RandomBand(Random& random, int longest) {
  const int low = Between(random, -longest, longest);
  switch (Between(random, 0, 3)) {
    case 0:
      return {-kOpen, kOpen};
    case 1:
      return {-kOpen, low};
    case 2:
      return {low, kOpen};
    default:
      return {low, low + Between(random, -1, longest)};
  }
}

Pairs PairsOf(const std::vector<Rectangle>& rectangles, const Layout& query, const Layout& key) {
  Pairs pairs;
  for (const Rectangle& r : rectangles) {
    REQUIRE(r.queries > 0);
    REQUIRE(r.keys > 0);
    REQUIRE((r.batch == 1 || (r.q_stride > 0 && r.k_stride > 0)));
    std::vector<bool> seen(static_cast<std::size_t>(r.keys));
    for (std::int64_t b = 0; b < r.batch; ++b) {
      for (std::int64_t i = 0; i < r.queries; ++i) {
        bool sees = false;
        for (std::int64_t j = 0; j < r.keys; ++j) {
          if (j - i < r.low || j - i > r.high) continue;
          sees = seen[static_cast<std::size_t>(j)] = true;
          ++pairs[{r.q_row + b * r.q_stride + i * query.row_step,
                   r.k_row + b * r.k_stride + j * key.row_step}];
        }
        REQUIRE(sees);
      }
    }
    REQUIRE(std::find(seen.begin(), seen.end(), false) == seen.end());
    // Both anchors have windows that are not negative.
    REQUIRE(r.low <= std::min<std::int64_t>(0, r.keys - r.queries));
    REQUIRE(r.high >= std::max<std::int64_t>(0, r.keys - r.queries));
  }
  return pairs;
}

Pairs Wanted(const Layout& query, const Layout& key, const std::vector<Band>& bands) {
  Pairs pairs;
  const std::vector<Token> queries = TokensOf(query), keys = TokensOf(key);
  for (std::size_t i = 0; i < queries.size(); ++i) {
    for (std::size_t j = 0; j < keys.size(); ++j) {
      if (Sees(queries[i], keys[j], bands))
        pairs[{static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)}] = 1;
    }
  }
  return pairs;
}

// Each rectangle cut further, as often as that is possible.
template <typename Split>
std::vector<Rectangle> SplitAll(const std::vector<Rectangle>& rectangles, Split&& split) {
  std::vector<Rectangle> parts;
  for (const Rectangle& rectangle : rectangles) {
    const std::vector<Rectangle> cut = split(rectangle);
    if (cut.empty()) {
      parts.push_back(rectangle);
    } else {
      for (const Rectangle& part : SplitAll(cut, split)) parts.push_back(part);
    }
  }
  return parts;
}

// Rectangles that are cut by position say for every pair which tokens it is of.
void CheckPositions(const std::vector<Rectangle>& rectangles, const Layout& query, const Layout& key,
                    const std::vector<Band>& bands) {
  const std::vector<Token> queries = TokensOf(query), keys = TokensOf(key);
  bool right = true;
  for (const Rectangle& r : rectangles) {
    for (std::int64_t b = 0; b < r.batch; ++b) {
      const std::int64_t sequence = r.sequence + b * r.sequence_stride;
      right = right && r.diagonal == bands[static_cast<std::size_t>(sequence)].diagonal;
      const auto is = [&](const std::vector<Token>& tokens, std::int64_t row, std::int64_t position) {
        const Token& token = tokens[static_cast<std::size_t>(row)];
        right = right && token.sequence == sequence && token.position == position;
      };
      for (std::int64_t i = 0; i < r.queries; ++i)
        is(queries, r.q_row + b * r.q_stride + i * query.row_step, r.q_position + i);
      for (std::int64_t j = 0; j < r.keys; ++j)
        is(keys, r.k_row + b * r.k_stride + j * key.row_step, r.k_position + j);
    }
  }
  REQUIRE(right);
}

// Packed sequences under one pair of windows see what their rectangles say, and share no rows.
void CheckPacked(const std::vector<Rectangle>& rectangles, const Layout& query, const Layout& key,
                 const Pairs& wanted) {
  for (const cppool_attention_anchor anchor : {CPPOOL_TOP_LEFT, CPPOOL_BOTTOM_RIGHT}) {
    std::vector<Rectangle> all;
    bool right = true;
    for (const PackedSequences& packed : Pack(rectangles, anchor)) {
      std::int64_t q_end = 0, k_end = 0;
      for (Rectangle r : packed.each) {
        right = right && r.batch == 1 && r.q_row >= q_end && r.k_row >= k_end;
        q_end = r.q_row + r.queries;
        k_end = r.k_row + r.keys;
        const auto diagonal = static_cast<std::int32_t>(anchor == CPPOOL_TOP_LEFT ? 0 : r.keys - r.queries);
        r.low = packed.window_left < 0 ? -kOpen : diagonal - static_cast<std::int32_t>(packed.window_left);
        r.high = packed.window_right < 0 ? kOpen : diagonal + static_cast<std::int32_t>(packed.window_right);
        all.push_back(r);
      }
    }
    REQUIRE(right);
    REQUIRE(PairsOf(all, query, key) == wanted);
  }
}

void Check(const Layout& query, const Layout& key, const std::vector<Band>& bands) {
  const Pairs wanted = Wanted(query, key, bands);
  const std::vector<Rectangle> rectangles = CutIntoRectangles(query, key, bands);
  REQUIRE(PairsOf(rectangles, query, key) == wanted);
  const auto wide =
      SplitAll(rectangles, [&](const Rectangle& r) { return SplitTall(r, query.row_step, key.row_step); });
  REQUIRE(PairsOf(wide, query, key) == wanted);
  for (const Rectangle& r : wide) REQUIRE((r.full() || r.queries <= r.keys));
  const auto square =
      SplitAll(rectangles, [&](const Rectangle& r) { return SplitSquare(r, query.row_step, key.row_step); });
  REQUIRE(PairsOf(square, query, key) == wanted);
  for (const Rectangle& r : square)
    REQUIRE((r.low != -kOpen || r.high == kOpen || (r.high == 0 && r.queries == r.keys)));
  const std::vector<Rectangle> placed = CutIntoRectangles(query, key, bands, true);
  REQUIRE(PairsOf(placed, query, key) == wanted);
  CheckPositions(placed, query, key, bands);
  CheckPositions(
      SplitAll(placed, [&](const Rectangle& r) { return SplitTall(r, query.row_step, key.row_step); }), query,
      key, bands);
  CheckPositions(
      SplitAll(placed, [&](const Rectangle& r) { return SplitSquare(r, query.row_step, key.row_step); }),
      query, key, bands);
  if (query.row_step == 1 && key.row_step == 1) CheckPacked(rectangles, query, key, wanted);
}

std::vector<Layout> KeysOfAllRanks(QkvFormat format, const Sequences& sequences, int world) {
  std::vector<Layout> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(RankLayout(format, sequences, world, rank));
  return parts;
}

}  // namespace

TEST_CASE("rectangles hold exactly the visible pairs of random layouts") {
  Random random(7);
  for (int i = 0; i < 4000; ++i) {
    const int sequences = Between(random, 1, 3), longest = Between(random, 1, 14);
    const Layout query = RandomLayout(random, sequences, longest),
                 key = RandomLayout(random, sequences, longest);
    std::vector<Band> bands;
    for (int s = 0; s < sequences; ++s) {
      bands.push_back(RandomBand(random, longest));
      bands.back().diagonal = Between(random, 0, 1);
    }
    INFO("layout " << i);
    Check(query, key, bands);
  }
}

TEST_CASE("rectangles of the schedules' blocks hold exactly the visible pairs") {
  const QkvFormat format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd);
  const int world = GENERATE(1, 2, 4, 8);
  const AttnMaskType mask =
      GENERATE(AttnMaskType::kPaddingCausal, AttnMaskType::kPadding, AttnMaskType::kPaddingCausalBottomRight);
  AttentionSpec spec;
  spec.format = format;
  spec.batch = 4;
  spec.seqlen_q = 4 * world;
  spec.seqlen_kv = GENERATE(4, 6) * world;
  spec.mask = mask;
  spec.window_left = GENERATE(-1, 3);
  DrawSequences(spec, world);
  const std::vector<Layout> keys = KeysOfAllRanks(format, spec.keys, world);
  for (int rank = 0; rank < world; ++rank) {
    const Layout query = RankLayout(format, spec.queries, world, rank);
    for (const Layout& key : keys) Check(query, key, BandsOf(spec));
    Check(query, Concatenate(keys), BandsOf(spec));
  }
}

TEST_CASE("a block of a ring is one rectangle under a causal mask and under none") {
  const int world = GENERATE(2, 4, 8);
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd}) {
    const Sequences sequences = UniformSequences(3, 8 * world);
    for (int rank = 0; rank < world; ++rank) {
      const Layout query = RankLayout(format, sequences, world, rank);
      for (int other = 0; other < world; ++other) {
        const Layout key = RankLayout(format, sequences, world, other);
        const auto causal = CutIntoRectangles(query, key, std::vector<Band>(3, Band{-kOpen, 0}));
        REQUIRE(causal.size() == 1);
        CHECK(causal[0].batch == 3);
        CHECK(causal[0].full() == (rank != other));
        CHECK(causal[0].queries == (rank < other ? 4 : 8));
        CHECK(causal[0].keys == (rank > other ? 4 : 8));
        const auto all = CutIntoRectangles(query, key, std::vector<Band>(3, Band{-kOpen, kOpen}));
        REQUIRE(all.size() == 1);
        CHECK(all[0].full());
      }
    }
  }
}

TEST_CASE("an exchange of heads and gathered keys need few rectangles under a causal mask") {
  const int world = GENERATE(2, 4, 8);
  const Sequences sequences = UniformSequences(2, 8 * world);
  const std::vector<Layout> ranks = KeysOfAllRanks(QkvFormat::kBshd, sequences, world);
  const std::vector<Band> causal(2, Band{-kOpen, 0});
  for (const Layout& query : ranks)
    CHECK(CutIntoRectangles(query, Concatenate(ranks), causal).size() <= static_cast<std::size_t>(world));
  const Layout all = Concatenate(ranks);
  CHECK(CutIntoRectangles(all, all, causal).size() == static_cast<std::size_t>(world * world));
}

TEST_CASE("equal rectangles of different sequences have a batch where their positions are the same") {
  const Sequences sequences = UniformSequences(3, 16);
  const Layout layout = RankLayout(QkvFormat::kThd, sequences, 2, 0);
  const std::vector<Band> causal(3, Band{-kOpen, 0});
  const auto placed = CutIntoRectangles(layout, layout, causal, true);
  REQUIRE(placed.size() == 3);  // two halves, and one that is full
  for (const Rectangle& r : placed) {
    CHECK(r.batch == 3);
    CHECK(r.sequence_stride == 1);
  }
  std::vector<Band> turned = causal;
  turned[1].diagonal = 5;
  CHECK(CutIntoRectangles(layout, layout, turned, true).size() > 3);
}

TEST_CASE("packed sequences of different lengths are few calls") {
  Sequences sequences = UniformSequences(5, 16);
  sequences.length = {16, 9, 1, 12, 16};
  const std::vector<Band> causal(5, Band{-kOpen, 0});
  for (const int rank : {0, 1}) {
    const Layout query = RankLayout(QkvFormat::kThd, sequences, 2, rank);
    for (const int other : {0, 1}) {
      const Layout key = RankLayout(QkvFormat::kThd, sequences, 2, other);
      CHECK(Pack(CutIntoRectangles(query, key, causal), CPPOOL_TOP_LEFT).size() == 1);
    }
  }
}

TEST_CASE("a block that sees nothing has no rectangles") {
  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(2, 4));
  CHECK(CutIntoRectangles(layout, layout, std::vector<Band>(2, Band{3, 2})).empty());
  CHECK(CutIntoRectangles(layout, layout, std::vector<Band>(2, Band{4, kOpen})).empty());
}
