// What the instances for fp8 do beside attention in bf16: scales of the operands, and the casts of P and dS.
//
// Stored elements are values of E4M3 or E5M2 (with blocks: times a power of two), which bf16 holds exactly,
// and so are P and dS after their casts. So the products are those of 8-bit tensor cores but for the order of
// their sums, and their accumulators are fp32. Scales come after the products: those of a tensor are the same
// for all its elements.
#pragma once

#include "kernels/attention/families/sm80/bias.cuh"
#include "kernels/attention/families/sm80/tile.cuh"
#include "kernels/numerics/fp8.h"

namespace cppool::kernels::cuda {

__device__ __forceinline__ float ScaleOf(const float* scale) { return scale ? *scale : 1.0f; }

template <int kM, int kN, typename Function>
__device__ __forceinline__ void ForEach(Accumulator<kM, kN>& accumulator, Function function) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) function(accumulator.at[m][n][i]);
}

template <int kM, int kN>
__device__ __forceinline__ void Scale(Accumulator<kM, kN>& accumulator, float factor) {
  ForEach(accumulator, [&](float& x) { x *= factor; });
}

// P times p_scale on E4M3's grid: the payload as it is stored.
template <typename T, int kM, int kN>
__device__ __forceinline__ LeftOperand<kM, kN / 2> CastP(Accumulator<kM, kN> p, float p_scale) {
  ForEach(p, [&](float& x) { x = RoundToE4M3(__fmul_rn(x, p_scale)); });
  return ToLeftOperand<T>(p);
}

// Rounds each row's dS to E4M3 in blocks of kMxBlock columns, as payload times the power of two of fp8.h's
// E8M0Of. The exponent is kept from 1 on, so that the powers are normal.
template <int kM, int kN>
__device__ __forceinline__ void RoundBlocks(Accumulator<kM, kN>& ds) {
  constexpr int kTiles = kMxBlock / 8;
  static_assert(kN % kTiles == 0);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int block = 0; block < kN; block += kTiles) {
        unsigned most = 0;  // as integers, where NaN is the largest
#pragma unroll
        for (int n = block; n < block + kTiles; ++n)
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i)
            most = max(most, __float_as_uint(ds.at[m][n][i]) & 0x7fffffffu);
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        unsigned exponent = (most >> 23) + ((most & 0x7fffffu) > 0x600000u ? 1 : 0);
        exponent = exponent > 9 ? exponent - 8 : 1;
        const float up = __uint_as_float((254 - exponent) << 23), down = __uint_as_float(exponent << 23);
#pragma unroll
        for (int n = block; n < block + kTiles; ++n)
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i)
            ds.at[m][n][i] = RoundToE4M3(__fmul_rn(ds.at[m][n][i], up)) * down;
      }
}

// dS as `casts` say; without a cast it is rounded to T.
template <typename T, int kM, int kN>
__device__ __forceinline__ LeftOperand<kM, kN / 2> CastDs(Accumulator<kM, kN>& ds, const Fp8Casts& casts) {
  if (casts.ds_blocks) {
    RoundBlocks(ds);
  } else if (casts.ds_scale) {
    const float scale = *casts.ds_scale;
    ForEach(ds, [&](float& x) { x = RoundToE5M2(__fmul_rn(x, scale)); });
  }
  return ToLeftOperand<T>(ds);
}

// What the products with dS of CastDs are multiplied with.
__device__ __forceinline__ float InverseOfDs(const Fp8Casts& casts) {
  return casts.ds_scale && !casts.ds_blocks ? casts.ds_scale[1] : 1.0f;
}

// Raises *amax to the largest |dS| of a warp. NaN does not count.
template <int kM, int kN>
__device__ __forceinline__ void RaiseAmax(float* amax, Accumulator<kM, kN>& ds) {
  float most = 0;
  ForEach(ds, [&](float x) { most = fmaxf(most, fabsf(x)); });
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2)
    most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
  if (threadIdx.x % kWarpSize == 0) AtomicMax(amax, most);
}

}  // namespace cppool::kernels::cuda
