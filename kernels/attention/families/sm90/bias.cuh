// Adds a bias to unscaled logits of a warpgroup: 64 queries by kBlock keys, or transposed. The bias is
// divided by the scale, because logits are scaled later.
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

// From shared memory, [kBlock / 64][64][64] swizzled; without `own_rows` the first row of it holds the bias
// of all queries.
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

// To logits transposed, 64 keys by kColumns queries, the warpgroup's own of a tile [rows][64] of the bias:
// from `first` on.
template <typename T, int kColumns>
__device__ __forceinline__ void AddBiasTileTransposed(float (&logits)[kColumns / 2], std::uint32_t tile,
                                                      bool own_rows, int first, float inverse_scale) {
  const int thread = ptx::Opaque(static_cast<int>(threadIdx.x)) % kWarpgroup, lane = thread % 32;
  const int row = own_rows ? first + lane / 16 * 8 + lane % 8 : 0;
  const int chunk = thread / 32 * 2 + lane / 8 % 2;
  const std::uint32_t line = tile + row * kRowBytes + (chunk ^ (row % 8)) * 16;
  const int step = own_rows ? 16 * kRowBytes : 0;
#pragma unroll
  for (int n = 0; n < kColumns / 16; ++n) {
    std::uint32_t pairs[4];
    ptx::LoadMatrixTransposed(pairs, line + n * step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = Unpack<T>(pairs[i]);
      float* const at = &logits[n * 8 + i * 2];
      at[0] = fmaf(bias.x, inverse_scale, at[0]);
      at[1] = fmaf(bias.y, inverse_scale, at[1]);
    }
  }
}

// -slope * |apart|. `slope` is divided by the scale; `apart` is key - query - diagonal, or that negated if
// logits are transposed, of this thread's first row and the first column. kSparesRegisters: nothing of it is
// kept in a register from call to call.
template <int kBlock, bool kSparesRegisters = false>
__device__ __forceinline__ void AddAlibi(float (&logits)[kBlock / 2], float slope, int apart) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int thread = static_cast<int>(threadIdx.x);
    if constexpr (kSparesRegisters) thread = ptx::Opaque(thread);
    const float first = static_cast<float>(apart - half * 8 + thread % 4 * 2);
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
