// Tile sizes, stages and shared-memory budgets of the backward kernel, by head dims (query/key and value).
#pragma once

#include "kernels/attention/families/sm90/config.h"

namespace cppool::kernels::cuda::sm90 {

// Common to all ways to divide the work between two consumer warpgroups.
//
// Each hands its part of dq to TMA in boxes of kDqRows rows and kDqDims dims.
template <int kDimQkValue, int kDimVValue, int kTileKeysValue, int kRowsValue, int kTileStagesValue,
          int kStagesValue, int kDoutStagesValue, int kDqDimsValue, int kDsBuffersValue, int kBiasStagesValue,
          bool kPairsValue = false>
struct BackwardBuffers {
  static constexpr int kDimQk = kDimQkValue, kDimV = kDimVValue;
  static constexpr int kTileKeys = kTileKeysValue;
  static constexpr int kRows = kRowsValue;              // queries at a time
  static constexpr int kTileStages = kTileStagesValue;  // buffers for tiles of keys and values
  static constexpr int kStages = kStagesValue;          // buffers for blocks of queries
  static constexpr int kDoutStages = kDoutStagesValue;  // buffers for blocks of output gradients
  static constexpr int kDqRows = 64, kDqDims = kDqDimsValue;
  static constexpr int kDsBuffers = kDsBuffersValue;
  static constexpr int kBiasStages = kBiasStagesValue;  // buffers for blocks of a bias
  static constexpr bool kBias = kBiasStages > 0;
  static constexpr bool kDqAsMade = false;                        // see dq.cuh
  static constexpr bool kFp8 = false;                             // see InFp8
  static constexpr bool kFindsDs = false;                         // see FindingDs
  static constexpr bool kInBlocks = false;                        // see BlocksTiling
  static constexpr bool kPairs = kPairsValue;                     // a tile has a cluster of two thread blocks
  static constexpr int kListKeys = (kPairs ? 2 : 1) * kTileKeys;  // a tile of the work list
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  static constexpr int kKeyBytes = kTileKeys * kDimQk * 2;
  static constexpr int kValueBytes = kTileKeys * kDimV * 2;
  static constexpr int kQueryBytes = kRows * kDimQk * 2;
  static constexpr int kDoutBytes = kRows * kDimV * 2;
  static constexpr int kDsBytes = kRows * kTileKeys * 2;
  static constexpr int kDqBytes = kDqRows * kDqDims * 4;  // on its way to memory, of one consumer
  static constexpr int kBiasBytes = kRows * kTileKeys * 2;
  static constexpr int kOtherKeyBytes =
      kPairs ? kKeyBytes / 2 : 0;  // half the dims of the other block's keys
  static constexpr int kTileBytes = kTileStages * (kKeyBytes + kValueBytes) + kStages * kQueryBytes +
                                    kDoutStages * kDoutBytes + kDsBuffers * kDsBytes + 2 * kDqBytes +
                                    kBiasStages * kBiasBytes + kOtherKeyBytes;
  // Barriers, the descriptions of tiles and blocks, lse and delta.
  static constexpr int kControlBytes = 512 + kStages * kRows * 8;
  static constexpr int kSharedBytes = kTileBytes + kControlBytes + kSharedAlignment;

  static_assert(RegistersSuffice(2, kProducerRegisters, kConsumerRegisters));
  static_assert(kDimQk % 64 == 0 && kDimV % 64 == 0 && kDqDims % 32 == 0);
  static_assert(kDoutStages <= kStages && kStages <= kDoutStages + 1);  // BackwardShared::Queries
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// The warpgroups divide the keys (backward_consumer.cuh): 64 of 128 each, with
// (dim_qk + dim_v) / 2 registers a thread for dk and dv, kRows / 2 each for logits and for dout v^T, up to
// half as many for each operand made of them, and kDqDims / 2 for dq, of 240. Of dq each makes, for 64
// queries at a time, one half of the dims; for 128, one half of the rows. Two buffers of ds. A block of 64
// queries is needed for logits early in the step before its own, soon after the buffer of the step before
// that is released: a third buffer gives its copy time.
template <int kDimQk, int kDimV, int kRows, int kStages, int kDoutStages, int kBiasStages = 0>
struct KeySplitTiling : BackwardBuffers<kDimQk, kDimV, 128, kRows, 1, kStages, kDoutStages,
                                        kRows == 128 ? kDimQk : kDimQk / 2, 2, kBiasStages> {
  static constexpr bool kSplitsDims = false, kTakesHalves = false;
  static_assert(kRows == 64 || kRows == 128);
  // The second half of the dims, which one warpgroup makes of dq, begins with a box of 64.
  static_assert(kRows == 128 || kDimQk % 128 == 0);
};

// The same for head dims 192/128 (backward_halves_consumer.cuh), whose dk and dv take 160 registers a thread:
// of a block's 64 queries logits and dout v^T are made for 32 at a time, and dq's 96 dims of a warpgroup as
// 64 and 32. One buffer of ds.
template <int kDimQk, int kDimV>
struct HalvesTiling : BackwardBuffers<kDimQk, kDimV, 128, 64, 1, 2, 2, kDimQk / 2, 1, 0> {
  static constexpr bool kSplitsDims = false, kTakesHalves = true;
  static_assert(kDimQk == 192);
};

// The warpgroups divide the dims (backward_dims_consumer.cuh), for heads whose dk and dv of 64 keys are too
// many registers for one: of tiles of 64 keys each makes 128 dims of dk, one half of dv's, and 128 dims of dq
// in two parts of 64. With 192 dims the 64 in the middle are made by both and used from one. Buffers of p^T
// and of ds.
template <int kDimQk, int kDimV, int kTileStages, int kDoutStages, int kBiasStages = 0>
struct DimSplitTiling
    : BackwardBuffers<kDimQk, kDimV, 64, 64, kTileStages, 2, kDoutStages, 64, 2, kBiasStages> {
  static constexpr bool kSplitsDims = true, kTakesHalves = false;
  static_assert(kDimQk == 192 || kDimQk == 256);
  static_assert(kDimV % 128 == 0);
};

// The same in clusters of two thread blocks (backward_pair_consumer.cuh): 64 keys each of a tile of 128. Each
// block makes one half of dq's dims of all 128 keys, with half the dims of the other's keys and the other's
// ds, and each warpgroup 64 of them, handed over in two boxes of 32. Buffers of p^T, of ds and of the
// other's ds.
template <int kDimQk, int kDimV>
struct PairTiling : BackwardBuffers<kDimQk, kDimV, 64, 64, 1, 2, 1, 32, 3, 0, true> {
  static constexpr bool kSplitsDims = true, kTakesHalves = false;
  static_assert(kDimQk == 256 && kDimV == 256);
};

template <int kDimQk, int kDimV>
struct BackwardTiling;
template <>
struct BackwardTiling<64, 64> : KeySplitTiling<64, 64, 128, 2, 2> {};
template <>
struct BackwardTiling<128, 128> : KeySplitTiling<128, 128, 64, 3, 2> {
  static constexpr bool kDqAsMade = true;
};
template <>
struct BackwardTiling<128, 64> : KeySplitTiling<128, 64, 64, 3, 2> {};
template <>
struct BackwardTiling<192, 128> : HalvesTiling<192, 128> {};
template <>
struct BackwardTiling<256, 256> : PairTiling<256, 256> {};

// With a bias, whose blocks take the place of other buffers.
template <int kDimQk, int kDimV>
struct BiasedBackwardTiling;
template <>
struct BiasedBackwardTiling<64, 64> : KeySplitTiling<64, 64, 128, 2, 1, 1> {};
template <>
struct BiasedBackwardTiling<128, 128> : KeySplitTiling<128, 128, 64, 2, 2, 2> {};
template <>
struct BiasedBackwardTiling<128, 64> : KeySplitTiling<128, 64, 64, 2, 2, 2> {};
template <>
struct BiasedBackwardTiling<192, 128> : DimSplitTiling<192, 128, 2, 2, 1> {};
template <>
struct BiasedBackwardTiling<256, 256> : DimSplitTiling<256, 256, 1, 1, 1> {};

// For casts in blocks (backward_blocks_consumer.cuh), which divides the dims in boxes of 64, or of 32 with
// head dim 64. dq, dk and dv have operands of their own: of keys a buffer, of queries and output gradients a
// second filling of a ring's buffers in each step.
template <int kDimQkValue, int kDimVValue, int kStagesValue, int kBiasStagesValue = 0>
struct BlocksTiling : BackwardBuffers<kDimQkValue, kDimVValue, 64, 64, 1, kStagesValue, kStagesValue,
                                      kDimQkValue == 64 ? 32 : 64, 3, kBiasStagesValue> {
  using Base = BackwardBuffers<kDimQkValue, kDimVValue, 64, 64, 1, kStagesValue, kStagesValue,
                               kDimQkValue == 64 ? 32 : 64, 3, kBiasStagesValue>;
  static constexpr bool kSplitsDims = true, kTakesHalves = false, kFp8 = true, kInBlocks = true;
  static constexpr int kOtherKeyBytes = Base::kKeyBytes;  // keys for dq
  static constexpr int kTileBytes = Base::kTileBytes + kOtherKeyBytes;
  static constexpr int kControlBytes = Base::kControlBytes + 1024;  // what warps tell each other
  static constexpr int kSharedBytes = kTileBytes + kControlBytes + kSharedAlignment;
  static_assert(kStagesValue <= 2 && kBiasStagesValue <= 1);
  static_assert(kSharedBytes <= kMaxSharedBytes);
};
template <int kDimQk, int kDimV>
struct BlocksBackwardTiling : BlocksTiling<kDimQk, kDimV, kDimQk == 256 ? 1 : 2> {};
template <int kDimQk, int kDimV>
struct BiasedBlocksBackwardTiling : BlocksTiling<kDimQk, kDimV, kDimQk == 256 ? 1 : 2, 1> {};

}  // namespace cppool::kernels::cuda::sm90
