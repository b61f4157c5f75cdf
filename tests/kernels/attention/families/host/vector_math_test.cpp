// Compares the inner loops, in every version that this CPU supports, with scalar code in fp64.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/attention/families/host/vector_math.h"
#include "kernels/numerics/fp8.h"
#include "kernels/numerics/half.h"
#include "tests/catch.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::kernels::host;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<const VectorMath*> AllVersions() {
  std::vector<const VectorMath*> versions;
  for (int i = 0; VectorMathAt(i); ++i) versions.push_back(VectorMathAt(i));
  return versions;
}

std::vector<float> RandomFloats(std::size_t count, float size, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-size, size);
  std::vector<float> values(count);
  for (float& x : values) x = uniform(random);
  return values;
}

TEST_CASE("The best version is the last available one") {
  CHECK(AllVersions().back() == &BestVectorMath());
  CHECK(std::string(AllVersions().front()->name) == "baseline");
}

TEST_CASE("multiply agrees with fp64 for every height, with and without transposition") {
  std::mt19937 random(1);
  for (const VectorMath* math : AllVersions()) {
    for (int rows = 1; rows <= 20; ++rows) {
      for (const int columns : {16, 48, 64}) {
        for (const int depth : {1, 2, 37}) {
          for (const bool transposed : {false, true}) {
            for (const bool accumulate : {false, true}) {
              INFO(math->name << " " << rows << " x " << columns << " x " << depth);
              const int a_stride = transposed ? rows + 3 : depth + 5, stride = columns + 16;
              const auto a =
                  RandomFloats(static_cast<std::size_t>(a_stride * std::max(rows, depth)), 1, random);
              const auto b = RandomFloats(static_cast<std::size_t>(depth * stride), 1, random);
              auto c = RandomFloats(static_cast<std::size_t>(rows * stride), 1, random);
              const auto before = c;
              math->multiply({rows, columns, depth, a.data(), transposed ? 1 : a_stride,
                              transposed ? a_stride : 1, b.data(), stride, c.data(), stride, accumulate});
              double worst = 0;
              for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < stride; ++j) {
                  const auto at = static_cast<std::size_t>(i * stride + j);
                  double want = before[at];
                  if (j < columns) {
                    want = accumulate ? want : 0;
                    for (int x = 0; x < depth; ++x) {
                      want +=
                          double{
                              a[static_cast<std::size_t>(transposed ? x * a_stride + i : i * a_stride + x)]} *
                          b[static_cast<std::size_t>(x * stride + j)];
                    }
                  }
                  worst = std::max(worst, std::abs(want - c[at]));
                }
              }
              REQUIRE(worst < 1e-5);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("Conversions, scale and blend agree with scalar code for any length") {
  std::mt19937 random(2);
  for (const VectorMath* math : AllVersions()) {
    for (std::size_t count = 0; count < 70; ++count) {
      const auto n = static_cast<int>(count);
      const auto a = RandomFloats(count, 3, random), b = RandomFloats(count, 3, random);
      std::vector<float> scaled = a, blended = a;
      math->scale(scaled.data(), 0.25f, n);
      math->blend(blended.data(), 0.25f, b.data(), -2.0f, n);
      for (std::size_t i = 0; i < count; ++i) {
        REQUIRE(scaled[i] == a[i] * 0.25f);
        REQUIRE(std::abs(blended[i] - (a[i] * 0.25f - b[i] * 2.0f)) < 1e-6f);
      }
      std::vector<std::uint16_t> bits(count);
      std::vector<float> back(count);
      math->fp16.store(a.data(), n, bits.data());
      math->fp16.load(bits.data(), n, back.data());
      for (std::size_t i = 0; i < count; ++i) {
        REQUIRE(bits[i] == FloatToFP16(a[i]));
        REQUIRE(back[i] == FP16ToFloat(bits[i]));
      }
      math->bf16.store(a.data(), n, bits.data());
      math->bf16.load(bits.data(), n, back.data());
      for (std::size_t i = 0; i < count; ++i) {
        REQUIRE(bits[i] == FloatToBF16(a[i]));
        REQUIRE(back[i] == BF16ToFloat(bits[i]));
      }
    }
  }
}

// A block of logits with positions, of `rows` x `lanes`.
struct Logits {
  Logits(int rows, int lanes, float size, std::mt19937& random)
      : values(RandomFloats(static_cast<std::size_t>(rows * kLogitStride), size, random)),
        row_position(static_cast<std::size_t>(rows)),
        lane_position(static_cast<std::size_t>(lanes)) {
    for (int i = 0; i < rows; ++i) row_position[static_cast<std::size_t>(i)] = 100 + i;
    for (int i = 0; i < lanes; ++i) lane_position[static_cast<std::size_t>(i)] = 90 + i % 24;
  }
  std::vector<float> values;
  std::vector<std::int32_t> row_position, lane_position;
};

float RoundAs(Dtype dtype, double value) {
  const auto x = static_cast<float>(value);
  return dtype == Dtype::kBf16 ? BF16ToFloat(FloatToBF16(x)) : FP16ToFloat(FloatToFP16(x));
}

TEST_CASE("The online softmax continues over several blocks") {
  const bool with_added = GENERATE(false, true);
  std::mt19937 random(3);
  const int rows = 13, lanes = 32;
  for (const VectorMath* math : AllVersions()) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      for (const bool masked : {false, true}) {
        INFO(math->name << " dtype " << static_cast<int>(dtype) << " masked " << masked);
        const HalfMath& half = dtype == Dtype::kBf16 ? math->bf16 : math->fp16;
        const double unit = dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
        std::vector<float> maximum(lanes, -kInfinity), sum(lanes, 0), correction(lanes, 7);
        std::vector<double> want_maximum(lanes, -kInfinity), want_sum(lanes, 0);
        for (int step = 0; step < 3; ++step) {
          Logits logits(rows, lanes, 40, random);
          // Multiples of 2^-10, whose sums are exact, so that the maximum is the same in fp32 and fp64.
          for (float& x : logits.values) x = std::round(x * 1024) / 1024;
          const auto before = logits.values;
          auto added = RandomFloats(before.size(), with_added ? 9 : 0, random);
          for (float& x : added) x = std::round(x * 1024) / 1024;
          const auto old_maximum = want_maximum;
          half.softmax({logits.values.data(), rows, lanes, 0.5f, masked, 2, 6, logits.row_position.data(),
                        logits.lane_position.data(), with_added ? added.data() : nullptr},
                       maximum.data(), sum.data(), correction.data());
          for (std::size_t lane = 0; lane < lanes; ++lane) {
            std::vector<double> seen(static_cast<std::size_t>(rows), -kInfinity);
            for (std::size_t row = 0; row < seen.size(); ++row) {
              const int distance = logits.row_position[row] - logits.lane_position[lane];
              if (!masked || (distance >= 2 && distance <= 6))
                seen[row] = before[row * kLogitStride + lane] * 0.5 + added[row * kLogitStride + lane];
              want_maximum[lane] = std::max(want_maximum[lane], seen[row]);
            }
            REQUIRE(maximum[lane] == static_cast<float>(want_maximum[lane]));
            const bool any = want_maximum[lane] != -kInfinity;
            const double factor =
                std::isinf(old_maximum[lane]) ? 0 : std::exp(old_maximum[lane] - want_maximum[lane]);
            REQUIRE(std::abs(correction[lane] - factor) <= 1e-6 * factor + 1e-37);
            want_sum[lane] *= factor;
            for (std::size_t row = 0; row < seen.size(); ++row) {
              const double p = any ? std::exp(seen[row] - want_maximum[lane]) : 0;
              want_sum[lane] += p;
              const float got = logits.values[row * kLogitStride + lane];
              REQUIRE(std::abs(got - p) <= unit * p + (dtype == Dtype::kFp16 ? 0x1p-25 : 1e-37));
              REQUIRE(got == RoundAs(dtype, got));  // was rounded to the dtype
            }
            REQUIRE(std::abs(sum[lane] - want_sum[lane]) <= 1e-5 * want_sum[lane]);
          }
        }
      }
    }
  }
}

TEST_CASE("P and dS agree with fp64, with lse and delta by lane, by row, and without rounding") {
  enum class Kind { kByLane, kByRow, kExactByRow };
  const auto kind = GENERATE(Kind::kByLane, Kind::kByRow, Kind::kExactByRow);
  const bool by_lane = kind == Kind::kByLane, exact = kind == Kind::kExactByRow;
  const bool masked = GENERATE(false, true), with_added = GENERATE(false, true);
  std::mt19937 random(4);
  const int rows = 21, lanes = 48;
  for (const VectorMath* math : AllVersions()) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      INFO(math->name << " dtype " << static_cast<int>(dtype) << " masked " << masked << " added "
                      << with_added << " kind " << static_cast<int>(kind));
      const HalfMath& half = dtype == Dtype::kBf16 ? math->bf16 : math->fp16;
      const double unit = exact ? 4e-6 : dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
      const double tiny = dtype == Dtype::kFp16 && !exact ? 0x1p-24 : 1e-30;
      Logits logits(rows, lanes, 8, random);
      const auto before = logits.values;
      const auto added = RandomFloats(before.size(), with_added ? 3 : 0, random);
      auto dp = RandomFloats(before.size(), 5, random);
      const auto dp_before = dp;
      auto lse = RandomFloats(48, 1, random), delta = RandomFloats(48, 1, random);
      for (float& x : lse) x += 2;
      const auto gradient = by_lane ? half.gradient_by_lane
                            : exact ? math->exact_gradient_by_row
                                    : half.gradient_by_row;
      gradient({logits.values.data(), rows, lanes, 0.25f, masked, -4, 3, logits.row_position.data(),
                logits.lane_position.data(), with_added ? added.data() : nullptr},
               dp.data(), lse.data(), delta.data());
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
          const std::size_t at = row * kLogitStride + lane, of = by_lane ? lane : row;
          const int distance = logits.row_position[row] - logits.lane_position[lane];
          const bool visible = !masked || (distance >= -4 && distance <= 3);
          const double p = visible ? std::exp(before[at] * 0.25 + added[at] - lse[of]) : 0;
          const double ds = p * (double{dp_before[at]} - delta[of]);
          REQUIRE(std::abs(logits.values[at] - p) <= 1.01 * unit * p + tiny);
          REQUIRE(std::abs(dp[at] - ds) <= 1.01 * unit * std::abs(ds) + tiny + 1e-6 * p);
          if (!exact) REQUIRE(dp[at] == RoundAs(dtype, dp[at]));
        }
      }
    }
  }
}

// Tests the vectorized exp and rounding through a gradient with lse 0, where P = exp(x).
TEST_CASE("exp is right over its whole range, and rounding agrees with half.h") {
  for (const VectorMath* math : AllVersions()) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      const HalfMath& half = dtype == Dtype::kBf16 ? math->bf16 : math->fp16;
      std::mt19937 random(5);
      const std::vector<float> zero(kTile, 0);
      long wrong = 0, worse = 0;
      for (int round = 0; round < 200; ++round) {
        Logits logits(16, 16, 87.4f, random);
        const auto before = logits.values;
        // dS = P * (dP - delta) with P = 1 and delta = 0 rounds dP; dP has random bits, with every exponent.
        std::vector<float> dp(before.size()), patterns(before.size());
        for (float& x : patterns) {
          x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
          if (!std::isfinite(x)) x = 0;
        }
        std::vector<float> ones(before.size(), 0.0f);
        dp = patterns;
        half.gradient_by_row({ones.data(), 16, 16, 1, false, 0, 0, nullptr, nullptr}, dp.data(), zero.data(),
                             zero.data());
        half.gradient_by_row({logits.values.data(), 16, 16, 1, false, 0, 0, nullptr, nullptr},
                             std::vector<float>(before.size()).data(), zero.data(), zero.data());
        for (std::size_t row = 0; row < 16; ++row) {
          for (std::size_t lane = 0; lane < 16; ++lane) {
            const std::size_t at = row * kLogitStride + lane;
            wrong += ones[at] == 1.0f ? 0 : 1;
            wrong += dp[at] == RoundAs(dtype, patterns[at]) ? 0 : 1;
            // If the exact value is close to a midpoint, both roundings are right.
            const double exact = before[at] < -87 ? 0 : std::exp(double{before[at]});
            const float low = RoundAs(dtype, exact * (1 - 3e-7)), high = RoundAs(dtype, exact * (1 + 3e-7));
            worse += logits.values[at] == low || logits.values[at] == high ? 0 : 1;
          }
        }
      }
      INFO(math->name << " dtype " << static_cast<int>(dtype));
      CHECK(wrong == 0);
      CHECK(worse == 0);
    }
  }
}

TEST_CASE("P and dS of fp8 are the values of the casts, for random bit patterns and every scale") {
  std::mt19937 random(9);
  for (const VectorMath* math : AllVersions()) {
    INFO(math->name);
    int wrong = 0;
    for (int repeat = 0; repeat < 200; ++repeat) {
      const std::size_t count = 16 * kLogitStride;
      std::vector<float> patterns(count), zeros(count), lane(kTile);
      for (float& x : patterns) {
        x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        if (!std::isfinite(x)) x = 0;
      }
      // P is exp(0) = 1, so that dS is dP.
      const float scale = std::ldexp(1.0f + static_cast<float>(repeat % 7) / 7, repeat % 40 - 20);
      std::vector<float> p = zeros, ds = patterns;
      Block block{p.data(), 16, 16, 1, false, 0, 0, nullptr, nullptr};
      block.p_scale = 448;
      block.ds_scale = scale;
      block.ds_inverse = 1 / scale;
      (repeat % 2 ? math->fp8.gradient_by_row : math->fp8.gradient_by_lane)(block, ds.data(), lane.data(),
                                                                            lane.data());
      for (std::size_t row = 0; row < 16; ++row) {
        for (std::size_t i = row * kLogitStride; i < row * kLogitStride + 16; ++i) {
          wrong += ds[i] == E5M2ToFloat(FloatToE5M2(patterns[i] * scale)) * block.ds_inverse ? 0 : 1;
          wrong += p[i] == 448 * (1.0f / 448) ? 0 : 1;
        }
      }
      ds = patterns;
      math->round_block(ds.data(), 16, 16);
      for (std::size_t column = 0; column < 16; ++column) {
        float most = 0;
        for (std::size_t row = 0; row < 16; ++row)
          most = std::max(most, std::abs(patterns[row * kLogitStride + column]));
        const std::uint8_t e = std::max<std::uint8_t>(1, E8M0Of(most));
        for (std::size_t row = 0; row < 16; ++row) {
          const std::size_t i = row * kLogitStride + column;
          wrong +=
              ds[i] == E4M3ToFloat(FloatToE4M3(patterns[i] * E8M0Reciprocal(e))) * E8M0ToFloat(e) ? 0 : 1;
        }
      }
    }
    CHECK(wrong == 0);
  }
}

}  // namespace
