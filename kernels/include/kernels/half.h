// fp16 and bf16 as the host computes with them: 16-bit patterns in memory, fp32 in registers. Every
// conversion is exact where it can be and otherwise rounds once, to nearest even; subnormals, infinities and
// NaN (made quiet) are kept. Written without branches, so that loops over them vectorise.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace cppool::kernels {

CPPOOL_HOST_DEVICE inline float BF16ToFloat(std::uint16_t bits) {
  return __builtin_bit_cast(float, std::uint32_t{bits} << 16);
}

CPPOOL_HOST_DEVICE inline std::uint16_t FloatToBF16(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

CPPOOL_HOST_DEVICE inline float FP16ToFloat(std::uint16_t bits) {
  constexpr std::uint32_t kRebias = (127u - 15u) << 23;
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t magnitude = std::uint32_t{bits & 0x7fffu} << 13;
  const std::uint32_t exponent = magnitude & 0x0f800000u;
  const std::uint32_t normal = magnitude + kRebias;
  const std::uint32_t special = normal + kRebias;  // infinity and NaN: the exponent that is all ones stays so
  // A subnormal is an integer below 2^10 at a known exponent: fp32 subtraction normalises it.
  const std::uint32_t subnormal =
      __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, normal + (1u << 23)) -
                                            __builtin_bit_cast(float, kRebias + (1u << 23)));
  const std::uint32_t result = exponent == 0x0f800000u ? special : exponent == 0 ? subnormal : normal;
  return __builtin_bit_cast(float, result | sign);
}

CPPOOL_HOST_DEVICE inline std::uint16_t FloatToFP16(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the addition of 0.5 aligns the last place of the sum with that of fp16's subnormals and
  // rounds there.
  const std::uint32_t tiny = magnitude < (113u << 23) ? magnitude : 0u;
  const std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, tiny) + 0.5f) -
                                  __builtin_bit_cast(std::uint32_t, 0.5f);
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  std::uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? 0x7c00u : result;  // 2^16 and above
  result = magnitude > 0x7f800000u ? nan : result;
  return static_cast<std::uint16_t>(result | sign);
}

// The fp32 value from which a further rounding gives what rounding `value` itself would: truncated, with the
// last bit set when anything was cut off ("round to odd"; Boldo and Melquiond 2008).
inline float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  std::uint32_t bits = __builtin_bit_cast(std::uint32_t, nearest);
  const bool away = (back > value && value > 0) || (back < value && value < 0);
  bits -= away ? 1u : 0u;
  bits |= (back < value || back > value) ? 1u : 0u;
  return __builtin_bit_cast(float, bits);
}

}  // namespace cppool::kernels
