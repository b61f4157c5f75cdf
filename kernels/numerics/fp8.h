// 8-bit floating point as the host and CUDA kernels compute with it: payloads in memory, fp32 in registers.
//
//   E4M3 (FN)  bias 7, no infinity, NaN 0x7F and 0xFF, largest 448, smallest normal 2^-6, subnormal 2^-9
//   E5M2       bias 15, infinity 0x7C, NaN above, largest 57344, smallest normal 2^-14, subnormal 2^-16
//   E8M0       2^(e - 127), NaN 0xFF: the scale of a block of 32 (OCP microscaling formats, version 1.0)
//
// A cast from fp32 rounds to nearest even, keeps subnormals, and saturates: overflow and infinity become the
// largest finite value with their sign, NaN stays NaN (as PTX cvt.rn.satfinite). Written without branches, so
// that loops vectorise.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace cppool::kernels {

inline constexpr float kE4M3Max = 448;
inline constexpr float kE5M2Max = 57344;
inline constexpr int kMxBlock = 32;  // elements that share an E8M0 scale

namespace fp8_detail {

CPPOOL_HOST_DEVICE inline std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
CPPOOL_HOST_DEVICE inline float FromBits(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// `kFraction` bits of fraction; exponents are biased by `kBias`; `kLargest` is the pattern of the largest
// finite value.
template <int kFraction, std::uint32_t kBias, std::uint32_t kLargest>
CPPOOL_HOST_DEVICE inline std::uint8_t Encode(float value) {
  constexpr int kShift = 23 - kFraction;
  constexpr std::uint32_t kRebias = (127 - kBias) << 23;
  constexpr std::uint32_t kSmallestNormal = kRebias + (1u << 23);
  const std::uint32_t bits = BitsOf(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t cut = magnitude - kRebias;
  const std::uint32_t normal = (cut + (1u << (kShift - 1)) - 1 + ((cut >> kShift) & 1u)) >> kShift;
  // The sum's last place is one unit of the format's subnormals, so that the addition rounds there.
  constexpr std::uint32_t kUnits = (127 + 1 - kBias - kFraction + 23) << 23;
  const std::uint32_t tiny = magnitude < kSmallestNormal ? magnitude : 0u;
  const std::uint32_t subnormal = BitsOf(FromBits(tiny) + FromBits(kUnits)) - kUnits;
  std::uint32_t result = magnitude < kSmallestNormal ? subnormal : normal;
  result = result > kLargest ? kLargest : result;
  result = magnitude > 0x7f800000u ? 0x7fu : result;
  return static_cast<std::uint8_t>(result | (bits >> 24 & 0x80u));
}

// Saturates, rounds to nearest even, keeps subnormals and NaN, as Encode does; a zero may lose its sign.
// Adding 1.5 times the power of two whose last place is the format's unit at `value` rounds away what is
// below it.
template <int kFraction, std::uint32_t kBias>
CPPOOL_HOST_DEVICE inline float Round(float value, float largest) {
  constexpr std::uint32_t kSmallestNormal = (127 + 1 - kBias) << 23;
  constexpr std::uint32_t kUp = ((23u - kFraction) << 23) | 0x400000u;
  value = value > largest ? largest : value < -largest ? -largest : value;
  const std::uint32_t power = BitsOf(value) & 0x7f800000u;
  const float shift = FromBits((power > kSmallestNormal ? power : kSmallestNormal) + kUp);
  return (value + shift) - shift;
}

}  // namespace fp8_detail

CPPOOL_HOST_DEVICE inline std::uint8_t FloatToE4M3(float value) {
  return fp8_detail::Encode<3, 7, 0x7e>(value);
}
CPPOOL_HOST_DEVICE inline std::uint8_t FloatToE5M2(float value) {
  return fp8_detail::Encode<2, 15, 0x7b>(value);
}

// A payload's value as it is stored: without its scale. Exact, in bf16 as well.
CPPOOL_HOST_DEVICE inline float E4M3ToFloat(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7fu;
  const float value = fp8_detail::FromBits(magnitude << 20) * 0x1p120f;  // also normalises subnormals
  const std::uint32_t finite = fp8_detail::BitsOf(value);
  const std::uint32_t result = magnitude == 0x7fu ? 0x7fc00000u : finite;
  return fp8_detail::FromBits(result | std::uint32_t{bits & 0x80u} << 24);
}
CPPOOL_HOST_DEVICE inline float E5M2ToFloat(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7fu;
  const float value = fp8_detail::FromBits(magnitude << 21) * 0x1p112f;
  const std::uint32_t finite = fp8_detail::BitsOf(value);
  const std::uint32_t quiet = magnitude > 0x7cu ? 0x00400000u : 0;  // NaN, as any product has it
  const std::uint32_t special = 0x7f800000u | quiet | (magnitude & 3u) << 21;
  const std::uint32_t result = magnitude >= 0x7cu ? special : finite;
  return fp8_detail::FromBits(result | std::uint32_t{bits & 0x80u} << 24);
}

// The scale of a tensor whose values are stored as value * scale: fp8_max / amax, to nearest. 1 for an amax
// of 0, infinity or NaN; FLT_MAX where the quotient overflows. (Transformer Engine's current scaling.)
CPPOOL_HOST_DEVICE inline float CurrentScale(float fp8_max, float amax) {
  if (!(amax > 0) || amax > FLT_MAX) return 1;
  const float scale = fp8_max / amax;
  return scale > FLT_MAX ? FLT_MAX : scale;
}

// The smallest power of two with which a block of this amax fits into E4M3 (nothing saturates): the exact
// ceiling of log2(amax / 448). 0x00 for 0, 0xFE for infinity, 0xFF for NaN.
CPPOOL_HOST_DEVICE inline std::uint8_t E8M0Of(float amax) {
  const std::uint32_t bits = fp8_detail::BitsOf(amax) & 0x7fffffffu;
  if (bits > 0x7f800000u) return 0xff;
  if (bits == 0x7f800000u) return 0xfe;
  const int exponent =
      static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);  // 448 = 1.75 * 2^8
  return static_cast<std::uint8_t>(exponent < 0 ? 0 : exponent);
}
// 2^(e - 127).
CPPOOL_HOST_DEVICE inline float E8M0ToFloat(std::uint8_t e) {
  if (e == 0xff) return fp8_detail::FromBits(0x7fc00000u);
  return fp8_detail::FromBits(e == 0 ? 0x00400000u : std::uint32_t{e} << 23);
}
// 2^(127 - e), with which a block's values are multiplied before the cast.
CPPOOL_HOST_DEVICE inline float E8M0Reciprocal(std::uint8_t e) {
  if (e == 0xff) return fp8_detail::FromBits(0x7fc00000u);
  return fp8_detail::FromBits(e == 254 ? 0x00400000u : std::uint32_t{254u - e} << 23);
}

// Rounds to values of the formats without their bits: what attention kernels do with P and dS in registers.
// The results are those of E4M3ToFloat(FloatToE4M3(value)), but for the sign of zero.
CPPOOL_HOST_DEVICE inline float RoundToE4M3(float value) { return fp8_detail::Round<3, 7>(value, kE4M3Max); }
CPPOOL_HOST_DEVICE inline float RoundToE5M2(float value) { return fp8_detail::Round<2, 15>(value, kE5M2Max); }

}  // namespace cppool::kernels
