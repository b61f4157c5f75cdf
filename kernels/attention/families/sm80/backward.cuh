// Shared by the two backward kernels.
//
// With p = exp(scale q k^T - lse) and delta = rowsum(out dout): dv = p^T dout, ds = p (dout v^T - delta), dq
// = scale ds k and dk = scale ds^T q (FlashAttention-2, Dao 2023). One kernel computes dq, another dk and dv,
// and both recompute p. That needs 7 products instead of 5, but every sum has a fixed order, without atomics.
#pragma once

#include <cmath>

#include "kernels/attention/families/sm80/config.h"
#include "kernels/attention/families/sm80/parameters.h"
#include "kernels/attention/families/sm80/tile.cuh"
#include "kernels/attention/families/sm80/work.cuh"

namespace cppool::kernels::cuda {

// lse in base 2. For a row that sees no key (-inf) returns +inf, which makes all its probabilities 0.
__device__ __forceinline__ float LseLog2(float lse) { return lse == -INFINITY ? INFINITY : lse * kLog2e; }

// Zeroes the probabilities (keys by queries) of pairs that are not visible. Rows and queries beyond the end
// of the tile need no mask: such rows are not written, and q and dout of such queries are zero.
template <int kM, int kN>
__device__ __forceinline__ void MaskByKey(Accumulator<kM, kN>& probability, const Band& band, int key,
                                          int query) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The visible columns of the row, relative to the first column of this thread.
      const int shift = key + m * 16 + half * 8 + lane / 4 - query - (lane % 4) * 2;
      const int low = shift - band.high, high = shift - band.low;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = n * 8 + i;
          if (at < low || at > high) probability.at[m][n][half * 2 + i] = 0;
        }
    }
}

// Multiplies a warp's rows of a gradient by `scale`, adds the fp32 accumulator unless `first`, and writes to
// `result` if `last`, else to the accumulator. `rows` is counted from the warp's first row; token i begins at
// element `from + i * pitch`.
template <typename T, int kM, int kN>
__device__ __forceinline__ void WriteGradient(const Accumulator<kM, kN>& sum, float scale, int rows,
                                              std::int64_t from, std::int64_t pitch, float* accumulator,
                                              void* result, bool first, bool last) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = m * 16 + half * 8 + lane / 4;
      if (i >= rows) continue;
      const std::int64_t at = from + i * pitch + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float x = sum.at[m][n][half * 2] * scale, y = sum.at[m][n][half * 2 + 1] * scale;
        if (!first) {
          const float2 so_far = *reinterpret_cast<const float2*>(accumulator + at + n * 8);
          x += so_far.x;
          y += so_far.y;
        }
        if (last) {
          *reinterpret_cast<std::uint32_t*>(static_cast<T*>(result) + at + n * 8) = ptx::Pack<T>(x, y);
        } else {
          *reinterpret_cast<float2*>(accumulator + at + n * 8) = make_float2(x, y);
        }
      }
    }
}

}  // namespace cppool::kernels::cuda
