// Who holds which tokens: every token once over the ranks, where DualChunkSwap and the formats put it.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "catch.h"
#include "kernels/attention/layout.h"
#include "kernels/error.h"
#include "naive_attention.h"

namespace {

using namespace cppool::kernels;
using cppool::test::Token;
using cppool::test::TokensOf;

// Segments sorted, inside the buffer, no row held twice.
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
  const Layout bshd = GlobalLayout(QkvFormat::kBshd, 2, 3);
  CHECK(bshd.segments == std::vector<Segment>{{0, 0, 3, 0}, {1, 0, 3, 3}});
  CHECK(bshd.rows == 6);
  CHECK(bshd.row_step == 1);
  const Layout sbhd = GlobalLayout(QkvFormat::kSbhd, 2, 3);
  CHECK(sbhd.segments == std::vector<Segment>{{0, 0, 3, 0}, {1, 0, 3, 1}});
  CHECK(sbhd.rows == 6);
  CHECK(sbhd.row_step == 2);
}

TEST_CASE("Rank r of W holds chunks r and 2W-1-r") {
  const Layout bshd = RankLayout(QkvFormat::kBshd, 2, 16, 2, 1);
  CHECK(bshd.segments == std::vector<Segment>{{0, 4, 4, 0}, {0, 8, 4, 4}, {1, 4, 4, 8}, {1, 8, 4, 12}});
  CHECK(bshd.rows == 16);
  CHECK(bshd.row_step == 1);
  const Layout sbhd = RankLayout(QkvFormat::kSbhd, 3, 16, 2, 0);
  CHECK(sbhd.segments ==
        std::vector<Segment>{
            {0, 0, 4, 0}, {0, 12, 4, 12}, {1, 0, 4, 1}, {1, 12, 4, 13}, {2, 0, 4, 2}, {2, 12, 4, 14}});
  CHECK(sbhd.rows == 24);
  CHECK(sbhd.row_step == 3);
}

TEST_CASE("Every token is held once, by the rank of its chunk") {
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd);
  const auto world = GENERATE(1, 2, 3, 4, 6, 8);
  const auto batch = GENERATE(1, 2, 5);
  const std::int64_t seqlen = 2 * world * GENERATE(1, 3, 8);
  INFO("world " << world << ", batch " << batch << ", " << seqlen << " tokens");
  std::map<std::pair<int, int>, int> holders;
  for (int rank = 0; rank < world; ++rank) {
    const Layout layout = RankLayout(format, batch, seqlen, world, rank);
    CheckSound(layout);
    CHECK(layout.rows == batch * seqlen / world);
    const std::vector<Token> tokens = TokensOf(layout);
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      const Token token = tokens[row];
      REQUIRE(token.sequence >= 0);  // no row is left over
      ++holders[{token.sequence, token.position}];
      const std::int64_t chunk = token.position / (seqlen / (2 * world));
      REQUIRE(std::min<std::int64_t>(chunk, 2 * world - 1 - chunk) == rank);
      // The dense tensor [batch, local tokens] or [local tokens, batch] in rows.
      const auto index = static_cast<std::int64_t>(row);
      REQUIRE(token.sequence == (format == QkvFormat::kBshd ? index / (seqlen / world) : index % batch));
    }
  }
  REQUIRE(holders.size() == static_cast<std::size_t>(batch * seqlen));
  for (const auto& [token, count] : holders) REQUIRE(count == 1);
}

TEST_CASE("A world of one rank is the global layout") {
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
    const Layout rank = RankLayout(format, 3, 7, 1, 0), global = GlobalLayout(format, 3, 7);
    CHECK(rank.segments == global.segments);
    CHECK(rank.rows == global.rows);
    CHECK(rank.row_step == global.row_step);
  }
}

TEST_CASE("A length that is not a multiple of 2W is refused") {
  CHECK_THROWS_AS(RankLayout(QkvFormat::kBshd, 1, 12, 4, 0), RuntimeError);
  CHECK_NOTHROW(RankLayout(QkvFormat::kBshd, 1, 16, 4, 0));
}

TEST_CASE("An empty sequence has no segments") {
  CHECK(GlobalLayout(QkvFormat::kBshd, 4, 0).segments.empty());
  CHECK(RankLayout(QkvFormat::kSbhd, 4, 0, 2, 1).segments.empty());
}

TEST_CASE("Parts end to end") {
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd);
  const int world = 4;
  std::vector<Layout> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(RankLayout(format, 3, 24, world, rank));
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
  CHECK_THROWS_AS(Concatenate({GlobalLayout(QkvFormat::kSbhd, 2, 4), GlobalLayout(QkvFormat::kSbhd, 3, 4)}),
                  RuntimeError);
}

TEST_CASE("RowMap finds each token's row") {
  const auto from_format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd);
  const auto to_format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd);
  const int world = 3;
  const Layout global = GlobalLayout(to_format, 4, 30);
  const std::vector<Token> target = TokensOf(global);
  std::vector<Layout> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(RankLayout(from_format, 4, 30, world, rank));
  parts.push_back(Concatenate(parts));
  for (const Layout& layout : parts) {
    const std::vector<Token> tokens = TokensOf(layout);
    const std::vector<std::int64_t> map = RowMap(layout, global);
    REQUIRE(map.size() == tokens.size());
    for (std::size_t row = 0; row < map.size(); ++row) {
      const Token& token = target[static_cast<std::size_t>(map[row])];
      REQUIRE(token.sequence == tokens[row].sequence);
      REQUIRE(token.position == tokens[row].position);
    }
  }
  // And from whole sequences into parts, where segments are cut.
  const std::vector<Token> cut = TokensOf(parts.back());
  const std::vector<std::int64_t> back = RowMap(global, parts.back());
  for (std::size_t row = 0; row < back.size(); ++row) {
    REQUIRE(cut[static_cast<std::size_t>(back[row])].position == target[row].position);
    REQUIRE(cut[static_cast<std::size_t>(back[row])].sequence == target[row].sequence);
  }
  CHECK_THROWS_AS(RowMap(global, parts[0]), RuntimeError);
  CHECK(RowMap(Layout{{}, 2, 1}, global) == std::vector<std::int64_t>{-1, -1});  // rows of no token
}

}  // namespace
