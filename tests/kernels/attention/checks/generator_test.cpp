#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/numerics/philox.h"
#include "kernels/numerics/rounding.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/check_rank.h"

namespace cppool::kernels::test {
namespace {

// Random123's tests/kat_vectors, "philox4x32 10".
TEST_CASE("Philox gives the published known answers") {
  const auto check = [](PhiloxBlock counter, std::uint64_t key, PhiloxBlock expected) {
    const PhiloxBlock got = Philox4x32(counter, key);
    for (int i = 0; i < 4; ++i) CHECK(got.word[i] == expected.word[i]);
  };
  check({{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  check({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffffffffffff,
        {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  check({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822,
        {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

TEST_CASE("an input value is rounded once to bf16 and is exact in fp16") {
  for (std::uint32_t sum = 0; sum <= 1020; ++sum) {
    std::uint32_t word = 0;
    for (std::uint32_t left = sum, shift = 0; left > 0; left -= std::min(left, 255u), shift += 8)
      word |= std::min(left, 255u) << shift;
    const float value = InputValue(word);
    REQUIRE(value == (static_cast<float>(sum) - 510) / 256);
    REQUIRE(InputBf16(value) == FloatToBF16(value));
    REQUIRE(FP16ToFloat(InputFp16(value)) == value);
    REQUIRE(InputFp16(value) == FloatToFP16(value));
  }
}

CheckRank HostRank() { return CheckRank(CreateHostBackend(1), &MakeHostCheckKernels); }

using Token = std::pair<int, int>;  // sequence, position

std::map<Token, std::vector<double>> Tokens(const CheckRank& rank, const Layout& layout, Dtype dtype,
                                            int heads, int dim) {
  const std::size_t row_size = static_cast<std::size_t>(heads) * dim;
  const Buffer buffer = rank.Poisoned(layout.rows * row_size * SizeOf(dtype));
  rank.kernels().Generate(InputTensor::kK, 7, layout, heads, dim, dtype, buffer.get(), rank.stream());
  const std::vector<double> values = Doubles(dtype, rank.Download<std::uint8_t>(buffer));
  std::map<Token, std::vector<double>> tokens;
  for (const Segment& segment : layout.segments) {
    for (int i = 0; i < segment.length; ++i) {
      const auto begin = values.begin() + (segment.row + std::int64_t{i} * layout.row_step) *
                                              static_cast<std::int64_t>(row_size);
      tokens[{segment.sequence, segment.position + i}].assign(begin,
                                                              begin + static_cast<std::int64_t>(row_size));
    }
  }
  return tokens;
}

TEST_CASE("a token has the same values in every layout, on every rank and in every world") {
  const CheckRank rank = HostRank();
  const Dtype dtype = GENERATE(Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64);
  const int dim = GENERATE(8, 10);
  const auto reference = Tokens(rank, GlobalLayout(QkvFormat::kBshd, UniformSequences(3, 32)), dtype, 5, dim);
  REQUIRE(reference.size() == 3 * 32);
  CHECK((Tokens(rank, GlobalLayout(QkvFormat::kSbhd, UniformSequences(3, 32)), dtype, 5, dim) == reference));
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
    for (const int world_size : {2, 4, 8}) {
      std::map<Token, std::vector<double>> all;
      for (int r = 0; r < world_size; ++r)
        all.merge(Tokens(rank, RankLayout(format, UniformSequences(3, 32), world_size, r), dtype, 5, dim));
      CHECK((all == reference));
    }
  }
}

TEST_CASE("rows that belong to no segment are not written") {
  const CheckRank rank = HostRank();
  Layout layout;
  layout.segments = {{.sequence = 0, .position = 4, .length = 2, .row = 1}};
  layout.rows = 5;
  layout.row_step = 2;  // rows 1 and 3
  const Buffer buffer = rank.Poisoned(5 * 8 * sizeof(double));
  rank.kernels().Generate(InputTensor::kQ, 1, layout, 2, 4, Dtype::kFp64, buffer.get(), rank.stream());
  const auto values = rank.Download<double>(buffer);
  for (int i = 0; i < 40; ++i) CHECK(std::isnan(values[i]) == (i / 8 != 1 && i / 8 != 3));
}

TEST_CASE("input values have mean 0 and standard deviation 0.577, and are bounded and uncorrelated") {
  const CheckRank rank = HostRank();
  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(4, 256));
  const int heads = 8;
  const int dim = 64;
  const std::size_t count = 4 * 256 * heads * dim;
  const auto draw = [&](InputTensor tensor, std::uint64_t seed) {
    const Buffer buffer = rank.Poisoned(count * sizeof(double));
    rank.kernels().Generate(tensor, seed, layout, heads, dim, Dtype::kFp64, buffer.get(), rank.stream());
    return rank.Download<double>(buffer);
  };
  const auto mean_product = [&](const std::vector<double>& a, const std::vector<double>& b,
                                std::size_t shift) {
    double sum = 0;
    for (std::size_t i = 0; i + shift < count; ++i) sum += a[i] * b[i + shift];
    return sum / static_cast<double>(count - shift);
  };
  const std::vector<double> values = draw(InputTensor::kQ, 1234);
  double sum = 0;
  double fourth = 0;
  std::vector<int> tails(3);
  for (const double x : values) {
    sum += x;
    fourth += x * x * x * x;
    REQUIRE(std::abs(x) <= 510 / 256.0);
    for (int s = 1; s <= 3; ++s) tails[s - 1] += std::abs(x) > s * 0.5774;
  }
  const double n = static_cast<double>(count);
  const double variance = 4 * (65536.0 - 1) / 12 / 65536;
  // Five standard errors of each estimate.
  CHECK(std::abs(sum / n) < 5 * std::sqrt(variance / n));
  CHECK(Near(mean_product(values, values, 0), variance, 5 * std::sqrt(2 / n)));
  CHECK(Near(fourth / n / (variance * variance), 2.7, 0.02));  // Irwin-Hall of 4: 3 - 6 / (5 * 4)
  // Irwin-Hall of 4 beyond 1, 2 and 3 standard deviations: (y^4 - 4 max(0, y - 1)^4) / 12 with y = 2 - s
  // sqrt(1 / 3).
  CHECK(Near(tails[0] / n, 0.3307, 0.02));
  CHECK(Near(tails[1] / n, 0.0425, 0.05));
  CHECK(Near(tails[2] / n, 4.29e-4, 0.4));
  const double bound = 5 * variance / std::sqrt(n);
  for (const std::size_t shift : {1, 2, 4, dim, heads * dim, 256 * heads * dim}) {
    CAPTURE(shift);
    CHECK(std::abs(mean_product(values, values, shift)) < bound * 1.5);
  }
  CHECK(std::abs(mean_product(values, draw(InputTensor::kK, 1234), 0)) < bound);
  CHECK(std::abs(mean_product(values, draw(InputTensor::kQ, 1235), 0)) < bound);
  CHECK(std::abs(mean_product(values, draw(InputTensor::kQ, 1234 + (std::uint64_t{1} << 32)), 0)) < bound);
  CHECK((draw(InputTensor::kQ, 1234) == values));
}

std::vector<double> Bias(const CheckRank& rank, std::int64_t batch, int heads, std::int64_t q,
                         std::int64_t kv, Dtype dtype = Dtype::kFp64, std::uint64_t seed = 7) {
  const Buffer buffer = rank.Poisoned(batch * heads * q * kv * SizeOf(dtype));
  rank.kernels().GenerateBias(seed, batch, heads, q, kv, dtype, buffer.get(), rank.stream());
  return Doubles(dtype, rank.Download<std::uint8_t>(buffer));
}

TEST_CASE("a bias' element depends on its sequence, head, query and key alone") {
  const CheckRank rank = HostRank();
  const std::vector<double> whole = Bias(rank, 3, 4, 5, 11);
  for (const auto& [batch, heads, q, kv] :
       {std::array{1, 4, 5, 11}, std::array{3, 1, 5, 11}, std::array{3, 4, 1, 11}, std::array{2, 3, 4, 7}}) {
    const std::vector<double> part = Bias(rank, batch, heads, q, kv);
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < q; ++i) {
          for (int j = 0; j < kv; ++j)
            REQUIRE(part[((b * heads + h) * q + i) * kv + j] == whole[((b * 4 + h) * 5 + i) * 11 + j]);
        }
      }
    }
  }
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32}) {
    const std::vector<double> rounded = Bias(rank, 3, 4, 5, 11, dtype);
    for (std::size_t i = 0; i < whole.size(); ++i) REQUIRE(rounded[i] == RoundTo(dtype, whole[i]));
  }
}

TEST_CASE("a bias has the variance of other inputs and is uncorrelated along every axis") {
  const CheckRank rank = HostRank();
  const std::vector<double> values = Bias(rank, 2, 4, 64, 128);
  const double n = static_cast<double>(values.size());
  const double variance = 4 * (65536.0 - 1) / 12 / 65536;
  const auto mean_product = [&](const std::vector<double>& other, std::size_t shift) {
    double sum = 0;
    for (std::size_t i = 0; i + shift < values.size(); ++i) sum += values[i] * other[i + shift];
    return sum / n;
  };
  CHECK(Near(mean_product(values, 0), variance, 5 * std::sqrt(2 / n)));
  for (const std::size_t shift : {1, 4, 128, 64 * 128, 4 * 64 * 128}) {
    CAPTURE(shift);
    CHECK(std::abs(mean_product(values, shift)) < 7 * variance / std::sqrt(n));
  }
  CHECK(std::abs(mean_product(Bias(rank, 2, 4, 64, 128, Dtype::kFp64, 8), 0)) < 5 * variance / std::sqrt(n));
  // The bias differs from q, k, v and dout of one head, which have the same counters except for the tensor.
  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(2, 64));
  const std::vector<double> bias = Bias(rank, 2, 1, 64, 128);
  for (const InputTensor tensor : {InputTensor::kQ, InputTensor::kK, InputTensor::kV, InputTensor::kDout}) {
    const Buffer other = rank.Poisoned(bias.size() * sizeof(double));
    rank.kernels().Generate(tensor, 7, layout, 1, 128, Dtype::kFp64, other.get(), rank.stream());
    CHECK(rank.Download<double>(other) != bias);
  }
}

TEST_CASE("softmax offsets are generated as one token of dim 1") {
  const CheckRank rank = HostRank();
  const Layout one{{{0, 0, 1, 0}}, 1, 1};
  const Buffer buffer = rank.Poisoned(17 * sizeof(float));
  rank.kernels().Generate(InputTensor::kSoftmaxOffset, 3, one, 16, 1, Dtype::kFp32, buffer.get(),
                          rank.stream());
  const std::vector<float> values = rank.Download<float>(buffer);
  for (int h = 0; h < 16; ++h) {
    CHECK(std::abs(values[h]) <= 2);
    CHECK(values[h] != values[(h + 1) % 16]);
  }
  CHECK(std::isnan(values[16]));
}

}  // namespace
}  // namespace cppool::kernels::test
