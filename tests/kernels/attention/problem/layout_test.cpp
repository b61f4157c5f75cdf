// Layouts: every token is on exactly one rank, in the row that DualChunkSwap and the format define.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "kernels/attention/layout.h"
#include "kernels/error.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/host/naive_attention.h"

namespace {

using namespace cppool::kernels;
using cppool::test::Token;
using cppool::test::TokensOf;

// Sequences of `length` tokens, padded to `room`, in a buffer of `rows` rows, which may be more than the sum
// of `room`.
Sequences Packed(std::vector<std::int64_t> length, std::vector<std::int64_t> room, std::int64_t rows) {
  return {std::move(length), std::move(room), rows};
}

// Checks that segments are sorted and inside the buffer, and that no row is in two segments.
void CheckSound(const Layout& layout) {
  std::set<std::int64_t> rows;
  const Segment* last = nullptr;
  for (const Segment& s : layout.segments) {
    if (last) {
      const bool after = s.sequence > last->sequence ||
                         (s.sequence == last->sequence && s.position >= last->position + last->length);
      REQUIRE(after);
    }
    last = &s;
    for (std::int64_t i = 0; i < s.length; ++i) {
      const std::int64_t row = s.row + i * layout.row_step;
      REQUIRE(row >= 0);
      REQUIRE(row < layout.rows);
      REQUIRE(rows.insert(row).second);
    }
  }
}

TEST_CASE("The global layout of bshd and sbhd") {
  const Layout bshd = GlobalLayout(QkvFormat::kBshd, UniformSequences(2, 3));
  CHECK(bshd.segments == std::vector<Segment>{{0, 0, 3, 0}, {1, 0, 3, 3}});
  CHECK(bshd.rows == 6);
  CHECK(bshd.row_step == 1);
  const Layout sbhd = GlobalLayout(QkvFormat::kSbhd, UniformSequences(2, 3));
  CHECK(sbhd.segments == std::vector<Segment>{{0, 0, 3, 0}, {1, 0, 3, 1}});
  CHECK(sbhd.rows == 6);
  CHECK(sbhd.row_step == 2);
}

TEST_CASE("Rank r of W holds chunks r and 2W-1-r") {
  const Layout bshd = RankLayout(QkvFormat::kBshd, UniformSequences(2, 16), 2, 1);
  CHECK(bshd.segments == std::vector<Segment>{{0, 4, 4, 0}, {0, 8, 4, 4}, {1, 4, 4, 8}, {1, 8, 4, 12}});
  CHECK(bshd.rows == 16);
  CHECK(bshd.row_step == 1);
  const Layout sbhd = RankLayout(QkvFormat::kSbhd, UniformSequences(3, 16), 2, 0);
  CHECK(sbhd.segments ==
        std::vector<Segment>{
            {0, 0, 4, 0}, {0, 12, 4, 12}, {1, 0, 4, 1}, {1, 12, 4, 13}, {2, 0, 4, 2}, {2, 12, 4, 14}});
  CHECK(sbhd.rows == 24);
  CHECK(sbhd.row_step == 3);
}

// Checks that each token is held once, by the rank of its chunk, in the row that the format defines.
void CheckRanks(QkvFormat format, const Sequences& sequences, int world) {
  const auto batch = static_cast<std::int64_t>(sequences.length.size());
  std::map<std::pair<int, int>, int> holders;
  for (int rank = 0; rank < world; ++rank) {
    const Layout layout = RankLayout(format, sequences, world, rank);
    CheckSound(layout);
    REQUIRE(layout.rows == sequences.rows / world);
    const std::vector<Token> tokens = TokensOf(layout);
    std::set<std::int64_t> padding;
    for (const std::int64_t row : PaddingRows(layout)) REQUIRE(padding.insert(row).second);
    for (std::int64_t row = 0; row < layout.rows; ++row) {
      const Token token = tokens[static_cast<std::size_t>(row)];
      REQUIRE(padding.count(row) == (token.sequence < 0 ? 1u : 0u));
      if (token.sequence < 0) continue;
      const auto sequence = static_cast<std::size_t>(token.sequence);
      REQUIRE(token.position < sequences.length[sequence]);
      ++holders[{token.sequence, token.position}];
      const std::int64_t size = sequences.room[sequence] / (2 * world), chunk = token.position / size;
      REQUIRE(std::min<std::int64_t>(chunk, 2 * world - 1 - chunk) == rank);
      const std::int64_t place = token.position % size + (chunk == rank ? 0 : size);
      std::int64_t begin = 0;  // first row of the sequence on this rank
      for (std::size_t i = 0; i < sequence; ++i) begin += sequences.room[i] / world;
      REQUIRE(row == (format == QkvFormat::kSbhd ? place * batch + token.sequence : begin + place));
    }
  }
  std::size_t total = 0;
  for (std::size_t i = 0; i < sequences.length.size(); ++i)
    total += static_cast<std::size_t>(sequences.length[i]);
  REQUIRE(holders.size() == total);
  for (const auto& [token, count] : holders) REQUIRE(count == 1);
}

TEST_CASE("Every token is held once, by the rank of its chunk") {
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd);
  const auto world = GENERATE(1, 2, 3, 4, 6, 8);
  const std::int64_t unit = 2 * world;
  INFO("world " << world << ", format " << static_cast<int>(format));
  for (const std::int64_t batch : {1, 2, 5}) {
    for (const std::int64_t chunk : {1, 3, 8}) {
      CheckRanks(format, UniformSequences(batch, chunk * unit), world);
    }
  }
  if (format == QkvFormat::kThd) {
    // First chunks of several sizes, an empty sequence, padding after tokens and unused rows at the end; then
    // only unused rows.
    CheckRanks(
        format,
        Packed({3 * unit, 0, 1, unit + 1, 2 * unit - 1}, {3 * unit, 0, unit, 2 * unit, 3 * unit}, 20 * unit),
        world);
    CheckRanks(format, Packed({0, 0}, {0, 0}, 2 * unit), world);
  } else {
    const std::int64_t room = 3 * unit;
    CheckRanks(format, Packed({room, 0, 1, unit + 1, room - 1}, {room, room, room, room, room}, 5 * room),
               world);
  }
}

TEST_CASE("Packed sequences follow each other, each with its own chunks") {
  const Sequences sequences = Packed({8, 0, 3, 5}, {8, 0, 4, 8}, 32);
  const Layout global = GlobalLayout(QkvFormat::kThd, sequences);
  CHECK(global.segments == std::vector<Segment>{{0, 0, 8, 0}, {2, 0, 3, 8}, {3, 0, 5, 12}});
  CHECK(global.rows == 32);
  CHECK(global.row_step == 1);
  CHECK(PaddingRows(global) ==
        std::vector<std::int64_t>{11, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31});
  const Layout first = RankLayout(QkvFormat::kThd, sequences, 2, 0),
               second = RankLayout(QkvFormat::kThd, sequences, 2, 1);
  // The last chunk of the third sequence and of the fourth hold no token.
  CHECK(first.segments == std::vector<Segment>{{0, 0, 2, 0}, {0, 6, 2, 2}, {2, 0, 1, 4}, {3, 0, 2, 6}});
  CHECK(second.segments ==
        std::vector<Segment>{
            {0, 2, 2, 0}, {0, 4, 2, 2}, {2, 1, 1, 4}, {2, 2, 1, 5}, {3, 2, 2, 6}, {3, 4, 1, 8}});
  CHECK(first.rows == 16);
  CHECK(PaddingRows(first) == std::vector<std::int64_t>{5, 8, 9, 10, 11, 12, 13, 14, 15});
}

TEST_CASE("Padded sequences in bshd and sbhd have segments for tokens and padding rows") {
  const Sequences sequences = Packed({3, 8}, {8, 8}, 16);
  const Layout bshd = RankLayout(QkvFormat::kBshd, sequences, 2, 0);
  CHECK(bshd.segments == std::vector<Segment>{{0, 0, 2, 0}, {1, 0, 2, 4}, {1, 6, 2, 6}});
  CHECK(PaddingRows(bshd) == std::vector<std::int64_t>{2, 3});
  const Layout sbhd = RankLayout(QkvFormat::kSbhd, sequences, 2, 1);
  CHECK(sbhd.segments == std::vector<Segment>{{0, 2, 1, 0}, {1, 2, 2, 1}, {1, 4, 2, 5}});
  CHECK(PaddingRows(sbhd) == std::vector<std::int64_t>{2, 4, 6});
}

TEST_CASE("The layout of the only rank is the global layout") {
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
    const Layout rank = RankLayout(format, UniformSequences(3, 7), 1, 0),
                 global = GlobalLayout(format, UniformSequences(3, 7));
    CHECK(rank.segments == global.segments);
    CHECK(rank.rows == global.rows);
    CHECK(rank.row_step == global.row_step);
  }
}

TEST_CASE("A length that is not a multiple of 2W is refused") {
  CHECK_THROWS_AS(RankLayout(QkvFormat::kBshd, UniformSequences(1, 12), 4, 0), RuntimeError);
  CHECK_THROWS_AS(RankLayout(QkvFormat::kThd, Packed({8, 3}, {8, 4}, 16), 4, 0), RuntimeError);
  CHECK_NOTHROW(RankLayout(QkvFormat::kBshd, UniformSequences(1, 16), 4, 0));
}

TEST_CASE("An empty sequence has no segments") {
  CHECK(GlobalLayout(QkvFormat::kBshd, UniformSequences(4, 0)).segments.empty());
  CHECK(RankLayout(QkvFormat::kSbhd, UniformSequences(4, 0), 2, 1).segments.empty());
}

TEST_CASE("Concatenate appends layouts") {
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd);
  const int world = 4;
  std::vector<Layout> parts;
  for (int rank = 0; rank < world; ++rank)
    parts.push_back(RankLayout(format, UniformSequences(3, 24), world, rank));
  const Layout whole = Concatenate(parts);
  CheckSound(whole);
  CHECK(whole.rows == 3 * 24);
  CHECK(whole.row_step == parts[0].row_step);
  CHECK(whole.segments.size() == 3 * 2 * world);
  const std::vector<Token> tokens = TokensOf(whole);
  for (int rank = 0; rank < world; ++rank) {
    const std::vector<Token> part = TokensOf(parts[static_cast<std::size_t>(rank)]);
    for (std::size_t row = 0; row < part.size(); ++row) {
      const Token& token = tokens[static_cast<std::size_t>(rank) * 18 + row];
      REQUIRE(token.sequence == part[row].sequence);
      REQUIRE(token.position == part[row].position);
    }
  }
  CHECK(Concatenate({}).rows == 0);
  CHECK_THROWS_AS(Concatenate({GlobalLayout(QkvFormat::kSbhd, UniformSequences(2, 4)),
                               GlobalLayout(QkvFormat::kSbhd, UniformSequences(3, 4))}),
                  RuntimeError);
}

TEST_CASE("RowMap finds each token's row") {
  const auto from_format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd);
  const auto to_format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd);
  const int world = 3;
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{30, 30, 30, 30}, std::vector<std::int64_t>{30, 0, 1, 17}}) {
    const std::vector<std::int64_t> rooms(4, 30);
    const Sequences sequences = Packed(lengths, rooms, 120);
    const Layout global = GlobalLayout(to_format, sequences);
    const std::vector<Token> target = TokensOf(global);
    std::vector<Layout> parts;
    for (int rank = 0; rank < world; ++rank) parts.push_back(RankLayout(from_format, sequences, world, rank));
    parts.push_back(Concatenate(parts));
    const auto check = [](const Layout& from, const Layout& to) {
      const std::vector<Token> here = TokensOf(from), there = TokensOf(to);
      const std::vector<std::int64_t> map = RowMap(from, to);
      REQUIRE(map.size() == here.size());
      for (std::size_t row = 0; row < map.size(); ++row) {
        REQUIRE((map[row] < 0) == (here[row].sequence < 0));
        if (map[row] < 0) continue;
        const Token& token = there.at(static_cast<std::size_t>(map[row]));
        REQUIRE(token.sequence == here[row].sequence);
        REQUIRE(token.position == here[row].position);
      }
    };
    for (const Layout& layout : parts) check(layout, global);
    check(global, parts.back());  // whole sequences to parts, which divide segments
    CHECK_THROWS_AS(RowMap(global, parts[0]), RuntimeError);
    CHECK(RowMap(Layout{{}, 2, 1}, global) == std::vector<std::int64_t>{-1, -1});  // rows without a token
  }
}

}  // namespace
