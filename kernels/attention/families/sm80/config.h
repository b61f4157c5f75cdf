// Tile sizes and shared-memory budgets of the three matrix kernels, by head dims (query/key and value).
//
// How they were chosen: an accumulator with rows of d values needs d / 2 of the 255 registers of a thread in
// a warp of 16 rows, and d in a warp of 32 rows. A warp of 32 rows reads half as much shared memory per
// product, which limits the rate of mma.sync. With two blocks of four warps per multiprocessor, the softmax
// of one overlaps with the products of the other. No kernel needs more than 99 KB of shared memory per block,
// the limit of sm_86 and sm_89.
#pragma once

#include <cstddef>

#include "kernels/attention/families/common/shape_table.h"

namespace cppool::kernels::cuda {

inline constexpr int kMaxSharedBytes = 99 * 1024;

// A thread block computes rows_per_warp * warps rows of the output and loops over blocks of `block` tokens of
// the other side.
struct TileShape {
  int rows_per_warp, warps, block;
  int stages;                     // buffers for the other side's blocks
  int blocks_per_multiprocessor;  // of threads
};

// The head dims with kernels. This table alone determines which instances are compiled and which head dims
// the family reports as supported.
struct HeadDimTiles {
  HeadDims dims;
  TileShape forward, backward_query, backward_key;
};
inline constexpr HeadDimTiles kHeadDimTiles[] = {
    {{64, 64}, {32, 4, 64, 1, 2}, {32, 4, 32, 2, 2}, {32, 4, 32, 2, 2}},
    {{128, 128}, {32, 4, 64, 1, 2}, {32, 4, 32, 2, 2}, {16, 4, 64, 2, 2}},
    {{256, 256}, {16, 4, 64, 1, 2}, {16, 4, 32, 1, 2}, {16, 4, 32, 1, 2}},
    {{192, 128}, {32, 4, 64, 1, 2}, {16, 4, 32, 2, 2}, {16, 4, 32, 2, 2}},
    {{128, 64}, {32, 4, 64, 1, 2}, {32, 4, 32, 2, 2}, {16, 4, 64, 2, 2}},
};
// All tensors of a call have the same dtype.
inline constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16};

template <TileShape kShape>
struct Tiling {
  static constexpr int kRowsPerWarp = kShape.rows_per_warp;
  static constexpr int kWarps = kShape.warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTileRows = kRowsPerWarp * kWarps;
  static constexpr int kBlock = kShape.block;
  static constexpr int kStages = kShape.stages;
  static constexpr int kBlocksPerMultiprocessor = kShape.blocks_per_multiprocessor;
  static_assert(kRowsPerWarp % 16 == 0 && kBlock % 16 == 0);
};

template <int kDimQk, int kDimV>
constexpr HeadDimTiles TilesOf() {
  for (const HeadDimTiles& each : kHeadDimTiles) {
    if (each.dims.qk == kDimQk && each.dims.v == kDimV) return each;
  }
  throw "no such head dims";  // not a constant: the instance does not compile
}

template <int kDimQk, int kDimV>
using ForwardTiling = Tiling<TilesOf<kDimQk, kDimV>().forward>;
template <int kDimQk, int kDimV>
using BackwardQueryTiling = Tiling<TilesOf<kDimQk, kDimV>().backward_query>;
template <int kDimQk, int kDimV>
using BackwardKeyTiling = Tiling<TilesOf<kDimQk, kDimV>().backward_key>;

// Above this limit the accumulators of dk and dv do not both fit into registers, and two kernels compute them
// one after the other.
template <int kDimQk, int kDimV>
inline constexpr bool kKeyAndValueApart = kDimQk + kDimV > 384;

// Shared memory in bytes: the tiles of the block's own side, and the stages of the other side's blocks.
template <int kDimQk, int kDimV>
constexpr int ForwardSharedBytes() {  // q; k, v. The most: 64 x 256 + 64 x 256 x 2, 96 KB
  using T = ForwardTiling<kDimQk, kDimV>;
  return 2 * (T::kTileRows * kDimQk + T::kBlock * (kDimQk + kDimV));
}

template <int kDimQk, int kDimV>
constexpr int
// lse, delta, q, dout; stages of k, v. The most: 1 KB and (128 + 64) x 256, 97 KB
BackwardQuerySharedBytes() {
  using T = BackwardQueryTiling<kDimQk, kDimV>;
  return 2 * (T::kTileRows + T::kStages * T::kBlock) * (kDimQk + kDimV) + T::kTileRows * 8;
}

template <int kDimQk, int kDimV>
constexpr int
// k, v; stages of q, dout, lse, delta. The most: (64 + 2 x 64) x 256 and 1 KB, 97 KB
BackwardKeySharedBytes() {
  using T = BackwardKeyTiling<kDimQk, kDimV>;
  return 2 * (T::kTileRows + T::kStages * T::kBlock) * (kDimQk + kDimV) + T::kStages * T::kBlock * 8;
}

}  // namespace cppool::kernels::cuda
