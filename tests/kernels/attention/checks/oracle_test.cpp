#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/numerics/rounding.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/oracle_case.h"
#include "tests/kernels/load_element.h"

namespace cppool::kernels::test {
namespace {

using Real = long double;
using Reals = std::vector<Real>;

// A naive second oracle: computes pair by pair, in long double, from values [row, dim] of one head.
bool Sees(const OracleCase& c, std::int64_t i, std::int64_t j) {
  switch (c.mask) {
    case AttnMaskType::kNoMask:
    case AttnMaskType::kPadding: {
      const bool window = c.window_left != -1 || c.window_right > 0;
      const std::int64_t ahead =
          (j - c.seqlen_kv) - (i - c.seqlen_q);  // distance from query to key, both counted from the ends
      return !window || ((c.window_left == -1 || ahead >= -c.window_left) &&
                         (c.window_right == -1 || ahead <= c.window_right));
    }
    case AttnMaskType::kCausal:
    case AttnMaskType::kPaddingCausal:
      return j <= i && (c.window_left == -1 || i - j <= c.window_left);
    case AttnMaskType::kCausalBottomRight:
    case AttnMaskType::kPaddingCausalBottomRight: {
      const std::int64_t ahead = (j - c.seqlen_kv) - (i - c.seqlen_q);
      return ahead <= 0 && (c.window_left == -1 || -ahead <= c.window_left);
    }
  }
  return false;
}

// ALiBi's distance: from the last key that a causal mask with this alignment leaves visible.
Real Distance(const OracleCase& c, std::int64_t i, std::int64_t j) {
  const bool top_left = c.mask == AttnMaskType::kCausal || c.mask == AttnMaskType::kPaddingCausal;
  const std::int64_t ahead = top_left ? j - i : (j - c.seqlen_kv) - (i - c.seqlen_q);
  return static_cast<Real>(std::abs(ahead));
}

struct Naive {
  const OracleCase& c;
  Real scale;
  std::vector<Reals> q, dout;  // by query head
  Reals k, v;
  Reals bias, slopes, offset;  // of the group; empty: none

  // With `rounded`, rounds with half.h, which is independent of the oracle's rounding.h.
  Real Round(Real x) const {
    if (!c.rounded) return x;
    double stored[1];
    StoreElement(c.dtype, stored, 0, static_cast<double>(x));
    return LoadElement(c.dtype, stored, 0);
  }

  // An offset is appended as one more key.
  Reals Probabilities(int h, std::int64_t i, Real* lse, Real* max_logit) const {
    constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
    Reals p(c.seqlen_kv, 0);
    Real largest = -kInfinity;
    for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
      for (int d = 0; d < c.dim_qk; ++d) p[j] += q[h][i * c.dim_qk + d] * k[j * c.dim_qk + d];
      p[j] = Round(scale * p[j]);
      if (!bias.empty()) p[j] = Round(p[j] + bias[BiasAt(c, h, i, j)]);
      if (!slopes.empty()) p[j] = Round(p[j] - slopes[h] * Distance(c, i, j));
      if (!Sees(c, i, j)) p[j] = -kInfinity;
      largest = std::max(largest, p[j]);
    }
    *max_logit = std::max(*max_logit, largest);
    Real keys = 0;
    for (std::int64_t j = 0; j < c.seqlen_kv; ++j) keys += std::exp(p[j]);
    *lse = std::log(keys);
    Real all = keys;
    if (!offset.empty()) {
      p.push_back(offset[h]);
      all += std::exp(offset[h]);
    }
    for (Real& x : p) x = all > 0 ? Round(std::exp(x) / all) : 0;
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
        Real lse, max_logit = 0;
        const Reals p = Probabilities(h, i, &lse, &max_logit);
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
    Reals dbias(c.bias ? (c.bias_heads ? c.group : 1) * BiasRows(c) * BiasPitch(c) : 0, kSumStart);
    for (int h = 0; h < c.group; ++h) {
      Real d_offset = kSumStart;
      Real max_logit = -std::numeric_limits<Real>::infinity();
      for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
        const std::int64_t row = i * c.group + h;
        Real lse;
        const Reals p = Probabilities(h, i, &lse, &max_logit);
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
          if (c.bias) dbias[BiasAt(c, h, i, j)] += ds;
          for (int d = 0; d < c.dim_qk; ++d) {
            dq[d] += scale * ds * k[j * c.dim_qk + d];
            dk[j * c.dim_qk + d] += scale * ds * q[h][i * c.dim_qk + d];
          }
          for (int d = 0; d < c.dim_v; ++d) dv[j * c.dim_v + d] += p[j] * dout[h][i * c.dim_v + d];
        }
        for (int d = 0; d < c.dim_qk; ++d) result.dq[row * c.dim_qk + d] = static_cast<double>(Round(dq[d]));
        if (c.offset) d_offset += Round(p[c.seqlen_kv] * -delta);
      }
      if (c.offset) result.d_offset.push_back(static_cast<double>(d_offset));
      result.max_logit.push_back(static_cast<double>(max_logit));
    }
    for (const Real x : dbias) result.dbias.push_back(static_cast<double>(x));
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
  Naive naive{c, 0.7, {}, {}, {}, {}, {}, {}, {}};
  for (int h = 0; h < c.group; ++h) {
    naive.q.push_back(head(inputs.q, c.seqlen_q, kKvHeads * c.group, kKvHead * c.group + h, c.dim_qk));
    naive.dout.push_back(head(inputs.dout, c.seqlen_q, kKvHeads * c.group, kKvHead * c.group + h, c.dim_v));
  }
  naive.k = head(inputs.k, c.seqlen_kv, kKvHeads, kKvHead, c.dim_qk);
  naive.v = head(inputs.v, c.seqlen_kv, kKvHeads, kKvHead, c.dim_v);
  naive.scale = 0.7;  // the same double as the oracle's
  const auto of_group = [&](const Buffer& buffer, Dtype dtype, std::int64_t begin, std::int64_t count) {
    const std::vector<double> all = Doubles(dtype, rank.Download<std::uint8_t>(buffer));
    return Reals(all.begin() + begin, all.begin() + begin + count);
  };
  const int first = kKvHead * c.group;
  if (c.bias) {
    naive.bias = of_group(inputs.bias, c.dtype, BiasAt(c, first, 0, 0),
                          (c.bias_heads ? c.group : 1) * BiasRows(c) * BiasPitch(c));
  }
  if (c.alibi) naive.slopes = of_group(inputs.slopes, Dtype::kFp32, first, c.group);
  if (c.offset) naive.offset = of_group(inputs.offset, Dtype::kFp32, first, c.group);
  return naive;
}

void CheckClose(const char* name, const std::vector<double>& a, const std::vector<double>& b,
                double tolerance) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    if (std::isfinite(b[i]) && std::abs(a[i] - b[i]) <= tolerance * std::max(1.0, std::abs(b[i]))) continue;
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
  CheckClose("dbias", got.dbias, expected.dbias, tolerance);
  CheckClose("d_offset", got.d_offset, expected.d_offset, tolerance);
  CheckClose("max_logit", got.max_logit, expected.max_logit, 1e-13);
}

CheckRank HostRank() { return CheckRank(CreateHostBackend(1), &MakeHostCheckKernels); }

TEST_CASE("the oracle agrees with a naive one in long double: masks, windows, unequal lengths") {
  const CheckRank rank = HostRank();
  for (const OracleCase& c : MaskCases({.group = 2, .dim_qk = 6, .dim_v = 5, .step = 2}, 6, 11))
    CheckCase(rank, c, 1e-13);
}

TEST_CASE("the oracle agrees with a naive one in long double: bias, ALiBi, softmax offset, max_logit") {
  const CheckRank rank = HostRank();
  for (const OracleCase& c : FeatureCases({.group = 3, .dim_qk = 6, .dim_v = 5, .step = 2}, 6, 11))
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

TEST_CASE("plain attention rounds every tensor that a framework stores") {
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
  c.bias = c.offset = GENERATE(false, true);
  c.alibi = GENERATE(false, true);
  if (c.bias && c.alibi) return;  // not supported together
  c.rounded = true;
  // A sum in another precision, or another implementation of exp, may change a rounding.
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

TEST_CASE("plain attention rounds each query's term of d_softmax_offset") {
  const CheckRank rank = HostRank();
  const OracleCase c{
      .seqlen_q = 1, .seqlen_kv = 20, .group = 64, .dtype = Dtype::kFp16, .rounded = true, .offset = true};
  const OracleInputs inputs = MakeInputs(rank, c);
  const std::vector<double> got = RunOracle(rank, c, inputs).d_offset;
  const std::vector<double> expected = MakeNaive(rank, c, inputs).Run().d_offset;
  int different = 0;
  for (int h = 0; h < c.group; ++h) different += got[h] != expected[h];
  CHECK(different <= 1);  // one value may be rounded differently
}

TEST_CASE("the oracle's gradients agree with finite differences of the loss") {
  const CheckRank rank = HostRank();
  const auto [mask, left] = GENERATE(table<AttnMaskType, int>({{AttnMaskType::kNoMask, -1},
                                                               {AttnMaskType::kCausal, -1},
                                                               {AttnMaskType::kCausalBottomRight, 2},
                                                               {AttnMaskType::kNoMask, 1}}));
  const OracleCase c{.seqlen_q = 4,
                     .seqlen_kv = 6,
                     .group = 2,
                     .dim_qk = 4,
                     .dim_v = 3,
                     .mask = mask,
                     .window_left = left,
                     .bias = true,
                     .bias_heads = left < 0,
                     .bias_queries = mask != AttnMaskType::kCausal,
                     .offset = true};
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
  REQUIRE(got.dbias.size() == naive.bias.size());
  for (std::size_t i = 0; i < naive.bias.size(); ++i)
    REQUIRE(Near(got.dbias[i] - kSumStart, derivative(naive.bias[i]), 0, 1e-8));
  for (std::size_t i = 0; i < naive.offset.size(); ++i)
    REQUIRE(Near(got.d_offset[i] - kSumStart, derivative(naive.offset[i]), 0, 1e-8));
}

TEST_CASE("without queries or without keys, results are 0 and nothing is added to sums") {
  const CheckRank rank = HostRank();
  const auto [q, kv] = GENERATE(table<int, int>({{0, 7}, {5, 0}, {0, 0}}));
  const OracleCase c{.seqlen_q = q,
                     .seqlen_kv = kv,
                     .group = 2,
                     .mask = GENERATE(AttnMaskType::kPadding, AttnMaskType::kPaddingCausal),
                     .bias = true,
                     .bias_queries = GENERATE(false, true),
                     .offset = true};
  const OracleResult got = RunOracle(rank, c, MakeInputs(rank, c));
  for (const auto member : {&OracleResult::out, &OracleResult::dq, &OracleResult::dk, &OracleResult::dv}) {
    for (const double x : got.*member) REQUIRE(x == 0);
  }
  for (const double x : got.lse) REQUIRE(x == -std::numeric_limits<double>::infinity());
  for (const double x : got.max_logit) REQUIRE(x == -std::numeric_limits<double>::infinity());
  for (const auto member : {&OracleResult::dbias, &OracleResult::d_offset}) {
    for (const double x : got.*member) REQUIRE(x == kSumStart);
  }
}

TEST_CASE("without queries the bounds of fp8's gradients are what casts and roundings of 0 add") {
  const CheckRank rank = HostRank();
  const Buffer k = rank.Upload(std::vector<std::uint8_t>(3 * 8, 0x38));
  const Buffer scale = rank.Upload(std::vector<float>{1});
  const auto results = [&] { return rank.Upload(std::vector<double>(3 * 8, 0.5)); };
  const Buffer dk = results(), dv = results(), dk_bound = results(), dv_bound = results();
  OracleArgs args;
  args.k = args.v = {k.get(), Dtype::kE4M3, scale.get<float>()};
  args.q = {nullptr, Dtype::kE4M3};
  args.seqlen_q = 0, args.seqlen_kv = 3;
  args.q_step = args.kv_step = 1;
  args.heads = args.kv_heads = args.group = 1;
  args.dim_qk = args.dim_v = 8;
  args.scale = 1;
  args.mask = AttnMaskType::kNoMask;
  args.stored = Dtype::kBf16;
  args.dk = dk.get<double>(), args.dv = dv.get<double>();
  OracleFp8& fp8 = args.fp8.emplace();
  fp8.gradient_scale = 20;
  fp8.dk_bound = dk_bound.get<double>(), fp8.dv_bound = dv_bound.get<double>();
  rank.kernels().Oracle(args, rank.stream());
  for (const Buffer* const bound : {&dk_bound, &dv_bound}) {
    for (const double x : rank.Download<double>(*bound)) CHECK((x > 0 && x < 1e-5));  // E5M2's smallest / 20
  }
}

TEST_CASE("repeated calls add to dbias and d_softmax_offset, and raise max_logit") {
  const CheckRank rank = HostRank();
  const OracleCase c{.seqlen_q = 6, .seqlen_kv = 8, .group = 2, .bias = true, .offset = true};
  const OracleInputs inputs = MakeInputs(rank, c);
  const OracleResult once = RunOracle(rank, c, inputs), twice = RunOracle(rank, c, inputs, 2);
  for (const auto member : {&OracleResult::dbias, &OracleResult::d_offset}) {
    for (std::size_t i = 0; i < (once.*member).size(); ++i) {
      const double part = (once.*member)[i] - kSumStart;
      REQUIRE(Near((twice.*member)[i], kSumStart + 2 * part, 0, 1e-14));
    }
  }
  CHECK((twice.out == once.out && twice.dk == once.dk && twice.max_logit == once.max_logit));

  const Buffer raised = rank.Upload<double>({1e3, -1e3});
  OracleArgs args = MakeArgs(c, inputs);
  args.max_logit = raised.get<double>();
  rank.kernels().Oracle(args, rank.stream());
  CHECK((rank.Download<double>(raised) == std::vector<double>{1e3, once.max_logit[1]}));
}

TEST_CASE("a bias of -inf masks its keys") {
  const CheckRank rank = HostRank();
  // Masks the keys that a causal mask would mask, and all keys of the last query.
  OracleCase c{.seqlen_q = 5, .seqlen_kv = 5, .bias = true, .bias_heads = false, .offset = true};
  OracleInputs inputs = MakeInputs(rank, c);
  std::vector<double> bias(BiasRows(c) * BiasPitch(c), 0);
  for (int i = 0; i < 5; ++i) {
    for (int j = i == 4 ? 0 : i + 1; j < 5; ++j)
      bias[BiasAt(c, 0, i, j)] = -std::numeric_limits<double>::infinity();
  }
  inputs.bias = rank.Upload(Bytes(c.dtype, bias));
  const OracleResult got = RunOracle(rank, c, inputs);
  c.bias = false;
  c.mask = AttnMaskType::kCausal;
  const OracleResult expected = RunOracle(rank, c, inputs);
  const auto same_rows = [](const std::vector<double>& a, const std::vector<double>& b, int dim, int rows) {
    return std::equal(a.begin(), a.begin() + rows * dim, b.begin());
  };
  CHECK(same_rows(got.out, expected.out, c.dim_v, 4));
  CHECK(same_rows(got.lse, expected.lse, 1, 4));
  CHECK(same_rows(got.dq, expected.dq, c.dim_qk, 4));
  CHECK(got.lse[4] == -std::numeric_limits<double>::infinity());
  for (int d = 0; d < 8; ++d) CHECK((got.out[4 * 8 + d] == 0 && got.dq[4 * 8 + d] == 0));
  for (const double x : got.dk) CHECK(std::isfinite(x));
}

TEST_CASE("RoundTo agrees with the conversions of half.h, including subnormals and overflow") {
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32}) {
    std::uint64_t state = 1;
    for (int i = 0; i < 200000; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const double magnitude =
          std::ldexp(1.0 + static_cast<double>(state >> 11) * 0x1p-53, static_cast<int>(state % 300) - 155);
      // Every second value is a tie or close to one.
      const double x = (state >> 5 & 1 ? -1 : 1) *
                       (i % 2 ? magnitude : RoundTo(dtype, magnitude) * (1 + (i % 4 ? 0x1p-8 : 0x1p-11)));
      double stored[1];
      StoreElement(dtype, stored, 0, x);
      const double expected = LoadElement(dtype, stored, 0);
      if (RoundTo(dtype, x) != expected || std::signbit(RoundTo(dtype, x)) != std::signbit(expected))
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
