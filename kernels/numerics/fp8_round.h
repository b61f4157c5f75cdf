// Rounds fp32 to values of the 8-bit formats of fp8.h, without their bits: what attention kernels do with P and dS in registers.
#pragma once

#include <cstdint>

#include "kernels/numerics/fp8.h"

namespace cppool::kernels {

namespace fp8_detail {

// Saturates, rounds to nearest even, keeps subnormals and NaN, as Encode does; a zero may lose its sign. Adding 1.5 times the power of two
// whose last place is the format's unit at `value` rounds away what is below it.
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

// E4M3ToFloat(FloatToE4M3(value)), but for the sign of zero.
CPPOOL_HOST_DEVICE inline float RoundToE4M3(float value) { return fp8_detail::Round<3, 7>(value, kE4M3Max); }
CPPOOL_HOST_DEVICE inline float RoundToE5M2(float value) { return fp8_detail::Round<2, 15>(value, kE5M2Max); }

}  // namespace cppool::kernels
