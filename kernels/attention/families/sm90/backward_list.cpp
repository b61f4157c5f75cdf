#include "kernels/attention/families/sm90/backward_list.h"

#include <algorithm>
#include <string>

#include "kernels/error.h"

namespace cppool::kernels::cuda::sm90 {
namespace {

// Calls use(segment, first token of the piece, its length) for all pieces of at most `rows` tokens.
template <typename Use>
void ForPieces(const Layout& layout, int rows, const Use& use) {
  if (layout.rows > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "a buffer of " + std::to_string(layout.rows) + " rows");
  for (const Segment& segment : layout.segments)
    for (std::int32_t at = 0; at < segment.length; at += rows)
      use(segment, at, std::min(rows, segment.length - at));
}

std::int32_t TokenOf(const Layout& layout, const Segment& segment, std::int32_t at) {
  return static_cast<std::int32_t>(segment.row / layout.row_step) + at;
}
std::int32_t MemberOf(const Layout& layout, const Segment& segment) {
  return static_cast<std::int32_t>(segment.row % layout.row_step);
}

// Tiles come sequence by sequence. Within one they keep their order, which turns rely on; otherwise those
// with the most blocks, or before one that has, come first. Those without blocks come last.
void MostWorkFirst(BackwardList& list) {
  std::vector<KeyTile>& tiles = list.tiles;
  std::vector<std::int32_t> work(tiles.size());
  for (std::size_t i = tiles.size(); i-- > 0;) {
    work[i] = tiles[i].block_end - tiles[i].block_begin;
    const bool continued = i + 1 < tiles.size() && tiles[i + 1].ordinal > tiles[i].ordinal;
    if (continued && work[i] > 0) work[i] = std::max(work[i], work[i + 1]);
  }
  std::vector<std::size_t> order(tiles.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return work[a] > work[b]; });
  const auto sort = [&]<typename Item>(std::vector<Item>& items) {
    std::vector<Item> sorted;
    sorted.reserve(items.size());
    for (const std::size_t i : order) sorted.push_back(items[i]);
    items = std::move(sorted);
  };
  sort(list.tiles);
  sort(list.tile_biases);
}

}  // namespace

BackwardList BuildBackwardList(const Layout& query, const Layout& key, const std::vector<Band>& bands,
                               int tile_keys, int block_rows) {
  BackwardList list;
  std::vector<std::int32_t> sequences;  // of the blocks
  ForPieces(query, block_rows, [&](const Segment& segment, std::int32_t at, std::int32_t length) {
    list.blocks.push_back(
        {TokenOf(query, segment, at), MemberOf(query, segment), segment.position + at, length, -1});
    sequences.push_back(segment.sequence);
  });
  std::int32_t sequence = -1, ordinal = 0;
  std::size_t first = 0, end = 0;  // the sequence's blocks
  ForPieces(key, tile_keys, [&](const Segment& segment, std::int32_t at, std::int32_t length) {
    if (segment.sequence != sequence) {
      sequence = segment.sequence;
      ordinal = 0;
      const auto range = std::equal_range(sequences.begin(), sequences.end(), sequence);
      first = static_cast<std::size_t>(range.first - sequences.begin());
      end = static_cast<std::size_t>(range.second - sequences.begin());
    }
    const Band band = bands.at(static_cast<std::size_t>(sequence));
    KeyTile tile{TokenOf(key, segment, at),
                 MemberOf(key, segment),
                 segment.position + at,
                 length,
                 band.low,
                 band.high,
                 0,
                 0,
                 ordinal++};
    // Some pair is visible when the differences of positions, which are all numbers between the least and the
    // greatest, meet the band.
    const auto begin = list.blocks.begin();
    const auto block_at = [&](std::size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
    const auto from = std::partition_point(block_at(first), block_at(end), [&](const QueryBlock& block) {
      return std::int64_t{tile.position} - (block.position + block.length - 1) > band.high;
    });
    const auto to = std::partition_point(from, block_at(end), [&](const QueryBlock& block) {
      return std::int64_t{tile.position} + tile.length - 1 - block.position >= band.low;
    });
    if (band.low <= band.high && from < to) {
      tile.block_begin = static_cast<std::int32_t>(from - begin);
      tile.block_end = static_cast<std::int32_t>(to - begin);
      for (auto block = from; block != to; ++block)
        if (block->first_tile < 0) block->first_tile = tile.ordinal;
    }
    list.tiles.push_back(tile);
    list.tile_biases.push_back({sequence, band.diagonal});
  });
  MostWorkFirst(list);
  const auto busy = [](const KeyTile& tile) { return tile.block_begin < tile.block_end; };
  list.busy_tiles = static_cast<int>(std::count_if(list.tiles.begin(), list.tiles.end(), busy));
  return list;
}

Layout CutAtMultiples(const Layout& layout, int step) {
  Layout cut = layout;
  cut.segments.clear();
  for (const Segment& segment : layout.segments) {
    const std::int32_t before = std::min((step - segment.position % step) % step, segment.length);
    if (before > 0) cut.segments.push_back({segment.sequence, segment.position, before, segment.row});
    if (before < segment.length)
      cut.segments.push_back({segment.sequence, segment.position + before, segment.length - before,
                              segment.row + std::int64_t{before} * layout.row_step});
  }
  return cut;
}

std::int64_t CountBlocks(const Layout& layout, int rows) {
  std::int64_t count = 0;
  ForPieces(layout, rows, [&](const Segment&, std::int32_t, std::int32_t) { ++count; });
  return count;
}

std::size_t BackwardListBytes(const Layout& query, const Layout& key, int tile_keys, int block_rows) {
  return static_cast<std::size_t>(CountBlocks(key, tile_keys)) * (sizeof(KeyTile) + sizeof(KeyTileBias)) +
         static_cast<std::size_t>(CountBlocks(query, block_rows)) * sizeof(QueryBlock);
}

}  // namespace cppool::kernels::cuda::sm90
