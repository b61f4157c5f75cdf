// Tile sizes and shared-memory budgets of the three matrix kernels, by head dims (query/key and value).
//
// What decides them: an accumulator row of d values costs a warp of 16 rows d / 2 registers a thread, of 32
// rows twice that, and there are 255; a warp of 32 rows reads half as much shared memory per product, which
// binds mma.sync. Two blocks of four warps per multiprocessor let one's softmax run under the other's
// products. No kernel needs more than 99 KB per block (sm_86, sm_89).
#pragma once

#include <cstddef>

#include "kernels/attention/families/common/shape_table.h"

namespace cppool::kernels::cuda {

inline constexpr int kMaxSharedBytes = 99 * 1024;

// A block of threads makes rows_per_warp * warps rows of the output, over blocks of `block` tokens of the other side.
struct TileShape {
  int rows_per_warp, warps, block;
  int stages;                     // buffers for the other side's blocks
  int blocks_per_multiprocessor;  // of threads
};

// What there are kernels for: this table alone decides which instances are compiled, and what the family says that it
// supports.
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
// For all tensors alike.
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

// Accumulators of dk and dv together do not fit into registers beyond this: two kernels make them one after
// the other.
template <int kDimQk, int kDimV>
inline constexpr bool kKeyAndValueApart = kDimQk + kDimV > 384;

// Shared memory in bytes: the own tiles, and the stages of the other side's.
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
