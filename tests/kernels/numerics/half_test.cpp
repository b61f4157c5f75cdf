// Tests of the fp16 and bf16 conversions: every bit pattern, and rounding compared with the definition.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/numerics/half.h"
#include "tests/catch.h"
#include "tests/kernels/load_element.h"

namespace {

using namespace cppool::kernels;

// A 16-bit floating-point format defined by its parameters; values are computed with ldexp only.
struct Format {
  int exponent_bits, fraction_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << fraction_bits);
  }
  double Value(std::uint16_t bits) const {  // `bits` is finite and not negative
    const int exponent = bits >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
    if (exponent == 0) return std::ldexp(fraction, 1 - bias() - fraction_bits);
    return std::ldexp(fraction + (1 << fraction_bits), exponent - bias() - fraction_bits);
  }
  // Rounds to nearest, ties to the even pattern. The pattern of infinity counts as the power of two above the
  // largest finite value.
  std::uint16_t Round(double value) const {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    value = std::abs(value);
    const double overflow = std::ldexp(1, bias() + 1);
    int low = 0, high = infinity();  // binary search: patterns increase with their values
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (Value(static_cast<std::uint16_t>(middle)) <= value ? low : high) = middle;
    }
    if (value >= overflow) return sign | infinity();
    const double below = value - Value(static_cast<std::uint16_t>(low));
    const double above = (high == infinity() ? overflow : Value(static_cast<std::uint16_t>(high))) - value;
    const int nearest = below < above || (below == above && low % 2 == 0) ? low : high;
    return static_cast<std::uint16_t>(sign | nearest);
  }
};

constexpr Format kFp16{5, 10};
constexpr Format kBf16{8, 7};

template <typename T>
void CheckEveryPattern(const Format& format) {
  long wrong = 0;
  for (int i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const auto magnitude = static_cast<std::uint16_t>(i & 0x7fff);
    const float value = T::ToFloat(bits);
    if (std::signbit(value) != (i >= 0x8000)) ++wrong;
    if (magnitude > format.infinity()) {
      const std::uint16_t back = T::FromFloat(value);
      const bool quiet_nan =
          (back & ~(1 << (format.fraction_bits - 1))) == (bits & ~(1 << (format.fraction_bits - 1))) &&
          (back & 0x7fff) > format.infinity();
      if (!std::isnan(value) || !quiet_nan) ++wrong;
    } else {
      const double want =
          magnitude == format.infinity() ? std::numeric_limits<double>::infinity() : format.Value(magnitude);
      if (std::abs(static_cast<double>(value)) != want) ++wrong;
      if (T::FromFloat(value) != bits || T::FromDouble(value) != bits) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("Every bit pattern of fp16 and bf16 is converted exactly in both directions") {
  CheckEveryPattern<FP16>(kFp16);
  CheckEveryPattern<BF16>(kBf16);
}

// Checks values next to every representable value and every midpoint, where rounding errors occur.
template <typename T>
void CheckRounding(const Format& format) {
  long wrong = 0;
  const auto check = [&](double value) {
    for (const double x : {value, -value}) {
      if (T::FromDouble(x) != format.Round(x)) ++wrong;
      const auto narrow = static_cast<float>(x);
      if (std::isfinite(narrow) && T::FromFloat(narrow) != format.Round(narrow)) ++wrong;
    }
  };
  for (int i = 0; i < format.infinity(); ++i) {
    const double value = format.Value(static_cast<std::uint16_t>(i));
    const double next = i + 1 == format.infinity() ? std::ldexp(1, format.bias() + 1)
                                                   : format.Value(static_cast<std::uint16_t>(i + 1));
    const double middle = (value + next) / 2;
    for (const double x : {value, middle}) {
      check(x);
      check(std::nextafter(x, 0));
      check(std::nextafter(x, 1e300));
      const auto narrow = static_cast<float>(x);
      check(std::nextafter(narrow, 0.0f));
      check(std::nextafter(narrow, 3e38f));
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("Conversions round once, to nearest, ties to even, a double not to float first") {
  CheckRounding<FP16>(kFp16);
  CheckRounding<BF16>(kBf16);
}

TEST_CASE("Random floats and doubles are rounded by the definition of the format") {
  std::mt19937_64 random(3);
  long wrong = 0;
  for (int i = 0; i < 300000; ++i) {
    const auto narrow = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(narrow) && !std::isinf(narrow)) {
      if (FloatToFP16(narrow) != kFp16.Round(narrow)) ++wrong;
      if (FloatToBF16(narrow) != kBf16.Round(narrow)) ++wrong;
    }
    // Exponents in and around the ranges of the formats.
    const double wide =
        std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 300) - 53 - 160);
    if (FP16::FromDouble(wide) != kFp16.Round(wide)) ++wrong;
    if (BF16::FromDouble(wide) != kBf16.Round(wide)) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("Infinities, NaN, overflow and underflow are converted") {
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(FP16::FromDouble(infinity) == 0x7c00);
  CHECK(FP16::FromDouble(-infinity) == 0xfc00);
  CHECK(BF16::FromDouble(infinity) == 0x7f80);
  CHECK(BF16::FromDouble(-infinity) == 0xff80);
  CHECK(FP16::FromDouble(65519.99) == 0x7bff);
  CHECK(FP16::FromDouble(65520) == 0x7c00);
  CHECK(BF16::FromDouble(1e300) == 0x7f80);
  CHECK(BF16::FromDouble(-1e300) == 0xff80);
  CHECK(FP16::FromDouble(1e-300) == 0);
  CHECK(FP16::FromDouble(-1e-300) == 0x8000);
  for (const double nan :
       {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(std::isnan(FP16ToFloat(FP16::FromDouble(nan))));
    CHECK(std::isnan(BF16ToFloat(BF16::FromDouble(nan))));
  }
  // A NaN whose payload is only in the removed bits must not become infinity.
  CHECK(std::isnan(FP16ToFloat(FloatToFP16(std::bit_cast<float>(0x7f800001u)))));
  CHECK(std::isnan(BF16ToFloat(FloatToBF16(std::bit_cast<float>(0x7f800001u)))));
  CHECK(std::isnan(BF16ToFloat(FloatToBF16(std::bit_cast<float>(0xffffffffu)))));
}

TEST_CASE("StoreElement and LoadElement access one element of every dtype") {
  std::vector<double> storage(4);
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    std::memset(storage.data(), 0xff, storage.size() * sizeof(double));
    StoreElement(dtype, storage.data(), 2, -1.5);
    CHECK(LoadElement(dtype, storage.data(), 2) == -1.5);
    CHECK(std::isnan(LoadElement(dtype, storage.data(), 1)));
    CHECK(std::isnan(LoadElement(dtype, storage.data(), 3)));
  }
  CHECK_THROWS_AS(DispatchDtype(Dtype::kFp64, [](auto) {}), RuntimeError);
}

}  // namespace
