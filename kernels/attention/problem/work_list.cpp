#include <algorithm>
#include <string>

#include "kernels/attention/layout.h"
#include "kernels/error.h"

namespace cppool::kernels {
namespace {

// Sum over i in [0, n) of clamp(first + i, 0, m): the pairs (i, j) of an n x m block with j < first + i.
std::int64_t PairsBelow(std::int64_t first, std::int64_t n, std::int64_t m) {
  const std::int64_t begin = std::clamp<std::int64_t>(-first, 0, n);  // from here on rows are not empty
  const std::int64_t full = std::clamp<std::int64_t>(m - first, begin, n);
  return (full - begin) * first + (begin + full - 1) * (full - begin) / 2 + (n - full) * m;
}

// Counts the visible pairs of n queries from position `query` and m keys from position `key`.
std::int64_t VisiblePairs(Band band, std::int64_t query, std::int64_t n, std::int64_t key, std::int64_t m) {
  return PairsBelow(query - key + band.high + 1, n, m) - PairsBelow(query - key + band.low, n, m);
}

std::int64_t BlockOf(std::int64_t row, const Layout& layout) {
  return layout.block_rows > 0 ? row / layout.block_rows : 0;
}

// Reorders the tiles so that those with the most tokens in their ranges, which is what a kernel walks
// through, come first.
void MostWorkFirst(const std::vector<std::int64_t>& work, std::vector<Tile>& tiles) {
  const auto more = [](std::int64_t a, std::int64_t b) { return a > b; };
  if (std::is_sorted(work.begin(), work.end(), more)) return;
  std::vector<std::int32_t> order(tiles.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return work[static_cast<std::size_t>(a)] > work[static_cast<std::size_t>(b)];
  });
  std::vector<Tile> sorted;
  sorted.reserve(tiles.size());
  for (const std::int32_t i : order) sorted.push_back(tiles[static_cast<std::size_t>(i)]);
  tiles = std::move(sorted);
}

}  // namespace

std::vector<Segment> Joined(const Layout& layout) {
  std::vector<Segment> joined;
  joined.reserve(layout.segments.size());
  for (const Segment& segment : layout.segments) {
    if (segment.length == 0) continue;
    if (!joined.empty()) {
      Segment& last = joined.back();
      if (last.sequence == segment.sequence && last.position + last.length == segment.position &&
          last.row + std::int64_t{last.length} * layout.row_step == segment.row &&
          BlockOf(last.row, layout) == BlockOf(segment.row, layout)) {
        last.length += segment.length;
        continue;
      }
    }
    joined.push_back(segment);
  }
  return joined;
}

WorkList BuildWorkList(Side self, const Layout& query, const Layout& key, const std::vector<Band>& bands,
                       int tile_rows, bool keep_empty, int rest_step) {
  const Layout& self_layout = self == Side::kQuery ? query : key;
  const Layout& other_layout = self == Side::kQuery ? key : query;
  if (tile_rows <= 0) throw RuntimeError(CPPOOL_INTERNAL, "tiles need at least one row");

  WorkList list;
  list.self_step = self_layout.row_step;
  list.other_step = other_layout.row_step;
  const std::vector<Segment> others = Joined(other_layout);
  std::vector<std::int64_t> work;  // of each tile
  std::size_t first = 0;  // others before it end before the tile's band, and so before those of later tiles
  std::int32_t sequence = -1;
  for (const Segment& segment : self_layout.segments) {
    if (static_cast<std::size_t>(segment.sequence) >= bands.size()) {
      throw RuntimeError(CPPOOL_INTERNAL, "no band for sequence " + std::to_string(segment.sequence));
    }
    const Band band = bands[static_cast<std::size_t>(segment.sequence)];
    if (segment.sequence != sequence) {
      sequence = segment.sequence;
      while (first < others.size() && others[first].sequence < sequence) ++first;
    }
    // Key minus query position lies in [low, high]; seen from a key, a query lies in [-high, -low] of it.
    const std::int32_t low = self == Side::kQuery ? band.low : -band.high;
    const std::int32_t high = self == Side::kQuery ? band.high : -band.low;
    const std::int32_t rest = segment.length % tile_rows;
    std::int32_t rows = tile_rows;  // of the tile
    if (rest > 0 && rest_step > 0) rows = std::min((rest + rest_step - 1) / rest_step * rest_step, tile_rows);
    for (std::int32_t done = 0; done < segment.length; done += rows, rows = tile_rows) {
      Tile tile{};
      tile.sequence = sequence;
      tile.position = segment.position + done;
      tile.row = segment.row + std::int64_t{done} * list.self_step;
      tile.length = std::min(rows, segment.length - done);
      tile.band = band;
      tile.range_begin = static_cast<std::int32_t>(list.ranges.size());
      const std::int32_t begin = tile.position + low;
      const std::int32_t end = tile.position + tile.length + high;
      while (first < others.size() && others[first].sequence == sequence &&
             others[first].position + others[first].length <= begin) {
        ++first;
      }
      std::int64_t tokens = 0;
      for (std::size_t i = first; i < others.size() && low <= high; ++i) {
        const Segment& other = others[i];
        if (other.sequence != sequence || other.position >= end) break;
        const std::int32_t skip = std::max(begin - other.position, 0);
        const std::int32_t length = std::min(end - other.position, other.length) - skip;
        const std::int32_t position = other.position + skip;
        list.ranges.push_back({other.row + std::int64_t{skip} * list.other_step, position, length});
        tokens += length;
        list.pairs += self == Side::kQuery ? VisiblePairs(band, tile.position, tile.length, position, length)
                                           : VisiblePairs(band, position, length, tile.position, tile.length);
      }
      tile.range_end = static_cast<std::int32_t>(list.ranges.size());
      if (tokens == 0 && !keep_empty) continue;
      list.tiles.push_back(tile);
      work.push_back(tokens);
    }
  }
  MostWorkFirst(work, list.tiles);
  return list;
}

void OrderByBlock(WorkList& list, const Layout& key, bool last_first) {
  if (key.block_rows == 0) return;
  for (const Tile& tile : list.tiles) {
    std::stable_sort(list.ranges.begin() + tile.range_begin, list.ranges.begin() + tile.range_end,
                     [&](const Range& a, const Range& b) {
                       const std::int64_t of_a = BlockOf(a.row, key), of_b = BlockOf(b.row, key);
                       return last_first ? of_a > of_b : of_a < of_b;
                     });
  }
}

std::size_t WorkListBytes(Side self, const Layout& query, const Layout& key, int tile_rows) {
  const std::vector<Segment>& own = (self == Side::kQuery ? query : key).segments;
  const std::vector<Segment> others = Joined(self == Side::kQuery ? key : query);
  std::size_t tiles = 0, ranges = 0;
  auto other = others.begin();
  for (auto segment = own.begin(); segment != own.end();) {
    const std::int32_t sequence = segment->sequence;
    std::size_t here = 0;
    for (; segment != own.end() && segment->sequence == sequence; ++segment)
      here += static_cast<std::size_t>((segment->length + tile_rows - 1) / tile_rows);
    while (other != others.end() && other->sequence < sequence) ++other;
    const auto first = other;
    while (other != others.end() && other->sequence == sequence) ++other;
    tiles += here;
    ranges += here * static_cast<std::size_t>(other - first);
  }
  return tiles * sizeof(Tile) + ranges * sizeof(Range);
}

bool SeesAny(const Layout& query, const Layout& key, const std::vector<Band>& bands) {
  auto first = key.segments.begin();
  for (const Segment& own : query.segments) {
    const Band band = bands.at(static_cast<std::size_t>(own.sequence));
    while (first != key.segments.end() && first->sequence < own.sequence) ++first;
    for (auto other = first; other != key.segments.end() && other->sequence == own.sequence; ++other) {
      if (VisiblePairs(band, own.position, own.length, other->position, other->length) > 0) return true;
    }
  }
  return false;
}

std::int64_t CountPairs(const Layout& query, const Layout& key, const std::vector<Band>& bands) {
  return BuildWorkList(Side::kQuery, query, key, bands, kOpen, false).pairs;  // a tile for each segment
}

}  // namespace cppool::kernels
