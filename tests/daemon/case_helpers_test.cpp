// The numbers of cppool/case_helpers.h. Its owners are tested by daemon/examples/all_reduce.
#include <cppool/case_helpers.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tests/catch.h"

namespace cppool::cases {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Every 16-bit number comes back; between two neighbours the nearer is taken, in the middle the one with an
// even last bit.
template <typename Wide, typename Narrow>
void CheckRounding(const Wide& wide, const Narrow& narrow, std::uint16_t infinity) {
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = wide(bits);
    if (std::isnan(value)) {
      CHECK(std::isnan(wide(narrow(value))));
      continue;
    }
    if (narrow(value) != bits) FAIL(i << " comes back as " << narrow(value));
    const auto next = static_cast<std::uint16_t>(bits + 1);
    if ((bits & 0x7fff) >= infinity - 1) continue;  // the next one is an infinity
    const double middle = (static_cast<double>(value) + wide(next)) / 2;
    const auto exact = static_cast<float>(middle);
    if (exact != middle) continue;
    if (narrow(exact) != (bits % 2 == 0 ? bits : next)) FAIL("the middle after " << i);
    if (narrow(std::nextafter(exact, wide(next))) != next) FAIL("above the middle after " << i);
    if (narrow(std::nextafter(exact, value)) != bits) FAIL("below the middle after " << i);
  }
  CHECK(narrow(kInfinity) == infinity);
  CHECK(narrow(-kInfinity) == (infinity | 0x8000));
  CHECK(narrow(std::numeric_limits<float>::max()) == infinity);
}

TEST_CASE("16-bit numbers are rounded to the nearest, ties to even") {
  CheckRounding(FloatOfHalf, HalfOfFloat, 0x7c00);
  CheckRounding(FloatOfBf16, Bf16OfFloat, 0x7f80);
  CHECK(FloatOfHalf(0x3c00) == 1.0f);
  CHECK(FloatOfHalf(0x7bff) == 65504.0f);
  CHECK(FloatOfHalf(0x0001) == std::ldexp(1.0f, -24));
  CHECK(HalfOfFloat(65519.0f) == 0x7bff);
  CHECK(HalfOfFloat(65520.0f) == 0x7c00);
  CHECK(HalfOfFloat(std::ldexp(1.0f, -25)) == 0);
  CHECK(FloatOfBf16(0x3f80) == 1.0f);
}

TEST_CASE("inputs depend on each part of their key, and fill their range") {
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 1000; ++i)
    seen.insert({Random(i, 0, 0), Random(0, i + 1, 0), Random(0, 0, i + 1)});
  CHECK(seen.size() == 3000);
  float least = 1, most = -1, small = 0, large = 0;
  double sum = 0;
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const float uniform = Uniform(7, 1, i), integer = SmallInteger(7, 1, i);
    least = std::min(least, uniform), most = std::max(most, uniform);
    small = std::min(small, integer), large = std::max(large, integer);
    CHECK(integer == std::floor(integer));
    sum += uniform;
  }
  CHECK((least >= -1 && least < -0.99 && most < 1 && most > 0.99));
  CHECK((small == -512 && large == 511));
  CHECK(std::abs(sum / 10000) < 0.03);
}

TEST_CASE("a comparison sees NaN and infinities, and the first element that is wrong") {
  const std::vector<float> wanted = {1, -2, 3, 0};
  const auto compared = [&](std::vector<float> got, double tolerance = 0.5) {
    return Compare(got, wanted, wanted.size(), tolerance);
  };
  CHECK(compared({1, -2, 3, 0}, 0).ok);
  CHECK(compared({1, -2, 3, 0}, 0).rel_err == 0);
  const Comparison close = compared({1.25f, -2, 2.5f, 0});
  CHECK(close.ok);
  CHECK(close.max_abs_err == 0.5);
  CHECK(close.rel_err == Approx(std::sqrt((0.0625 + 0.25) / 14)));
  const Comparison wrong = compared({1, -2, 4, 1});
  CHECK_FALSE(wrong.ok);
  CHECK(wrong.first == 2);
  CHECK(wrong.bad == 2);
  CHECK(wrong.worst == 2);
  CHECK((wrong.got == 4 && wrong.wanted == 3));
  CHECK(wrong.max_abs_err == 1);
  for (const float odd : {kNan, kInfinity, -kInfinity}) {
    const Comparison bad = compared({1, odd, 3, 0}, 1e30);
    CHECK_FALSE(bad.ok);
    CHECK(bad.first == 1);
    CHECK((bad.bad == 1 && bad.worst == 1 && bad.wanted == -2));
    CHECK(std::isnan(bad.max_abs_err));
  }
  const std::vector<float> special = {kNan, kInfinity, 1};
  CHECK(Compare(special, special, 3, 0).ok);
  const std::vector<float> zero = {0, 0}, one = {0, 1};
  CHECK(Compare(one, zero, 2, 0).rel_err == 1);  // not 1 / 0
}

TEST_CASE("a line of output begins with the rank, and has an end whatever its length") {
  char* text = nullptr;
  std::size_t size = 0;
  std::FILE* const before = stderr;
  stderr = open_memstream(&text, &size);
  cppool_runtime runtime{};
  runtime.rank = 3;
  Print(&runtime, "%d of %s", 7, "all");
  Print(&runtime, "%s", std::string(10000, 'x').c_str());
  Print(&runtime, "%s", "");
  std::fclose(stderr);
  stderr = before;
  const std::string written(text, size);
  std::free(text);
  CHECK(written == "[rank 3] 7 of all\n[rank 3] " + std::string(4096 - 1 - std::strlen("[rank 3] "), 'x') +
                       "\n[rank 3] \n");
}

}  // namespace
}  // namespace cppool::cases
