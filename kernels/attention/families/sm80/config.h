// Tile sizes and shared-memory budgets of the three matrix kernels, by head dims (query/key and value).
//
// What decides them: an accumulator row of d values costs a warp of 16 rows d / 2 registers a thread, of 32
// rows twice that, and there are 255; a warp of 32 rows reads half as much shared memory per product, which
// binds mma.sync. Two blocks of four warps per multiprocessor let one's softmax run under the other's
// products. No kernel needs more than 99 KB per block (sm_86, sm_89).
#pragma once

namespace cppool::kernels::cuda {

inline constexpr int kMaxSharedBytes = 99 * 1024;

// A block of threads makes kTileRows rows of the output, over blocks of kBlock tokens of the other side.
template <int kRowsPerWarpValue, int kWarpsValue, int kBlockValue, int kStagesValue,
          int kBlocksPerMultiprocessorValue>
struct Tiling {
  static constexpr int kRowsPerWarp = kRowsPerWarpValue;
  static constexpr int kWarps = kWarpsValue;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTileRows = kRowsPerWarp * kWarps;
  static constexpr int kBlock = kBlockValue;
  static constexpr int kStages = kStagesValue;  // buffers for the other side's blocks
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorValue;
  static_assert(kRowsPerWarp % 16 == 0 && kBlock % 16 == 0);
};

template <int kDimQk, int kDimV>
struct ForwardTiling;
template <>
struct ForwardTiling<64, 64> : Tiling<32, 4, 64, 1, 2> {};
template <>
struct ForwardTiling<128, 128> : Tiling<32, 4, 64, 1, 2> {};
template <>
struct ForwardTiling<192, 128> : Tiling<32, 4, 64, 1, 2> {};
template <>
struct ForwardTiling<128, 64> : Tiling<32, 4, 64, 1, 2> {};
template <>
struct ForwardTiling<256, 256> : Tiling<16, 4, 64, 1, 2> {};

template <int kDimQk, int kDimV>
struct BackwardQueryTiling;
template <>
struct BackwardQueryTiling<64, 64> : Tiling<32, 4, 32, 2, 2> {};
template <>
struct BackwardQueryTiling<128, 128> : Tiling<32, 4, 32, 2, 2> {};
template <>
struct BackwardQueryTiling<192, 128> : Tiling<16, 4, 32, 2, 2> {};
template <>
struct BackwardQueryTiling<128, 64> : Tiling<32, 4, 32, 2, 2> {};
template <>
struct BackwardQueryTiling<256, 256> : Tiling<16, 4, 32, 1, 2> {};

template <int kDimQk, int kDimV>
struct BackwardKeyTiling;
template <>
struct BackwardKeyTiling<64, 64> : Tiling<32, 4, 32, 2, 2> {};
template <>
struct BackwardKeyTiling<128, 128> : Tiling<16, 4, 64, 2, 2> {};
template <>
struct BackwardKeyTiling<192, 128> : Tiling<16, 4, 32, 2, 2> {};
template <>
struct BackwardKeyTiling<128, 64> : Tiling<16, 4, 64, 2, 2> {};
template <>
struct BackwardKeyTiling<256, 256> : Tiling<16, 4, 32, 1, 2> {};

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
