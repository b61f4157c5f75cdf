// Tests of the 8-bit formats against a slow formulation: a search among all values of the format.
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "kernels/half.h"
#include "kernels/numerics/half.h"
#include "kernels/numerics/rounding.h"
#include "tests/catch.h"

namespace {

using namespace cppool::kernels;

constexpr float kFp32Infinity = std::numeric_limits<float>::infinity();

struct Fp8Format {
  Dtype dtype;
  int exponent_bits, fraction_bits, largest;  // `largest`: pattern of the largest finite value
  std::uint8_t (*encode)(float);
  float (*decode)(std::uint8_t);

  double Value(int pattern) const {  // of a finite pattern without a sign
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = pattern >> fraction_bits, fraction = pattern & ((1 << fraction_bits) - 1);
    if (exponent == 0) return std::ldexp(fraction, 1 - bias - fraction_bits);
    return std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  }
  int Round(float value) const {
    if (std::isnan(value)) return 0x7f | (std::signbit(value) ? 0x80 : 0);
    const int sign = std::signbit(value) ? 0x80 : 0;
    const double size = std::abs(static_cast<double>(value));
    int low = 0;
    while (low < largest && Value(low + 1) <= size) ++low;
    if (low == largest) return sign | largest;
    const double below = size - Value(low), above = Value(low + 1) - size;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : low + 1);
  }
};

const Fp8Format kFp8Formats[] = {{Dtype::kE4M3, 4, 3, 0x7e, FloatToE4M3, E4M3ToFloat},
                                 {Dtype::kE5M2, 5, 2, 0x7b, FloatToE5M2, E5M2ToFloat}};

}  // namespace

TEST_CASE("every payload decodes to its value and encodes to itself") {
  for (const Fp8Format& format : kFp8Formats) {
    CAPTURE(NameOf(format.dtype));
    for (int pattern = 0; pattern < 256; ++pattern) {
      CAPTURE(pattern);
      const float value = format.decode(static_cast<std::uint8_t>(pattern));
      REQUIRE(std::signbit(value) == (pattern >= 0x80));
      const int magnitude = pattern & 0x7f;
      if (magnitude <= format.largest) {
        REQUIRE(std::abs(value) == format.Value(magnitude));
        REQUIRE(format.encode(value) == pattern);
        REQUIRE(BF16ToFloat(FloatToBF16(value)) == value);  // exact in bf16
      } else if (format.dtype == Dtype::kE5M2 && magnitude == 0x7c) {
        REQUIRE(std::isinf(value));
        REQUIRE(format.encode(value) == ((pattern & 0x80) | format.largest));
      } else {
        REQUIRE(std::isnan(value));
        REQUIRE((std::bit_cast<std::uint32_t>(value) & 0x00400000u) !=
                0);  // quiet: a product has the same bits
        REQUIRE(format.encode(value) == ((pattern & 0x80) | 0x7f));
      }
    }
  }
}

TEST_CASE("every bf16 input is cast to the nearest value, ties to even, and saturates") {
  for (const Fp8Format& format : kFp8Formats) {
    CAPTURE(NameOf(format.dtype));
    for (int bits = 0; bits < 65536; ++bits) {
      const float value = BF16ToFloat(static_cast<std::uint16_t>(bits));
      if (format.encode(value) != format.Round(value)) FAIL("bf16 pattern " << bits);
    }
  }
}

TEST_CASE("every tie in fp32 goes to the even payload, and its neighbours to the nearer one") {
  for (const Fp8Format& format : kFp8Formats) {
    CAPTURE(NameOf(format.dtype));
    for (int pattern = 0; pattern < format.largest; ++pattern) {
      const auto tie = static_cast<float>((format.Value(pattern) + format.Value(pattern + 1)) / 2);
      for (const float sign : {1.0f, -1.0f}) {
        const int signed_bit = sign < 0 ? 0x80 : 0;
        CAPTURE(pattern, sign);
        REQUIRE(format.encode(sign * tie) == (signed_bit | (pattern % 2 == 0 ? pattern : pattern + 1)));
        REQUIRE(format.encode(sign * std::nextafter(tie, 0.0f)) == (signed_bit | pattern));
        REQUIRE(format.encode(sign * std::nextafter(tie, kFp32Infinity)) == (signed_bit | (pattern + 1)));
      }
    }
    std::mt19937 random(5);
    for (int i = 0; i < 200000; ++i) {
      const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
      if (format.encode(value) != format.Round(value)) FAIL("value " << value);
      if (std::isnan(value)) continue;
      if (RoundTo(format.dtype, value) != format.decode(static_cast<std::uint8_t>(format.Round(value))))
        FAIL("RoundTo of " << value);
    }
    CHECK(RoundTo(format.dtype, kFp32Infinity) == format.Value(format.largest));
    CHECK(RoundTo(format.dtype, -1e300) == -format.Value(format.largest));
    CHECK(std::isnan(RoundTo(format.dtype, std::numeric_limits<double>::quiet_NaN())));
  }
}

TEST_CASE("scales are fp8_max / amax, with their special cases") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float fp8_max : {kE4M3Max, kE5M2Max}) {
    CHECK(CurrentScale(fp8_max, 3.0f) == fp8_max / 3.0f);
    for (const float amax : {0.0f, kFp32Infinity, nan}) CHECK(CurrentScale(fp8_max, amax) == 1);
    CHECK(CurrentScale(fp8_max, 1e-40f) == FLT_MAX);
    CHECK(CurrentScale(fp8_max, FLT_MAX) == fp8_max / FLT_MAX);
  }
}

TEST_CASE("E8M0 is the smallest power of two with which a block fits into E4M3") {
  CHECK(E8M0Of(0.0f) == 0x00);
  CHECK(E8M0Of(kFp32Infinity) == 0xfe);
  CHECK(E8M0Of(std::numeric_limits<float>::quiet_NaN()) == 0xff);
  CHECK(std::isnan(E8M0ToFloat(0xff)));
  for (int e = 0; e < 0xff; ++e) {
    const auto byte = static_cast<std::uint8_t>(e);
    REQUIRE(E8M0ToFloat(byte) == std::ldexp(1.0f, e - 127));
    REQUIRE(E8M0Reciprocal(byte) == std::ldexp(1.0f, 127 - e));
  }
  const auto check = [](float amax) {
    const int e = E8M0Of(amax);
    const double most = amax;
    if (448 * std::ldexp(1.0, e - 127) < most) FAIL("saturates: " << amax);
    if (e > 0 && 448 * std::ldexp(1.0, e - 128) >= most) FAIL("not the smallest: " << amax);
  };
  for (int bits = 1; bits < 0x7f80; ++bits) check(BF16ToFloat(static_cast<std::uint16_t>(bits)));
  std::mt19937 random(6);
  for (int i = 0; i < 200000; ++i) {
    const float value = std::abs(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    if (std::isfinite(value) && value > 0) check(value);
  }
}
