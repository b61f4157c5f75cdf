// Tiles of 16-bit elements in shared memory, and the products of tiles that a warp computes.
//
// A tile is [rows, kDim] with rows of kDim * 2 bytes, a multiple of 128. Within each 128 bytes, the 16-byte
// chunk c of row r is stored at chunk c ^ (r % 8), so that the eight rows of an 8x8 matrix load are in
// different banks.
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm80/ptx.cuh"

namespace cppool::kernels::cuda {

inline constexpr int kWarpSize = 32;

template <int kDim>
inline constexpr int kRowBytes = kDim * 2;

// Starts the copy of `length` <= kRows token rows into a tile; the tile's other rows are set to zero. `from`
// is the first token's row of one head, `stride` the distance between tokens in bytes. All threads of the
// block must call it.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void CopyTile(std::uint32_t tile, const void* from, std::int64_t stride,
                                         int length) {
  constexpr int kRowsAtOnce = kThreads / 8;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0 && kDim % 64 == 0);
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const char* const first = static_cast<const char*>(from) + chunk * 16;
  const char* global = first + row * stride;
  const std::uint32_t shared = tile + row * kRowBytes<kDim> + ((chunk ^ (row % 8)) << 4);
#pragma unroll
  for (int r = 0; r < kRows; r += kRowsAtOnce) {
    const bool valid = row + r < length;
    const char* const source = valid ? global : first;
#pragma unroll
    for (int d = 0; d < kRowBytes<kDim>; d += 128) {
      ptx::CopyAsync16(shared + r * kRowBytes<kDim> + d, source + d, valid ? 16 : 0);
    }
    global += kRowsAtOnce * stride;
  }
}

// The addresses at which this lane loads fragments of a tile. Tiles begin at multiples of 128 bytes.
template <int kDim>
class Fragments {
 public:
  // For a left operand [m, k], or a right operand stored as [k, n] (loaded transposed).
  static __device__ __forceinline__ Fragments Rows(std::uint32_t tile) {
    const int lane = threadIdx.x % kWarpSize;
    return Fragments(tile + (lane & 15) * kRowBytes<kDim> + ((((lane >> 4) ^ lane) & 7) << 4));
  }
  // For a right operand stored as [n, k].
  static __device__ __forceinline__ Fragments Columns(std::uint32_t tile) {
    const int lane = threadIdx.x % kWarpSize;
    return Fragments(tile + ((lane & 7) | ((lane & 16) >> 1)) * kRowBytes<kDim> +
                     (((((lane >> 3) & 1) ^ lane) & 7) << 4));
  }
  // Returns where the 16x16 elements at row `row` and column `16 * step` are.
  __device__ __forceinline__ std::uint32_t At(int row, int step) const {
    return (first_ ^ (step % 4 * 32)) + row * kRowBytes<kDim> + step / 4 * 128;
  }
  __device__ __forceinline__ Fragments Shifted(std::uint32_t bytes) const {
    return Fragments(first_ + bytes);
  }

 private:
  explicit __device__ __forceinline__ Fragments(std::uint32_t first) : first_(first) {}
  std::uint32_t first_;
};

// A warp's accumulator: kM x kN tiles of 16x8.
template <int kM, int kN>
struct Accumulator {
  float at[kM][kN][4];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) at[m][n][i] = 0;
  }
};

// A warp's left operand in registers: [kM x 16, kK x 16].
template <int kM, int kK>
struct LeftOperand {
  std::uint32_t at[kM][kK][4];
};

// Rounds an accumulator to T. Its elements already have the layout of a left operand.
template <typename T, int kM, int kN>
__device__ __forceinline__ LeftOperand<kM, kN / 2> ToLeftOperand(const Accumulator<kM, kN>& from) {
  LeftOperand<kM, kN / 2> to;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      to.at[m][n / 2][(n % 2) * 2] = ptx::Pack<T>(from.at[m][n][0], from.at[m][n][1]);
      to.at[m][n / 2][(n % 2) * 2 + 1] = ptx::Pack<T>(from.at[m][n][2], from.at[m][n][3]);
    }
  return to;
}

// sum += left right^T with left [kM x 16, kDim] and right [kN x 8, kDim], both in shared memory.
template <typename T, int kDim, int kM, int kN>
__device__ __forceinline__ void MultiplyTransposed(Accumulator<kM, kN>& sum, const Fragments<kDim>& left,
                                                   const Fragments<kDim>& right) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::LoadMatrix(a[m], left.At(m * 16, k));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      std::uint32_t b[4];
      ptx::LoadMatrix(b, right.At(n * 8, k));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::Multiply<T>(sum.at[m][n], a[m], b[0], b[1]);
        ptx::Multiply<T>(sum.at[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sum += left right with left in registers and right [kK x 16, kDim] in shared memory.
template <typename T, int kDim, int kM, int kK>
__device__ __forceinline__ void MultiplyRows(Accumulator<kM, kDim / 8>& sum, const LeftOperand<kM, kK>& left,
                                             const Fragments<kDim>& right) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      std::uint32_t b[4];
      ptx::LoadMatrixTransposed(b, right.At(k * 16, n / 2));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::Multiply<T>(sum.at[m][n], left.at[m][k], b[0], b[1]);
        ptx::Multiply<T>(sum.at[m][n + 1], left.at[m][k], b[2], b[3]);
      }
    }
  }
}

}  // namespace cppool::kernels::cuda
