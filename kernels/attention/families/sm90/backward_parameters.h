// What the backward kernel is launched with. Shapes as in kernels/attention/attention_kernel.h; all pointers
// are device memory.
#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>

#include "kernels/attention/families/sm90/parameters.h"

namespace cppool::kernels::cuda::sm90 {

// Rows of a buffer are token * step + member.
struct QueryBlock {
  std::int32_t token, member;  // of the first row
  std::int32_t position;
  std::int32_t length;      // at most kRows
  std::int32_t first_tile;  // ordinal of the first tile that sees it
};

struct KeyTile {
  std::int32_t token, member;
  std::int32_t position;
  std::int32_t length;
  std::int32_t low, high;               // the band: key position minus query position
  std::int32_t block_begin, block_end;  // the blocks that see it: neighbours in the list
  std::int32_t ordinal;  // counts a sequence's tiles by position; those that see a block are neighbours
};

inline constexpr int kTurns =
    4;  // consumers that add to one block's dq, at most: two of each block of a cluster

// What else a tile's bias takes.
struct KeyTileBias {
  std::int32_t sequence;
  std::int32_t diagonal;  // of the band
};

struct BackwardWork {
  const KeyTile* tiles;  // within a sequence by ordinal; otherwise the most work first
  const QueryBlock* blocks;
  int tiles_count;
  int busy_tiles;  // these come first; the others have no blocks
  int blocks_count;
  int mean_blocks, most_blocks;  // of a busy tile
  int query_step;
  int key_step;
};

struct BackwardParameters {
  CUtensorMap q, dout;  // boxes of kRows rows
  CUtensorMap k, v;     // boxes of kTileKeys rows; for clusters, of half of k's dims
  CUtensorMap dq;       // [rows_q, heads, dim_qk] in fp32, added to; boxes of kDqRows rows and kDqDims dims
  BackwardWork work;
  HeadMap map;
  const float* lse;    // [rows_q, heads]
  const float* delta;  // [rows_q, heads]
  float* dk_sum;       // [rows_kv, kv_heads, dim_qk]
  float* dv_sum;       // [rows_kv, kv_heads, dim_v]
  void* dk;            // as dk_sum
  void* dv;            // as dv_sum
  int* schedule;       // the next item, from 0; 0 before the launch
  // [blocks_count, heads, kTurns], 0 before the launch: tiles that have been added to dq, by each consumer of
  // a thread block or of a cluster; NULL: in any order.
  int* turns;
  int section_heads;  // key/value heads that are worked off before the next ones
  // Whether a tile takes all query heads of its key/value head through a block before the next block, or all
  // blocks for a head before the next head. The same for all tiles of a launch, or turns could wait for each
  // other.
  bool heads_together;
  float scale;
  float scale_log2;
  bool first;  // of dk and dv, see GradientPass
  bool last;
  // Only kernels with a bias read these.
  BiasParameters bias;             // boxes of kRows queries
  const KeyTileBias* tile_biases;  // of work.tiles
  Fp8Parameters fp8;               // read by kernels for fp8 alone
  // Read by kernels for casts in blocks alone: boxes as of q, dout and k.
  CUtensorMap q_of_dk, dout_of_dv, k_of_dq;
};

}  // namespace cppool::kernels::cuda::sm90
