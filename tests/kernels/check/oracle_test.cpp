#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "catch.h"
#include "kernels/attention/rounding.h"
#include "kernels/host/check_kernels.h"
#include "oracle_case.h"

namespace cppool::kernels::test {
namespace {

using Real = long double;
using Reals = std::vector<Real>;

// A second oracle, as naive as can be: pair by pair, in long double, from values [row, dim] of one head.
bool Sees(const OracleCase& c, std::int64_t i, std::int64_t j) {
  switch (c.mask) {
    case AttnMaskType::kNoMask: {
      const bool window = c.window_left != -1 || c.window_right > 0;
      const std::int64_t ahead =
          (j - c.seqlen_kv) - (i - c.seqlen_q);  // how far the key is after the query, from their ends
      return !window || ((c.window_left == -1 || ahead >= -c.window_left) &&
                         (c.window_right == -1 || ahead <= c.window_right));
    }
    case AttnMaskType::kCausal:
      return j <= i && (c.window_left == -1 || i - j <= c.window_left);
    case AttnMaskType::kCausalBottomRight: {
      const std::int64_t ahead = (j - c.seqlen_kv) - (i - c.seqlen_q);
      return ahead <= 0 && (c.window_left == -1 || -ahead <= c.window_left);
    }
  }
  return false;
}

struct Naive {
  const OracleCase& c;
  Real scale;
  std::vector<Reals> q, dout;  // by query head
  Reals k, v;

  // With `rounded`, through half.h rather than rounding.h.
  Real Round(Real x) const {
    if (!c.rounded) return x;
    double stored[1];
    StoreElement(c.dtype, stored, 0, static_cast<double>(x));
    return LoadElement(c.dtype, stored, 0);
  }

  Reals Probabilities(int h, std::int64_t i, Real* lse) const {
    Reals p(c.seqlen_kv, 0);
    Real largest = -std::numeric_limits<Real>::infinity();
    for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
      for (int d = 0; d < c.dim_qk; ++d) p[j] += q[h][i * c.dim_qk + d] * k[j * c.dim_qk + d];
      p[j] = Round(scale * p[j]);
      if (Sees(c, i, j)) largest = std::max(largest, p[j]);
    }
    Real sum = 0;
    for (std::int64_t j = 0; j < c.seqlen_kv; ++j) sum += p[j] = Sees(c, i, j) ? std::exp(p[j] - largest) : 0;
    for (Real& x : p) x = sum > 0 ? Round(x / sum) : 0;
    *lse = sum > 0 ? largest + std::log(sum) : -std::numeric_limits<Real>::infinity();
    return p;
  }

  Real Out(const Reals& p, int d) const {
    Real sum = 0;
    for (std::int64_t j = 0; j < c.seqlen_kv; ++j) sum += p[j] * v[j * c.dim_v + d];
    return Round(sum);
  }

  Real Loss() const {
    Real loss = 0;
    for (int h = 0; h < c.group; ++h) {
      for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
        Real lse;
        const Reals p = Probabilities(h, i, &lse);
        for (int d = 0; d < c.dim_v; ++d) loss += Out(p, d) * dout[h][i * c.dim_v + d];
      }
    }
    return loss;
  }

  OracleResult Run() const {
    OracleResult result;
    const auto size = [](auto&... vectors) { return [&](auto... sizes) { (vectors.resize(sizes), ...); }; };
    size(result.out, result.lse, result.dq)(c.seqlen_q * c.group * c.dim_v, c.seqlen_q * c.group,
                                            c.seqlen_q * c.group * c.dim_qk);
    Reals dk(c.seqlen_kv * c.dim_qk, 0);
    Reals dv(c.seqlen_kv * c.dim_v, 0);
    for (int h = 0; h < c.group; ++h) {
      for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
        const std::int64_t row = i * c.group + h;
        Real lse;
        const Reals p = Probabilities(h, i, &lse);
        result.lse[row] = static_cast<double>(lse);
        for (int d = 0; d < c.dim_v; ++d) result.out[row * c.dim_v + d] = static_cast<double>(Out(p, d));
        Reals dp(c.seqlen_kv, 0);
        Real delta = 0;
        for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
          for (int d = 0; d < c.dim_v; ++d) dp[j] += dout[h][i * c.dim_v + d] * v[j * c.dim_v + d];
          dp[j] = Round(dp[j]);
          delta += p[j] * dp[j];
        }
        Reals dq(c.dim_qk, 0);
        for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
          const Real ds = Round(p[j] * (dp[j] - delta));
          for (int d = 0; d < c.dim_qk; ++d) {
            dq[d] += scale * ds * k[j * c.dim_qk + d];
            dk[j * c.dim_qk + d] += scale * ds * q[h][i * c.dim_qk + d];
          }
          for (int d = 0; d < c.dim_v; ++d) dv[j * c.dim_v + d] += p[j] * dout[h][i * c.dim_v + d];
        }
        for (int d = 0; d < c.dim_qk; ++d) result.dq[row * c.dim_qk + d] = static_cast<double>(Round(dq[d]));
      }
    }
    for (const Real x : dk) result.dk.push_back(static_cast<double>(Round(x)));
    for (const Real x : dv) result.dv.push_back(static_cast<double>(Round(x)));
    return result;
  }
};

Naive MakeNaive(const CheckRank& rank, const OracleCase& c, const OracleInputs& inputs) {
  const auto head = [&](const Buffer& buffer, std::int64_t length, int heads, int index, int dim) {
    const std::vector<double> all = Doubles(c.dtype, rank.Download<std::uint8_t>(buffer));
    Reals values;
    for (std::int64_t i = 0; i < length; ++i) {
      const std::int64_t row = (i + 1) * c.step - 1;
      for (int d = 0; d < dim; ++d) values.push_back(all[(row * heads + index) * dim + d]);
    }
    return values;
  };
  Naive naive{c, 0.7, {}, {}, {}, {}};
  for (int h = 0; h < c.group; ++h) {
    naive.q.push_back(head(inputs.q, c.seqlen_q, kKvHeads * c.group, kKvHead * c.group + h, c.dim_qk));
    naive.dout.push_back(head(inputs.dout, c.seqlen_q, kKvHeads * c.group, kKvHead * c.group + h, c.dim_v));
  }
  naive.k = head(inputs.k, c.seqlen_kv, kKvHeads, kKvHead, c.dim_qk);
  naive.v = head(inputs.v, c.seqlen_kv, kKvHeads, kKvHead, c.dim_v);
  naive.scale = 0.7;  // the double
  return naive;
}

void CheckClose(const char* name, const std::vector<double>& a, const std::vector<double>& b,
                double tolerance) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || std::abs(a[i] - b[i]) <= tolerance * std::max(1.0, std::abs(b[i]))) continue;
    FAIL_CHECK(name << "[" << i << "]: " << a[i] << " instead of " << b[i]);
    return;
  }
}

void CheckCase(const CheckRank& rank, const OracleCase& c, double tolerance) {
  INFO(c);
  const OracleInputs inputs = MakeInputs(rank, c);
  const OracleResult got = RunOracle(rank, c, inputs);
  const OracleResult expected = MakeNaive(rank, c, inputs).Run();
  CheckClose("out", got.out, expected.out, tolerance);
  CheckClose("lse", got.lse, expected.lse, 1e-13);
  CheckClose("dq", got.dq, expected.dq, tolerance);
  CheckClose("dk", got.dk, expected.dk, tolerance);
  CheckClose("dv", got.dv, expected.dv, tolerance);
}

CheckRank HostRank() { return CheckRank(CreateHostBackend(1), &MakeHostCheckKernels); }

TEST_CASE("the oracle agrees with a naive one in long double: masks, windows, unequal lengths") {
  const CheckRank rank = HostRank();
  for (const OracleCase& c : MaskCases({.group = 2, .dim_qk = 6, .dim_v = 5, .step = 2}, 6, 11))
    CheckCase(rank, c, 1e-13);
}

TEST_CASE("the oracle agrees with a naive one in long double: dims, groups, dtypes") {
  const CheckRank rank = HostRank();
  for (const auto& [dim_qk, dim_v] :
       {std::pair{64, 64}, std::pair{192, 128}, std::pair{128, 64}, std::pair{1, 3}}) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      for (const int group : {1, 3}) {
        CheckCase(rank,
                  {.seqlen_q = 9,
                   .seqlen_kv = 13,
                   .group = group,
                   .dim_qk = dim_qk,
                   .dim_v = dim_v,
                   .mask = AttnMaskType::kCausalBottomRight,
                   .dtype = dtype},
                  1e-12);
      }
    }
  }
  CheckCase(rank, {.seqlen_q = 1, .seqlen_kv = 1, .mask = AttnMaskType::kCausal}, 1e-13);
}

TEST_CASE("plain attention rounds what a framework stores") {
  const CheckRank rank = HostRank();
  const auto [dtype, unit] =
      GENERATE(table<Dtype, double>({{Dtype::kFp16, 0x1p-11}, {Dtype::kBf16, 0x1p-8}}));
  OracleCase c{.seqlen_q = 33,
               .seqlen_kv = 40,
               .group = 2,
               .dim_qk = 16,
               .dim_v = 8,
               .mask = AttnMaskType::kCausalBottomRight,
               .dtype = dtype};
  c.rounded = true;
  // Sums in another precision may tip a rounding over; they do not here, but a platform's exp may.
  CheckCase(rank, c, unit);
  const OracleInputs inputs = MakeInputs(rank, c);
  const OracleResult rounded = RunOracle(rank, c, inputs);
  const std::vector<double> naive = MakeNaive(rank, c, inputs).Run().dq;
  std::size_t different = 0;
  for (std::size_t i = 0; i < naive.size(); ++i) different += rounded.dq[i] != naive[i];
  CHECK(different * 100 <= naive.size());

  c.rounded = false;
  const OracleResult exact = RunOracle(rank, c, inputs);
  const auto largest_error = [](const std::vector<double>& a, const std::vector<double>& b) {
    double largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
    return largest;
  };
  for (const auto member : {&OracleResult::out, &OracleResult::dq, &OracleResult::dk, &OracleResult::dv}) {
    for (const double x : rounded.*member) REQUIRE(x == RoundTo(dtype, x));
    const double error = largest_error(rounded.*member, exact.*member);
    CHECK(error > unit / 64);
    CHECK(error < unit * 16);
  }
}

TEST_CASE("the oracle's gradients are the loss's finite differences") {
  const CheckRank rank = HostRank();
  const auto [mask, left] = GENERATE(table<AttnMaskType, int>({{AttnMaskType::kNoMask, -1},
                                                               {AttnMaskType::kCausal, -1},
                                                               {AttnMaskType::kCausalBottomRight, 2},
                                                               {AttnMaskType::kNoMask, 1}}));
  const OracleCase c{
      .seqlen_q = 4, .seqlen_kv = 6, .group = 2, .dim_qk = 4, .dim_v = 3, .mask = mask, .window_left = left};
  const OracleInputs inputs = MakeInputs(rank, c);
  const OracleResult got = RunOracle(rank, c, inputs);
  Naive naive = MakeNaive(rank, c, inputs);
  const auto derivative = [&](Real& x) {
    const Real step = 1e-5L;  // error step^2 = 1e-10 of the third derivative
    const Real at = x;
    x = at + step;
    const Real above = naive.Loss();
    x = at - step;
    const Real below = naive.Loss();
    x = at;
    return static_cast<double>((above - below) / (2 * step));
  };
  for (int h = 0; h < c.group; ++h) {
    for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
      for (int d = 0; d < c.dim_qk; ++d) {
        REQUIRE(Near(got.dq[(i * c.group + h) * c.dim_qk + d], derivative(naive.q[h][i * c.dim_qk + d]), 0,
                     1e-8));
      }
    }
  }
  for (std::size_t i = 0; i < naive.k.size(); ++i) REQUIRE(Near(got.dk[i], derivative(naive.k[i]), 0, 1e-8));
  for (std::size_t i = 0; i < naive.v.size(); ++i) REQUIRE(Near(got.dv[i], derivative(naive.v[i]), 0, 1e-8));
}

TEST_CASE("a query that sees nothing has output 0, lse -inf and no gradients") {
  const CheckRank rank = HostRank();
  const OracleCase c{
      .seqlen_q = 9, .seqlen_kv = 4, .group = 2, .mask = AttnMaskType::kCausalBottomRight};  // queries 0 .. 4
  const OracleResult got = RunOracle(rank, c, MakeInputs(rank, c));
  for (int row = 0; row < 5 * 2; ++row) {
    CHECK(got.lse[row] == -std::numeric_limits<double>::infinity());
    for (int d = 0; d < 8; ++d) CHECK((got.out[row * 8 + d] == 0 && got.dq[row * 8 + d] == 0));
  }
  for (int row = 5 * 2; row < 9 * 2; ++row) CHECK(std::isfinite(got.lse[row]));
}

TEST_CASE("rounding to a dtype agrees with the conversions, subnormals and overflow included") {
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32}) {
    std::uint64_t state = 1;
    for (int i = 0; i < 200000; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const double magnitude =
          std::ldexp(1.0 + static_cast<double>(state >> 11) * 0x1p-53, static_cast<int>(state % 300) - 155);
      // Every other one a tie or nearly so.
      const double x = (state >> 5 & 1 ? -1 : 1) *
                       (i % 2 ? magnitude : RoundTo(dtype, magnitude) * (1 + (i % 4 ? 0x1p-8 : 0x1p-11)));
      double stored[1];
      StoreElement(dtype, stored, 0, x);
      const double expected = LoadElement(dtype, stored, 0);
      if (RoundTo(dtype, x) != expected)
        FAIL(static_cast<int>(dtype) << ": " << x << " -> " << RoundTo(dtype, x) << ", not " << expected);
    }
    CHECK(std::isnan(RoundTo(dtype, std::numeric_limits<double>::quiet_NaN())));
    CHECK(RoundTo(dtype, -std::numeric_limits<double>::infinity()) ==
          -std::numeric_limits<double>::infinity());
    CHECK(RoundTo(dtype, 0.0) == 0.0);
  }
}

}  // namespace
}  // namespace cppool::kernels::test
