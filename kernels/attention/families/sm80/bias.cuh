// Adds a bias tensor or ALiBi to the logits. Used only by the extended instances of the kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention/families/sm80/parameters.h"
#include "kernels/attention/families/sm80/tile.cuh"

namespace cppool::kernels::cuda {

__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

// The tokens of a warp's accumulator along one dimension: first position and number.
struct Stretch {
  int position;
  int length;
};

// Adds the bias to a warp's unscaled logits (rows by columns; kRows tells whether rows are queries or keys).
// The bias is divided by the scale, because the logits are scaled later. Nothing is read for tokens beyond
// the lengths.
template <typename T, Side kRows, int kM, int kN>
__device__ __forceinline__ void AddBias(Accumulator<kM, kN>& logits, const Bias& bias, const Tile& tile,
                                        int head, Stretch rows, Stretch columns) {
  const int lane = threadIdx.x % kWarpSize, first_row = lane / 4, first_column = lane % 4 * 2;
  if (bias.tensor) {
    const std::int64_t row_stride = kRows == Side::kQuery ? bias.query_stride : 1;
    const std::int64_t column_stride = kRows == Side::kQuery ? 1 : bias.query_stride;
    const T* const first = static_cast<const T*>(bias.tensor) + tile.sequence * bias.batch_stride +
                           head * bias.head_stride + (rows.position + first_row) * row_stride +
                           (columns.position + first_column) * column_stride;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8;
        const T* const from = first + row * row_stride;
        const int end = first_row + row < rows.length ? columns.length - first_column : 0;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = n * 8 + i;
            if (at >= end) continue;
            float& logit = logits.at[m][n][half * 2 + i];
            logit = fmaf(ToFloat(__ldg(from + at * column_stride)), bias.inverse_scale, logit);
          }
      }
  }
  if (bias.alibi_slopes) {
    const float slope = bias.alibi_slopes[head] * bias.inverse_scale;
    // Column minus row minus the diagonal of the alignment; only its absolute value is used.
    const int diagonal = kRows == Side::kQuery ? tile.band.diagonal : -tile.band.diagonal;
    const int apart = columns.position + first_column - (rows.position + first_row) - diagonal;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& logit = logits.at[m][n][half * 2 + i];
            const int distance = abs(apart + n * 8 + i - m * 16 - half * 8);
            logit = fmaf(-slope, static_cast<float>(distance), logit);
          }
  }
}

// Raises `largest` to the largest logit of the warp's first `rows` rows.
template <int kM, int kN>
__device__ __forceinline__ void RaiseLargest(float& largest, const Accumulator<kM, kN>& logits, int rows) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (m * 16 + half * 8 + lane / 4 >= rows) continue;
#pragma unroll
      for (int n = 0; n < kN; ++n)
        largest = fmaxf(largest, fmaxf(logits.at[m][n][half * 2], logits.at[m][n][half * 2 + 1]));
    }
}

// *to = max(*to, value) for floats. The bits of floats, read as integers, increase with non-negative values
// and decrease with negative ones. The order of the threads does not change the result.
__device__ __forceinline__ void AtomicMax(float* to, float value) {
  value += 0.0f;  // -0 becomes 0, so that zero has one bit pattern
  if (value >= 0) {
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(value));
  } else if (value < 0) {
    atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
  }
}

// Raises max_logit[head] to `scale` times the largest unscaled logit of the threads. All threads of a warp
// must call it.
__device__ __forceinline__ void RaiseMaxLogit(float* max_logit, int head, float largest, float scale) {
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
  if (threadIdx.x % kWarpSize == 0 && largest != -INFINITY) AtomicMax(max_logit + head, largest * scale);
}

}  // namespace cppool::kernels::cuda
