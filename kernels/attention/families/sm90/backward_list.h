// The backward kernel's work: tiles of keys, and the blocks of queries that see each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention/families/sm90/backward_parameters.h"
#include "kernels/attention/layout.h"

namespace cppool::kernels::cuda::sm90 {

struct BackwardList {
  std::vector<KeyTile> tiles;            // see BackwardWork
  std::vector<KeyTileBias> tile_biases;  // of `tiles`
  std::vector<QueryBlock> blocks;
  int busy_tiles = 0;
};

// Throws RuntimeError(CPPOOL_UNSUPPORTED) for rows that 32 bits cannot count.
BackwardList BuildBackwardList(const Layout& query, const Layout& key, const std::vector<Band>& bands,
                               int tile_keys, int block_rows);

// Returns the layout with segments cut at their first positions that are multiples of `step`, so that tiles
// and blocks of multiples of it begin there, or end at the first one.
Layout CutAtMultiples(const Layout& layout, int step);

// Returns the most that its tiles and blocks take, whatever the bands.
std::size_t BackwardListBytes(const Layout& query, const Layout& key, int tile_keys, int block_rows);
std::int64_t CountBlocks(const Layout& layout, int rows);

}  // namespace cppool::kernels::cuda::sm90
