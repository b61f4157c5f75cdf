// Adds a bias to unscaled logits of a warpgroup, 64 queries by kBlock keys. The bias is divided by the scale, because logits are
// scaled later.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "kernels/attention/families/sm90/config.h"
#include "kernels/attention/families/sm90/ptx.cuh"
#include "kernels/attention/families/sm90/wgmma.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T>
__device__ __forceinline__ float2 Unpack(std::uint32_t two);
template <>
__device__ __forceinline__ float2 Unpack<__nv_bfloat16>(std::uint32_t two) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 Unpack<__half>(std::uint32_t two) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

// From shared memory, [kBlock / 64][64][64] swizzled; without `own_rows` the first row of it holds the bias of all queries.
template <typename T, int kBlock>
__device__ __forceinline__ void AddBiasTile(float (&logits)[kBlock / 2], std::uint32_t tile, bool own_rows,
                                            float inverse_scale) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
  const int row = own_rows ? thread / 32 * 16 + lane % 16 : 0;
  // Chunk 0 or 1 of the row; chunk c * 2 further is at ^ (c * 32).
  const std::uint32_t line = tile + row * kRowBytes + ((lane / 16) ^ (row % 8)) * 16;
#pragma unroll
  for (int n = 0; n < kBlock / 16; ++n) {
    std::uint32_t pairs[4];
    ptx::LoadMatrix(pairs, (line ^ (n % 4 * 32)) + n / 4 * kBiasBoxBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = Unpack<T>(pairs[i]);
      float* const at = &logits[n * 8 + i * 2];
      at[0] = fmaf(bias.x, inverse_scale, at[0]);
      at[1] = fmaf(bias.y, inverse_scale, at[1]);
    }
  }
}

// -slope * |key - query - diagonal|. `slope` is divided by the scale; `apart` is that difference for this thread's first row and the
// first key.
template <int kBlock>
__device__ __forceinline__ void AddAlibi(float (&logits)[kBlock / 2], float slope, int apart) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float first = static_cast<float>(apart - half * 8 + static_cast<int>(threadIdx.x) % 4 * 2);
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& logit = logits[n * 4 + half * 2 + i];
        logit = fmaf(-slope, fabsf(first + static_cast<float>(n * 8 + i)), logit);
      }
  }
}

}  // namespace cppool::kernels::cuda::sm90
