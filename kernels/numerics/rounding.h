// Rounds fp64 to a narrower format, to nearest with ties to even, with that format's subnormals, signed zeros
// and overflow (the 8-bit formats saturate), as plain attention does when it stores an intermediate result.
// The result has the same bits on the host and in CUDA kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/host_device.h"

namespace cppool::kernels {

CPPOOL_HOST_DEVICE inline double RoundTo(Dtype dtype, double value) {
  int digits = 0;    // significant bits
  int smallest = 0;  // exponent of the smallest subnormal
  int largest = 0;   // exponent of the largest finite value
  double most = 0;   // a format that saturates: its largest value
  switch (dtype) {
    case Dtype::kFp16:
      digits = 11, smallest = -24, largest = 15;
      break;
    case Dtype::kBf16:
      digits = 8, smallest = -133, largest = 127;
      break;
    case Dtype::kFp32:
      digits = 24, smallest = -149, largest = 127;
      break;
    case Dtype::kFp64:
      return value;
    case Dtype::kE4M3:
      digits = 4, smallest = -9, largest = 8, most = 448;
      break;
    case Dtype::kE5M2:
      digits = 3, smallest = -16, largest = 15, most = 57344;
      break;
  }
  std::uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023;
  if (exponent == 1024 && (most == 0 || value != value)) return value;  // NaN, infinity
  const auto infinity = [&] {
    if (most != 0) return value < 0 ? -most : most;
    const std::uint64_t infinity_bits = (bits & (std::uint64_t{1} << 63)) | (std::uint64_t{0x7FF} << 52);
    double result;
    memcpy(&result, &infinity_bits, sizeof result);
    return result;
  };
  if (exponent > largest) return infinity();
  // Adding 1.5 * 2^52 units of the last kept place rounds away all bits below it.
  const int unit = exponent - (digits - 1) > smallest ? exponent - (digits - 1) : smallest;
  const std::uint64_t shift_bits =
      (static_cast<std::uint64_t>(1023 + 52 + unit) << 52) | (std::uint64_t{1} << 51);
  double shift;
  memcpy(&shift, &shift_bits, sizeof shift);
  const double sum = value + shift;
  const double rounded = sum - shift;
  std::uint64_t rounded_bits;
  memcpy(&rounded_bits, &rounded, sizeof rounded_bits);
  if (static_cast<int>(rounded_bits >> 52 & 0x7FF) - 1023 > largest) return infinity();
  if (most != 0 && (rounded > most || rounded < -most)) return infinity();
  rounded_bits |=
      bits & (std::uint64_t{1} << 63);  // the sum above is +0 for what a negative value underflows to
  double result;
  memcpy(&result, &rounded_bits, sizeof result);
  return result;
}

}  // namespace cppool::kernels
