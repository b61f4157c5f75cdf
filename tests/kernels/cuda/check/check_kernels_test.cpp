// The CUDA kernels against the host's, which tests/kernels/check holds against naive ones.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "catch.h"
#include "cuda_world.h"
#include "kernels/check/compare_case.h"
#include "kernels/check/oracle_case.h"
#include "kernels/host/check_kernels.h"

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

TEST_CASE("inputs have the host's bits") {
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
    CHECK(same);  // rather than the comparison, which would print megabytes
  };
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    check(GlobalLayout(QkvFormat::kBshd, 2, 40), dtype, 3, 64);
    check(RankLayout(QkvFormat::kSbhd, 3, 64, 4, 1), dtype, 40, 128);
    check(GlobalLayout(QkvFormat::kBshd, 1, 7), dtype, 1, 10);
  }
  check(GlobalLayout(QkvFormat::kBshd, 300, 2), Dtype::kBf16, 1, 8);  // more segments than one launch takes
  check(GlobalLayout(QkvFormat::kBshd, 1, 40000), Dtype::kBf16, 1, 8);
  Layout gaps;
  gaps.segments = {{.sequence = 3, .position = 4, .length = 2, .row = 1}};
  gaps.rows = 5;
  gaps.row_step = 2;
  check(gaps, Dtype::kBf16, 2, 64);  // rows of no segment stay poisoned on both
}

TEST_CASE("a comparison finds what a naive one finds") {
  if (!HaveDevice()) return;
  for (const CompareCase& c : CompareCases()) {
    for (const bool special : {false, true}) CheckCompare(Cuda(), c, special);
  }
}

TEST_CASE("a comparison of nothing counts nothing") {
  if (!HaveDevice()) return;
  const CompareStats stats = Cuda().Compare({});
  CHECK(stats.count == 0);
  CHECK(stats.mismatches == 0);
  CHECK(stats.max_abs_err == 0);
}

// Exact results differ by the order of sums and the two exps. Where results are rounded, a last place may tip over, rarely.
void CheckAgrees(const char* name, const OracleCase& c, const std::vector<double>& got,
                 const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  double largest = 0;
  for (const double x : expected) largest = std::max(largest, std::isfinite(x) ? std::abs(x) : 0.0);
  const double unit = c.dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
  const double tolerance = (c.rounded ? unit : 1e-13) * largest + 1e-15;
  std::size_t different = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    ++different;
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
    const OracleResult again = RunOracle(Cuda(), c, device);
    CHECK((again.out == got.out && again.lse == got.lse && again.dq == got.dq && again.dk == got.dk &&
           again.dv == got.dv));
  }
}

TEST_CASE("the oracle agrees with the host's: masks, windows, unequal lengths") {
  if (!HaveDevice()) return;
  // Lengths of several tiles of 64, not multiples of it; then windows of more than a tile.
  for (const OracleCase& c : MaskCases({.group = 2, .dim_qk = 16, .dim_v = 8, .step = 2}, 70, 201))
    CheckCase(c);
  for (OracleCase c : MaskCases({.group = 1, .dim_qk = 8, .dim_v = 16, .dtype = Dtype::kFp16}, 128, 320)) {
    if (c.window_left > 0) c.window_left = 80;
    if (c.window_right > 0) c.window_right = 100;
    CheckCase(c);
  }
}

TEST_CASE("the oracle agrees with the host's: dims, groups, dtypes") {
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
  // Few tiles and long sums, which are added up in parts.
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
  CHECK(Cuda().kernels().OracleWorkspace(MakeArgs(c, inputs)) < std::size_t{1600} << 20);
  const OracleResult got = RunOracle(Cuda(), c, inputs);
  std::vector<double> dk(got.dk.size());
  std::vector<double> dv(got.dv.size());
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
}

// Checked through what each head gives when asked for alone: the group's dk and dv are the sums of theirs.
TEST_CASE("a group that does not fit the workspace at once is worked on in parts") {
  if (!HaveDevice()) return;
  const OracleCase c = GENERATE(
      // Chunks of rows, of all heads at a time; of rows and of single heads; heads whose dk and dv are too large to be kept apart.
      OracleCase{.seqlen_q = 2000,
                 .seqlen_kv = 8192,
                 .group = 6,
                 .dim_qk = 32,
                 .dim_v = 32,
                 .mask = AttnMaskType::kCausal},
      OracleCase{.seqlen_q = 2000,
                 .seqlen_kv = 40000,
                 .group = 3,
                 .dim_qk = 32,
                 .dim_v = 32,
                 .mask = AttnMaskType::kCausalBottomRight},
      OracleCase{.seqlen_q = 128,
                 .seqlen_kv = 100000,
                 .group = 2,
                 .dim_qk = 128,
                 .dim_v = 128,
                 .mask = AttnMaskType::kCausalBottomRight,
                 .dtype = Dtype::kFp16});
  CheckParts(c);
}

TEST_CASE("the forward pass alone, and lengths of 0") {
  if (!HaveDevice()) return;
  OracleCase c{.seqlen_q = 80, .seqlen_kv = 90, .group = 2};
  OracleInputs inputs = MakeInputs(Cuda(), c);
  const OracleResult whole = RunOracle(Cuda(), c, inputs);
  const Buffer lse = Cuda().Poisoned(whole.lse.size() * 8);
  OracleArgs args = MakeArgs(c, inputs);
  args.dout = nullptr;
  args.lse = lse.get<double>();
  Cuda().kernels().Oracle(args, Cuda().stream());
  CHECK((Cuda().Download<double>(lse) == whole.lse));

  c.seqlen_q = 0;
  for (const double x : RunOracle(Cuda(), c, MakeInputs(Cuda(), c)).dk) REQUIRE(x == 0);
  c.seqlen_q = 80;
  c.seqlen_kv = 0;
  const OracleResult no_keys = RunOracle(Cuda(), c, MakeInputs(Cuda(), c));
  for (const double x : no_keys.out) REQUIRE(x == 0);
  for (const double x : no_keys.dq) REQUIRE(x == 0);
  for (const double x : no_keys.lse) REQUIRE(x == -std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace cppool::kernels::test
