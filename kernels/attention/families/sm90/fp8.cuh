// What the instances for fp8 do beside attention in bf16. Operands are values of E4M3 or E5M2, which bf16
// holds exactly, and so are P and dS after their casts: products are those of 8-bit tensor cores but for the
// order of their sums. Scales of tensors enter the numbers that logits, dP and results are multiplied with
// anyway, and P's scale the exponent.
//
// Those numbers lie in shared memory, made by one thread from scales in device memory, and are read where
// they are used: registers are few.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <type_traits>

#include "kernels/attention/families/sm90/backward_parameters.h"
#include "kernels/attention/families/sm90/ptx.cuh"

namespace cppool::kernels::cuda::sm90 {

// A kernel's tiling, for fp8.
template <typename Tiling>
struct InFp8 : Tiling {
  static constexpr bool kFp8 = true;
  static constexpr bool kDqAsMade = false;  // 7 % slower: the scale would be read again and again
};
// The same for the step that finds dS's scale: P is cast, dS is not, and its largest magnitude is found.
template <typename Tiling>
struct FindingDs : InFp8<Tiling> {
  static constexpr bool kFindsDs = true;
};

// Grids to which ptx::Pack rounds, as pairs of bf16.
struct E4M3Grid;
struct E5M2Grid;

// What P and dS are rounded to as operands.
template <typename T, typename Config>
using POf = std::conditional_t<Config::kFp8, E4M3Grid, T>;
template <typename T, typename Config>
using DsOf = std::conditional_t<Config::kFp8 && !Config::kFindsDs, E5M2Grid, T>;

// In place of ForwardParameters::scale and what is made of it.
struct ForwardUnits {
  float scale, scale_log2;  // of products of payloads of q and k
  float lift;               // log2(p_scale): exponentials are p_scale times as large
  float v;                  // scale of v

  static __device__ __forceinline__ ForwardUnits Of(const ForwardParameters& p) {
    const float unit = LogitUnit(p.fp8);
    return {p.scale * unit, p.scale_log2 * unit, log2f(p.fp8.p_scale), ScaleOf(p.fp8.v)};
  }
  static __device__ __forceinline__ float ScaleOf(const float* scale) { return scale ? *scale : 1.0f; }
  // Not 0, of which a hidden logit would become NaN.
  static __device__ __forceinline__ float LogitUnit(const Fp8Parameters& p) {
    return fmaxf(ScaleOf(p.q) * ScaleOf(p.k), FLT_MIN);
  }
};

// With a bias, which is divided by the scale before it is added to logits. That must not make it infinite:
// with a unit that is raised to kLeast, logits are nothing beside a bias.
struct BiasedForwardUnits : ForwardUnits {
  float inverse_scale;

  static constexpr float kLeast = 0x1p-100f;
  static __device__ __forceinline__ BiasedForwardUnits Of(const ForwardParameters& p) {
    const float unit = fmaxf(LogitUnit(p.fp8), kLeast);
    return {{p.scale * unit, p.scale_log2 * unit, log2f(p.fp8.p_scale), ScaleOf(p.fp8.v)},
            p.bias.inverse_scale / unit};
  }
};
template <typename Config>
using ForwardUnitsOf = std::conditional_t<Config::kBias, BiasedForwardUnits, ForwardUnits>;

// In place of BackwardParameters::scale and what is made of it. Exponentials are p_scale times as large, and
// ds is made ds_scale times as large.
struct BackwardUnits {
  float scale_log2;
  float lift;        // log2(p_scale)
  float dp, delta;   // ds = p * (dp * units.dp - delta * units.delta)
  float dq, dk, dv;  // results of products with payloads are multiplied with these

  template <typename Config>
  static __device__ __forceinline__ BackwardUnits Of(const BackwardParameters& p, float unit) {
    const float p_scale = p.fp8.p_scale;
    constexpr bool kScalesDs = !Config::kFindsDs && !Config::kInBlocks;
    const float of_ds = (kScalesDs ? p.fp8.ds_scale[0] : 1.0f) / p_scale;
    const float per_ds = kScalesDs ? p.scale * p.fp8.ds_scale[1] : p.scale;
    const float dout = ForwardUnits::ScaleOf(p.fp8.dout);
    return {p.scale_log2 * unit,
            log2f(p_scale),
            dout * ForwardUnits::ScaleOf(p.fp8.v) * of_ds,
            of_ds,
            per_ds * ForwardUnits::ScaleOf(p.fp8.k),
            per_ds * ForwardUnits::ScaleOf(p.fp8.q),
            dout / p_scale};
  }
  template <typename Config>
  static __device__ __forceinline__ BackwardUnits Of(const BackwardParameters& p) {
    return Of<Config>(p, ForwardUnits::LogitUnit(p.fp8));
  }
};

// With a bias, as BiasedForwardUnits.
struct BiasedBackwardUnits : BackwardUnits {
  float inverse_scale;

  template <typename Config>
  static __device__ __forceinline__ BiasedBackwardUnits Of(const BackwardParameters& p) {
    const float unit = fmaxf(ForwardUnits::LogitUnit(p.fp8), BiasedForwardUnits::kLeast);
    return {BackwardUnits::Of<Config>(p, unit), p.bias.inverse_scale / unit};
  }
};
template <typename Config>
using BackwardUnitsOf = std::conditional_t<Config::kBias, BiasedBackwardUnits, BackwardUnits>;

}  // namespace cppool::kernels::cuda::sm90

namespace cppool::kernels::cuda::ptx {

// fp16 holds every value of both formats; NaN stays NaN.
__device__ __forceinline__ std::uint32_t PackFp16Pair(std::uint32_t fp16) {
  const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&fp16));
  return Pack<__nv_bfloat16>(two.x, two.y);
}
template <>
__device__ __forceinline__ std::uint32_t Pack<sm90::E4M3Grid>(float low, float high) {
  std::uint32_t fp16;
  asm("{.reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, %1, %2; cvt.rn.f16x2.e4m3x2 %0, two;}"
      : "=r"(fp16)
      : "f"(high), "f"(low));
  return PackFp16Pair(fp16);
}
template <>
__device__ __forceinline__ std::uint32_t Pack<sm90::E5M2Grid>(float low, float high) {
  std::uint32_t fp16;
  asm("{.reg .b16 two; cvt.rn.satfinite.e5m2x2.f32 two, %1, %2; cvt.rn.f16x2.e5m2x2 %0, two;}"
      : "=r"(fp16)
      : "f"(high), "f"(low));
  return PackFp16Pair(fp16);
}

// Two numbers rounded to E4M3 as multiples of the powers of two `down`, whose inverses are `up`: exact in
// bf16.
__device__ __forceinline__ std::uint32_t PackInBlocks(float low, float high, float2 up, float2 down) {
  std::uint32_t fp16;
  asm("{.reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, %1, %2; cvt.rn.f16x2.e4m3x2 %0, two;}"
      : "=r"(fp16)
      : "f"(__fmul_rn(high, up.y)), "f"(__fmul_rn(low, up.x)));
  const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&fp16));
  return Pack<__nv_bfloat16>(two.x * down.x, two.y * down.y);
}
// The inverse of the power of two of a block whose largest magnitude has these bits, and that power (`up` and
// `down` of PackInBlocks): as fp8.h's E8M0Of, but from 2^-126 on.
__device__ __forceinline__ float2 UpAndDown(unsigned most) {
  unsigned exponent = (most >> 23) + ((most & 0x7fffffu) > 0x600000u ? 1 : 0);
  exponent = exponent > 9 ? exponent - 8 : 1;
  return make_float2(__uint_as_float((254 - exponent) << 23), __uint_as_float(exponent << 23));
}

}  // namespace cppool::kernels::cuda::ptx
