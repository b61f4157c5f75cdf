// The numbers of cppool/case_helpers.h, which includes it: seeded inputs, 16-bit floating point, comparison
// with NaN seen; and lines of output.
#pragma once

#include <cppool/case.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>

namespace cppool::cases {

// A number for each (seed, tensor, index), the same on every machine: the finalizer of SplitMix64 (Steele,
// Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), applied once for each part
// of the key.
inline std::uint64_t Random(std::uint64_t seed, std::uint64_t tensor, std::uint64_t index) {
  const auto mix = [](std::uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  return mix(mix(mix(seed) ^ tensor) ^ index);
}

// In [-1, 1), a multiple of 2^-23.
inline float Uniform(std::uint64_t seed, std::uint64_t tensor, std::uint64_t index) {
  return static_cast<float>(static_cast<std::int32_t>(Random(seed, tensor, index) >> 40) - (1 << 23)) /
         (1 << 23);
}

// A whole number in [-512, 511]. Sums of up to 2^15 of them are exact in float32, in any order.
inline float SmallInteger(std::uint64_t seed, std::uint64_t tensor, std::uint64_t index) {
  return static_cast<float>(static_cast<std::int32_t>(Random(seed, tensor, index) >> 54) - 512);
}

// bfloat16 and float16 as bits. To 16 bits: round to nearest, ties to even; NaN stays NaN; what is too large
// becomes an infinity.
inline float FloatOfBf16(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline std::uint16_t Bf16OfFloat(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float FloatOfHalf(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value;
  if (exponent == 31) {
    value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else {
    value = exponent ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                     : std::ldexp(static_cast<float>(fraction), -24);
  }
  return std::copysign(value, bits & 0x8000 ? -1.0f : 1.0f);
}

inline std::uint16_t HalfOfFloat(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520)
    return static_cast<std::uint16_t>(sign | 0x7c00);          // halfway to the number after the largest
  int exponent = -24;                                          // also that of 0
  if (magnitude > 0) std::frexp(magnitude, &exponent);         // magnitude < 2^exponent
  const int unit = exponent - 11 > -24 ? exponent - 11 : -24;  // the last bit's exponent
  const double scaled = std::ldexp(magnitude, -unit);          // up to 2^11, exact
  double rounded = std::floor(scaled);
  const double rest = scaled - rounded;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(rounded, 2) != 0)) ++rounded;
  // A significand that rounds up to the next binade carries into the exponent's bits.
  const int biased = unit + 24;
  return static_cast<std::uint16_t>(
      sign | (biased == 0 ? static_cast<int>(rounded) : (biased << 10) + static_cast<int>(rounded)));
}

// How a result differs from a reference.
struct Comparison {
  double max_abs_err = 0;  // NaN when a value is NaN or infinite where the other one is not the same
  double rel_err = 0;      // RMS of the difference over RMS of the reference; 0 when there is no difference
  double tolerance = 0;
  bool ok = false;
  std::size_t first = 0;  // the first element beyond the tolerance; `count` when there is none
  std::size_t bad = 0;    // how many are beyond it
  std::size_t worst = 0;  // the element that is furthest off, with what it is and should be
  double got = 0, wanted = 0;
};

// Elements are `got[i]` and `wanted[i]`, 0 <= i < count, anything that converts to double. It holds when no
// difference is larger than `tolerance`; NaN differs from everything but NaN, an infinity from everything but
// itself.
template <typename Got, typename Wanted>
Comparison Compare(const Got& got, const Wanted& wanted, std::size_t count, double tolerance) {
  Comparison result;
  result.tolerance = tolerance;
  result.first = count;
  double error = 0, norm = 0, furthest = -1;
  bool finite = true;
  for (std::size_t i = 0; i < count; ++i) {
    const double a = static_cast<double>(got[i]), b = static_cast<double>(wanted[i]);
    const bool same = a == b || (std::isnan(a) && std::isnan(b));
    const double difference = same ? 0 : std::fabs(a - b);
    if (!(difference <= tolerance) && result.bad++ == 0) result.first = i;
    const double off = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
    if (off > furthest) {
      furthest = off;
      result.worst = i;
      result.got = a;
      result.wanted = b;
    }
    finite = finite && std::isfinite(difference);
    if (difference > result.max_abs_err) result.max_abs_err = difference;
    error += difference * difference;
    if (std::isfinite(b)) norm += b * b;
  }
  if (!finite) result.max_abs_err = std::numeric_limits<double>::quiet_NaN();
  result.rel_err = error == 0 ? 0 : norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  result.ok = result.first == count;
  return result;
}

// Writes the line "[rank 1] TEXT" to stderr in one piece. TEXT as for printf; what is longer than a line of 4
// KiB is cut off. In the daemon the lines of printf and iostreams begin with the rank, too; this takes it
// from `rt`, and so is right on a thread that ranks share, and in other processes. The command shows it for a
// case that fails, and with --verbose.
__attribute__((format(printf, 2, 3))) inline void Print(const cppool_runtime* rt, const char* format, ...) {
  char line[4096];
  int size = std::snprintf(line, sizeof(line), "[rank %d] ", rt->rank);
  std::va_list values;
  va_start(values, format);
  const int text = std::vsnprintf(line + size, sizeof(line) - static_cast<std::size_t>(size), format, values);
  va_end(values);
  size =
      std::min(size + std::max(text, 0), static_cast<int>(sizeof(line)) - 1);  // the place of the zero byte
  line[size] = '\n';
  std::fwrite(line, 1, static_cast<std::size_t>(size) + 1, stderr);
}

// Reports it as a check of this rank.
inline void Report(cppool_case_context* c, const char* tensor, const char* against,
                   const Comparison& result) {
  const cppool_check check{tensor,    against, result.max_abs_err, result.rel_err, result.tolerance,
                           result.ok, 0};
  c->check(c, &check);
  if (result.ok || c->struct_size < offsetof(cppool_case_context, locate) + sizeof(c->locate)) return;
  const std::string index = '[' + std::to_string(result.worst) + ']';
  const cppool_location location{index.c_str(), result.got, result.wanted,
                                 static_cast<std::int64_t>(result.bad), nullptr};
  c->locate(c, &location);
}

}  // namespace cppool::cases
