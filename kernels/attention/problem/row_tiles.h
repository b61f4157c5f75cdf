// The rows of a buffer that hold tokens, as a table of short runs of rows. Every backend implements TokenRows
// with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention/layout.h"

namespace cppool::kernels {

// The `length` rows row, row + step, ...; at most kRowTile. The step is Layout::row_step.
struct RowTile {
  std::int64_t row;
  std::int64_t length;
};
inline constexpr std::int32_t kRowTile = 64;

inline std::vector<RowTile> RowTilesOf(const Layout& layout) {
  std::vector<RowTile> tiles;
  for (const Segment& segment : layout.segments) {
    for (std::int32_t at = 0; at < segment.length; at += kRowTile)
      tiles.push_back(
          {segment.row + std::int64_t{at} * layout.row_step, std::min(segment.length - at, kRowTile)});
  }
  return tiles;
}

// Returns the size of the table in bytes.
inline std::size_t RowTilesBytes(const Layout& layout) {
  std::size_t tiles = 0;
  for (const Segment& segment : layout.segments)
    tiles += static_cast<std::size_t>((segment.length + kRowTile - 1) / kRowTile);
  return tiles * sizeof(RowTile);
}

}  // namespace cppool::kernels
