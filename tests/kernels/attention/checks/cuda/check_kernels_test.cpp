// Compares the CUDA check kernels with the host's, which the tests of the parent folder compare with naive
// ones.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/attention/checks/oracle_workspace.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/compare_case.h"
#include "tests/kernels/attention/checks/oracle_case.h"
#include "tests/kernels/attention/checks/values_case.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {
namespace {

bool HaveDevice() { return HaveDevices(1); }

// Opened once: the first rank takes seconds.
CheckRank& Cuda() {
  static CheckRank rank(CreateCudaBackend(1), &MakeCheckKernels);
  return rank;
}
CheckRank& Host() {
  static CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  return rank;
}

TEST_CASE("generated inputs have the same bits as on the host") {
  if (!HaveDevice()) return;
  const auto generate = [](const CheckRank& rank, const Layout& layout, Dtype dtype, int heads, int dim) {
    const Buffer buffer = rank.Poisoned(static_cast<std::size_t>(layout.rows) * heads * dim * SizeOf(dtype));
    rank.kernels().Generate(InputTensor::kDout, 0x123456789abcdef0, layout, heads, dim, dtype, buffer.get(),
                            rank.stream());
    return rank.Download<std::uint8_t>(buffer);
  };
  const auto check = [&](const Layout& layout, Dtype dtype, int heads, int dim) {
    CAPTURE(layout.rows, static_cast<int>(dtype), heads, dim);
    const bool same =
        generate(Cuda(), layout, dtype, heads, dim) == generate(Host(), layout, dtype, heads, dim);
    CHECK(same);  // CHECK of the comparison itself would print megabytes
  };
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    check(GlobalLayout(QkvFormat::kBshd, UniformSequences(2, 40)), dtype, 3, 64);
    check(RankLayout(QkvFormat::kSbhd, UniformSequences(3, 64), 4, 1), dtype, 40, 128);
    check(GlobalLayout(QkvFormat::kBshd, UniformSequences(1, 7)), dtype, 1, 10);
  }
  check(GlobalLayout(QkvFormat::kBshd, UniformSequences(300, 2)), Dtype::kBf16, 1,
        8);  // more segments than fit into one launch
  check(GlobalLayout(QkvFormat::kBshd, UniformSequences(1, 40000)), Dtype::kBf16, 1, 8);
  Layout gaps;
  gaps.segments = {{.sequence = 3, .position = 4, .length = 2, .row = 1}};
  gaps.rows = 5;
  gaps.row_step = 2;
  check(gaps, Dtype::kBf16, 2, 64);  // rows that belong to no segment stay NaN on both
}

TEST_CASE("a generated bias has the same bits as on the host") {
  if (!HaveDevice()) return;
  const auto generate = [](const CheckRank& rank, std::int64_t batch, int heads, std::int64_t q,
                           std::int64_t kv, Dtype dtype) {
    const Buffer buffer = rank.Poisoned(static_cast<std::size_t>(batch * heads * q * kv) * SizeOf(dtype));
    rank.kernels().GenerateBias(0x123456789abcdef0, batch, heads, q, kv, dtype, buffer.get(), rank.stream());
    return rank.Download<std::uint8_t>(buffer);
  };
  const auto check = [&](std::int64_t batch, int heads, std::int64_t q, std::int64_t kv, Dtype dtype) {
    CAPTURE(batch, heads, q, kv, static_cast<int>(dtype));
    const bool same =
        generate(Cuda(), batch, heads, q, kv, dtype) == generate(Host(), batch, heads, q, kv, dtype);
    CHECK(same);
  };
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    check(2, 3, 40, 64, dtype);
    check(1, 1, 5, 7, dtype);
    check(1, 1, 1, 3001, dtype);
  }
  check(1, 1, 5000, 4, Dtype::kBf16);  // more rows than a launch has blocks
  check(5000, 1, 1, 12, Dtype::kBf16);
  check(1, 2, 3, 5000, Dtype::kFp16);
}

TEST_CASE("a digest is the same as on the host") {
  if (!HaveDevice()) return;
  for (const std::size_t count : {0, 1, 3, 4, 5, 1000, 1001, 3000003}) {
    const std::vector<std::uint16_t> values = SomeValues(count + 3);
    for (const std::size_t offset : {0, 1, 3}) {
      CAPTURE(count, offset);
      CHECK(DigestOf(Cuda(), values, offset) == DigestOf(Host(), values, offset));
    }
  }
}

TEST_CASE("RoundValues agrees with the host, and FillValues fills only its range") {
  if (!HaveDevice()) return;
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    std::vector<double> values;
    for (int i = 0; i < 700000; ++i) values.push_back(std::ldexp(1 + i * 0x1p-19, i % 300 - 150));
    values.push_back(7.7);
    const auto rounded = [&](const CheckRank& rank) {
      const Buffer buffer = rank.Upload(values);
      rank.kernels().RoundValues(dtype, buffer.get<double>(), 700000, rank.stream());
      return rank.Download<double>(buffer);
    };
    const bool same = rounded(Cuda()) == rounded(Host());
    CHECK(same);
  }
  const Buffer buffer = Cuda().Upload(std::vector<double>(1000, 3));
  Cuda().kernels().FillValues(buffer.get<double>(), -2.5, 999, Cuda().stream());
  std::vector<double> expected(999, -2.5);
  expected.push_back(3);
  CHECK((Cuda().Download<double>(buffer) == expected));
}

TEST_CASE("generated softmax offsets have the same bits as on the host") {
  if (!HaveDevice()) return;
  const Layout one{{{0, 0, 1, 0}}, 1, 1};
  const auto generate = [&](const CheckRank& rank) {
    const Buffer buffer = rank.Poisoned(41 * sizeof(float));
    rank.kernels().Generate(InputTensor::kSoftmaxOffset, 3, one, 40, 1, Dtype::kFp32, buffer.get(),
                            rank.stream());
    return rank.Download<std::uint32_t>(buffer);
  };
  CHECK((generate(Cuda()) == generate(Host())));
}

TEST_CASE("a comparison agrees with a naive loop") {
  if (!HaveDevice()) return;
  for (const CompareCase& c : CompareCases()) {
    for (const bool special : {false, true}) CheckCompare(Cuda(), c, special);
  }
}

TEST_CASE("a comparison of no elements has count 0 and no errors") {
  if (!HaveDevice()) return;
  const CompareStats stats = Cuda().Compare({});
  CHECK(stats.count == 0);
  CHECK(stats.mismatches == 0);
  CHECK(stats.max_abs_err == 0);
}

// Exact results differ by the order of sums and by the implementations of exp. Rounded results may rarely
// differ by one rounding.
void CheckAgrees(const char* name, const OracleCase& c, const std::vector<double>& got,
                 const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  double largest = 0;
  for (const double x : expected) largest = std::max(largest, std::isfinite(x) ? std::abs(x) : 0.0);
  const double unit = c.dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
  const double exact = 1e-13 * largest + 1e-15;  // for a different order of sums
  const double tolerance = c.rounded ? unit * largest : exact;
  std::size_t different = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    if (!(std::abs(got[i] - expected[i]) <= exact)) ++different;
    if (!(std::abs(got[i] - expected[i]) <= tolerance)) {
      FAIL_CHECK(name << "[" << i << "]: " << got[i] << " instead of " << expected[i] << " (" << c << ")");
      return;
    }
  }
  if (c.rounded && std::string(name) != "lse") CHECK(different * 200 <= got.size());
}

void CheckCase(OracleCase c) {
  INFO(c);
  const OracleInputs device = MakeInputs(Cuda(), c);
  const OracleInputs host = MakeInputs(Host(), c);
  for (const bool rounded : {false, true}) {
    c.rounded = rounded;
    const OracleResult got = RunOracle(Cuda(), c, device);
    const OracleResult expected = RunOracle(Host(), c, host);
    CheckAgrees("out", c, got.out, expected.out);
    CheckAgrees("lse", c, got.lse, expected.lse);
    CheckAgrees("dq", c, got.dq, expected.dq);
    CheckAgrees("dk", c, got.dk, expected.dk);
    CheckAgrees("dv", c, got.dv, expected.dv);
    CheckAgrees("dbias", c, got.dbias, expected.dbias);
    CheckAgrees("d_offset", c, got.d_offset, expected.d_offset);
    CheckAgrees("max_logit", c, got.max_logit, expected.max_logit);
    const OracleResult again = RunOracle(Cuda(), c, device);
    CHECK((again.out == got.out && again.lse == got.lse && again.dq == got.dq && again.dk == got.dk &&
           again.dv == got.dv && again.dbias == got.dbias && again.d_offset == got.d_offset &&
           again.max_logit == got.max_logit));
  }
}

TEST_CASE("the oracle agrees with the host's oracle: masks, windows, unequal lengths") {
  if (!HaveDevice()) return;
  // First lengths of several tiles of 64 that are not multiples of 64, then windows larger than a tile.
  for (const OracleCase& c : MaskCases({.group = 2, .dim_qk = 16, .dim_v = 8, .step = 2}, 70, 201))
    CheckCase(c);
  for (OracleCase c : MaskCases({.group = 1, .dim_qk = 8, .dim_v = 16, .dtype = Dtype::kFp16}, 128, 320)) {
    if (c.window_left > 0) c.window_left = 80;
    if (c.window_right > 0) c.window_right = 100;
    CheckCase(c);
  }
}

TEST_CASE("the oracle agrees with the host's oracle: bias, ALiBi, softmax offset, max_logit") {
  if (!HaveDevice()) return;
  for (const OracleCase& c : FeatureCases({.group = 3, .dim_qk = 16, .dim_v = 8, .step = 2}, 70, 201))
    CheckCase(c);
  for (const OracleCase& c :
       FeatureCases({.group = 2, .dim_qk = 8, .dim_v = 16, .dtype = Dtype::kFp16}, 64, 132))
    CheckCase(c);
}

TEST_CASE("repeated calls add to dbias and d_softmax_offset, and raise max_logit") {
  if (!HaveDevice()) return;
  OracleCase c{.seqlen_q = 70, .seqlen_kv = 90, .group = 2, .bias = true, .offset = true};
  c.bias_queries = GENERATE(false, true);
  c.bias_heads = GENERATE(false, true);
  const OracleResult got = RunOracle(Cuda(), c, MakeInputs(Cuda(), c), 3);
  const OracleResult expected = RunOracle(Host(), c, MakeInputs(Host(), c), 3);
  CheckAgrees("dbias", c, got.dbias, expected.dbias);
  CheckAgrees("d_offset", c, got.d_offset, expected.d_offset);

  for (const std::vector<double>& before : {std::vector<double>{1e3, -1e3}, std::vector<double>{-1e3, 1e3}}) {
    const Buffer raised = Cuda().Upload(before);
    const OracleInputs inputs = MakeInputs(Cuda(), c);
    OracleArgs args = MakeArgs(c, inputs);
    args.max_logit = raised.get<double>();
    Cuda().kernels().Oracle(args, Cuda().stream());
    const std::vector<double> after = Cuda().Download<double>(raised);
    for (int h = 0; h < 2; ++h) CHECK(Near(after[h], std::max(before[h], expected.max_logit[h]), 1e-13));
  }
}

// The bits of negative floats, read as integers, have the reverse order.
TEST_CASE("max_logit is right if all logits are negative") {
  if (!HaveDevice()) return;
  const OracleCase c{.seqlen_q = 70,
                     .seqlen_kv = 20,
                     .group = 2,
                     .mask = AttnMaskType::kCausal,
                     .bias = true,
                     .bias_heads = false};
  OracleInputs inputs = MakeInputs(Cuda(), c), host = MakeInputs(Host(), c);
  std::vector<double> low(BiasRows(c) * BiasPitch(c));
  for (std::size_t i = 0; i < low.size(); ++i) low[i] = -100.0 - static_cast<double>(i % 7);
  inputs.bias = Cuda().Upload(Bytes(c.dtype, low));
  host.bias = Host().Upload(Bytes(c.dtype, low));
  const OracleResult got = RunOracle(Cuda(), c, inputs), expected = RunOracle(Host(), c, host);
  for (int h = 0; h < 2; ++h) {
    CHECK(got.max_logit[h] < -80);
    CHECK(Near(got.max_logit[h], expected.max_logit[h], 1e-13));
  }
}

TEST_CASE("a bias of -inf masks its keys") {
  if (!HaveDevice()) return;
  OracleCase c{
      .seqlen_q = 70, .seqlen_kv = 70, .group = 2, .bias = true, .bias_heads = false, .offset = true};
  OracleInputs inputs = MakeInputs(Cuda(), c);
  std::vector<double> bias(BiasRows(c) * BiasPitch(c), 0);
  for (int i = 0; i < 70; ++i) {
    for (int j = i == 69 ? 0 : i + 1; j < 70; ++j)
      bias[BiasAt(c, 0, i, j)] = -std::numeric_limits<double>::infinity();
  }
  inputs.bias = Cuda().Upload(Bytes(c.dtype, bias));
  OracleInputs host = MakeInputs(Host(), c);
  host.bias = Host().Upload(Bytes(c.dtype, bias));
  const OracleResult got = RunOracle(Cuda(), c, inputs), expected = RunOracle(Host(), c, host);
  CheckAgrees("out", c, got.out, expected.out);
  CheckAgrees("lse", c, got.lse, expected.lse);
  CheckAgrees("dq", c, got.dq, expected.dq);
  CheckAgrees("dk", c, got.dk, expected.dk);
  CheckAgrees("dbias", c, got.dbias, expected.dbias);
  CheckAgrees("d_offset", c, got.d_offset, expected.d_offset);
}

TEST_CASE("the oracle agrees with the host's oracle: dims, groups, dtypes") {
  if (!HaveDevice()) return;
  for (const auto& [dim_qk, dim_v] : {std::pair{64, 64}, std::pair{128, 128}, std::pair{192, 128},
                                      std::pair{128, 64}, std::pair{256, 256}, std::pair{5, 3}}) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      for (const int group : {1, 3, 8}) {
        CheckCase({.seqlen_q = 65,
                   .seqlen_kv = 97,
                   .group = group,
                   .dim_qk = dim_qk,
                   .dim_v = dim_v,
                   .mask = group == 3 ? AttnMaskType::kNoMask : AttnMaskType::kCausal,
                   .dtype = dtype});
      }
    }
  }
  // Few tiles and long sums, which are divided into parts.
  for (const int group : {1, 2}) {
    CheckCase({.seqlen_q = 700,
               .seqlen_kv = 1100,
               .group = group,
               .dim_qk = 32,
               .dim_v = 64,
               .mask = AttnMaskType::kCausal});
  }
  CheckCase({.seqlen_q = 1, .seqlen_kv = 1});
  CheckCase({.seqlen_q = 1, .seqlen_kv = 300, .mask = AttnMaskType::kCausalBottomRight});
}

void CheckParts(const OracleCase& c) {
  INFO(c);
  const OracleInputs inputs = MakeInputs(Cuda(), c);
  CHECK(OracleWorkspace(ShapeOf(MakeArgs(c, inputs))) < std::size_t{1600} << 20);
  const OracleResult got = RunOracle(Cuda(), c, inputs);
  std::vector<double> dk(got.dk.size());
  std::vector<double> dv(got.dv.size());
  const Buffer dbias = Cuda().Upload(std::vector<double>(got.dbias.size(), kSumStart));
  const Buffer d_offset = Cuda().Upload(std::vector<double>(got.d_offset.size(), kSumStart));
  for (int h = 0; h < c.group; ++h) {
    const Buffer out = Cuda().Poisoned(static_cast<std::size_t>(c.seqlen_q) * c.dim_v * 8);
    const Buffer dq = Cuda().Poisoned(static_cast<std::size_t>(c.seqlen_q) * c.dim_qk * 8);
    const Buffer dk_part = Cuda().Poisoned(got.dk.size() * 8);
    const Buffer dv_part = Cuda().Poisoned(got.dv.size() * 8);
    OracleArgs args = MakeArgs(c, inputs);
    args.head_begin += h;
    args.group = 1;
    args.out = out.get<double>();
    args.dq = dq.get<double>();
    args.dk = dk_part.get<double>();
    args.dv = dv_part.get<double>();
    if (c.bias) {
      REQUIRE_FALSE(c.bias_heads);
      args.dbias = dbias.get<double>();
      args.dbias_query_step = BiasQueryStep(c);
    }
    if (c.alibi) args.alibi_slopes += h;
    if (c.offset) {
      args.softmax_offset += h;
      args.d_softmax_offset = d_offset.get<double>() + h;
    }
    Cuda().kernels().Oracle(args, Cuda().stream());
    const auto add = [](std::vector<double>& to, const std::vector<double>& from) {
      for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
    };
    add(dk, Cuda().Download<double>(dk_part));
    add(dv, Cuda().Download<double>(dv_part));
    const auto check_rows = [&](const std::vector<double>& whole, const std::vector<double>& part,
                                std::int64_t dim) {
      for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
        for (std::int64_t d = 0; d < dim; ++d) {
          const double x = whole[(i * c.group + h) * dim + d];
          if (!Near(part[i * dim + d], x, 1e-10, 1e-13))
            FAIL("row " << i << ": " << part[i * dim + d] << " and " << x);
        }
      }
    };
    check_rows(got.out, Cuda().Download<double>(out), c.dim_v);
    check_rows(got.dq, Cuda().Download<double>(dq), c.dim_qk);
  }
  const auto check_sum = [](const std::vector<double>& whole, const std::vector<double>& sum) {
    for (std::size_t i = 0; i < whole.size(); ++i) {
      if (!Near(sum[i], whole[i], 1e-10, 1e-13))
        FAIL("element " << i << ": " << sum[i] << " and " << whole[i]);
    }
  };
  check_sum(got.dk, dk);
  check_sum(got.dv, dv);
  check_sum(got.dbias, Cuda().Download<double>(dbias));
  check_sum(got.d_offset, Cuda().Download<double>(d_offset));
}

// Compares with one call for each head, whose dk and dv add up to those of the group.
TEST_CASE("a group that does not fit into the workspace is processed in several chunks") {
  if (!HaveDevice()) return;
  const OracleCase c = GENERATE(
      // Three cases: chunks of rows with all heads; chunks of rows with single heads; dk and dv too large for
      // partial sums of each head.
      OracleCase{.seqlen_q = 2000,
                 .seqlen_kv = 8192,
                 .group = 6,
                 .dim_qk = 32,
                 .dim_v = 32,
                 .mask = AttnMaskType::kCausal,
                 .bias = true,
                 .bias_heads = false,
                 .offset = true},
      OracleCase{.seqlen_q = 2000,
                 .seqlen_kv = 40000,
                 .group = 3,
                 .dim_qk = 32,
                 .dim_v = 32,
                 .mask = AttnMaskType::kCausalBottomRight,
                 .bias = true,
                 .bias_heads = false,
                 .bias_queries = false,
                 .offset = true},
      OracleCase{.seqlen_q = 128,
                 .seqlen_kv = 100000,
                 .group = 2,
                 .dim_qk = 128,
                 .dim_v = 128,
                 .mask = AttnMaskType::kCausalBottomRight,
                 .dtype = Dtype::kFp16,
                 .alibi = true,
                 .offset = true});
  CheckParts(c);
}

TEST_CASE("the oracle handles a forward pass alone and lengths of 0") {
  if (!HaveDevice()) return;
  OracleCase c{.seqlen_q = 80, .seqlen_kv = 90, .group = 2, .bias = true, .offset = true};
  OracleInputs inputs = MakeInputs(Cuda(), c);
  const OracleResult whole = RunOracle(Cuda(), c, inputs);
  const Buffer lse = Cuda().Poisoned(whole.lse.size() * 8);
  OracleArgs args = MakeArgs(c, inputs);
  args.dout = {};
  args.lse = lse.get<double>();
  Cuda().kernels().Oracle(args, Cuda().stream());
  CHECK((Cuda().Download<double>(lse) == whole.lse));

  c.seqlen_q = 0;
  const OracleResult no_queries = RunOracle(Cuda(), c, MakeInputs(Cuda(), c));
  for (const double x : no_queries.dk) REQUIRE(x == 0);
  for (const double x : no_queries.d_offset) REQUIRE(x == kSumStart);
  c.seqlen_q = 80;
  c.seqlen_kv = 0;
  const OracleResult no_keys = RunOracle(Cuda(), c, MakeInputs(Cuda(), c));
  for (const double x : no_keys.out) REQUIRE(x == 0);
  for (const double x : no_keys.dq) REQUIRE(x == 0);
  for (const double x : no_keys.lse) REQUIRE(x == -std::numeric_limits<double>::infinity());
  for (const OracleResult* result : {&no_queries, &no_keys}) {
    for (const double x : result->dbias) REQUIRE(x == kSumStart);
    for (const double x : result->d_offset) REQUIRE(x == kSumStart);
    for (const double x : result->max_logit) REQUIRE(x == -std::numeric_limits<double>::infinity());
  }
}

}  // namespace
}  // namespace cppool::kernels::test
