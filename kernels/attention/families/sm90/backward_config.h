// Tile sizes, stages and shared-memory budgets of the backward kernel, by head dims (query/key and value).
//
// What decides them: each of two consumer warpgroups holds 64 keys: (dim_qk + dim_v) / 2 registers a thread for dk and
// dv, kRows / 2 each for logits, for dout v^T and for its part of dq, and half as many for the operands made of the
// first two, of 232.
#pragma once

#include "kernels/attention/families/sm90/config.h"

namespace cppool::kernels::cuda::sm90 {

// Two stages each of queries, of output gradients and of ds.
template <int kDimQkValue, int kDimVValue, int kTileStagesValue>
struct BackwardTiling {
  static constexpr int kDimQk = kDimQkValue, kDimV = kDimVValue;
  static constexpr int kTileKeys = 128;  // two warpgroups of 64
  static constexpr int kRows = 64;       // queries at a time
  static constexpr int kStages = 2;
  static constexpr int kTileStages = kTileStagesValue;  // buffers for tiles of keys and values
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  static constexpr int kKeyBytes = kTileKeys * kDimQk * 2;
  static constexpr int kValueBytes = kTileKeys * kDimV * 2;
  static constexpr int kQueryBytes = kRows * kDimQk * 2;
  static constexpr int kDoutBytes = kRows * kDimV * 2;
  static constexpr int kDsBytes = kRows * kTileKeys * 2;
  static constexpr int kDqBytes = kRows * kDimQk * 4;  // on its way to memory
  static constexpr int kTileBytes =
      kTileStages * (kKeyBytes + kValueBytes) + kStages * (kQueryBytes + kDoutBytes + kDsBytes) + kDqBytes;
  // Barriers, the descriptions of tiles and blocks, lse and delta.
  static constexpr int kControlBytes = 512 + kStages * kRows * 8;
  static constexpr int kSharedBytes = kTileBytes + kControlBytes + kSharedAlignment;

  // Each warpgroup makes one half of dq's dims, and its operand in shared memory begins at a tile of 64.
  static_assert(kDimQk % 128 == 0 && kDimV % 64 == 0);
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

}  // namespace cppool::kernels::cuda::sm90
