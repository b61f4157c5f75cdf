// The backward kernel's work list against every pair of tokens: which blocks of queries see which tiles of
// keys, and the order that turns rely on.
#include "kernels/attention/families/sm90/backward_list.h"

#include <algorithm>
#include <map>
#include <random>

#include "tests/catch.h"

namespace cppool::kernels::cuda::sm90::test {
namespace {

constexpr int kTileKeys = 6, kBlockRows = 4;

bool Sees(const QueryBlock& block, const KeyTile& tile) {
  for (int q = block.position; q < block.position + block.length; ++q)
    for (int k = tile.position; k < tile.position + tile.length; ++k)
      if (k - q >= tile.low && k - q <= tile.high) return true;
  return false;
}

// Segments of a few sequences, in order, some of them missing.
Layout RandomLayout(std::mt19937& random, int sequences, int step) {
  Layout layout;
  layout.row_step = step;
  std::int64_t row = 0;
  for (int sequence = 0; sequence < sequences; ++sequence) {
    int position = static_cast<int>(random() % 5);
    for (unsigned count = random() % 4; count > 0; --count) {
      const int length = static_cast<int>(random() % 20);
      layout.segments.push_back({sequence, position, length, row});
      position += length + static_cast<int>(random() % 2 * 9);
      row += std::int64_t{length} * step;
    }
  }
  layout.rows = row + step;
  return layout;
}

// The sequence of each block or tile, by its first row.
std::map<std::int64_t, int> SequenceOfRow(const Layout& layout) {
  std::map<std::int64_t, int> sequences;
  for (const Segment& segment : layout.segments)
    for (int i = 0; i < segment.length; ++i)
      sequences[segment.row + std::int64_t{i} * layout.row_step] = segment.sequence;
  return sequences;
}

}  // namespace

TEST_CASE("the backward list names the blocks that see each tile, and the order of a block's tiles") {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    CAPTURE(round);
    const int step = 1 + round % 2;
    const Layout query = RandomLayout(random, 3, step), key = RandomLayout(random, 3, step);
    std::vector<Band> bands;
    for (int i = 0; i < 3; ++i) {
      const int low = static_cast<int>(random() % 40) - 30;
      bands.push_back(random() % 3 == 0   ? Band{-kOpen, 0}
                      : random() % 3 == 0 ? Band{-kOpen, kOpen}
                                          : Band{low, low + static_cast<int>(random() % 25) - 2});
    }
    for (std::size_t i = 0; i < bands.size(); ++i) bands[i].diagonal = static_cast<int>(i) * 7;
    const BackwardList list = BuildBackwardList(query, key, bands, kTileKeys, kBlockRows);
    CHECK(static_cast<std::int64_t>(list.blocks.size()) == CountBlocks(query, kBlockRows));
    CHECK(static_cast<std::int64_t>(list.tiles.size()) == CountBlocks(key, kTileKeys));
    CHECK(BackwardListBytes(query, key, kTileKeys, kBlockRows) ==
          list.tiles.size() * (sizeof(KeyTile) + sizeof(KeyTileBias)) +
              list.blocks.size() * sizeof(QueryBlock));
    REQUIRE(list.tile_biases.size() == list.tiles.size());
    const auto block_sequences = SequenceOfRow(query), tile_sequences = SequenceOfRow(key);
    std::vector<int> added(list.blocks.size());  // tiles that have come, by block
    for (std::size_t t = 0; t < list.tiles.size(); ++t) {
      const KeyTile& tile = list.tiles[t];
      CHECK((static_cast<int>(t) < list.busy_tiles) == (tile.block_begin < tile.block_end));
      const int sequence = tile_sequences.at(std::int64_t{tile.token} * step + tile.member);
      CHECK(list.tile_biases[t].sequence == sequence);
      CHECK(list.tile_biases[t].diagonal == sequence * 7);
      for (std::size_t b = 0; b < list.blocks.size(); ++b) {
        const QueryBlock& block = list.blocks[b];
        const bool listed = static_cast<int>(b) >= tile.block_begin && static_cast<int>(b) < tile.block_end;
        const bool sees = block_sequences.at(std::int64_t{block.token} * step + block.member) == sequence &&
                          Sees(block, tile);
        CHECK(listed == sees);
        if (listed) CHECK(tile.ordinal - block.first_tile == added[b]++);  // its turn has come
      }
    }
  }
}

TEST_CASE(
    "a layout cut at multiples has the same tokens, and tiles that begin there or end at the first one") {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    CAPTURE(round);
    const Layout layout = RandomLayout(random, 3, 1 + round % 2), cut = CutAtMultiples(layout, 4);
    CHECK(cut.rows == layout.rows);
    CHECK(cut.row_step == layout.row_step);
    // Sequence and position by row.
    const auto tokens_of = [](const Layout& of) {
      std::map<std::int64_t, std::pair<int, int>> tokens;
      for (const Segment& segment : of.segments)
        for (int i = 0; i < segment.length; ++i)
          tokens[segment.row + std::int64_t{i} * of.row_step] = {segment.sequence, segment.position + i};
      return tokens;
    };
    CHECK(tokens_of(cut) == tokens_of(layout));
    for (const Segment& segment : cut.segments) {
      CHECK(segment.length > 0);
      CHECK(
          (segment.position % 4 == 0 || segment.position / 4 == (segment.position + segment.length - 1) / 4));
    }
  }
}

}  // namespace cppool::kernels::cuda::sm90::test
