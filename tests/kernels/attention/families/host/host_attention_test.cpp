// Compares the host's attention kernels with attention in fp64, forward and backward, in one call and in
// several.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/families/host/family.h"
#include "kernels/numerics/half.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/host/host_attention_case.h"
#include "tests/kernels/attention/families/host/host_rank.h"

namespace {

using namespace cppool::kernels;
using cppool::test::HostRank;
using cppool::test::MakeProblem;
using cppool::test::Problem;
using cppool::test::RunAndCheck;
using cppool::test::Shape;
using cppool::test::Spec;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint16_t kNanBits = 0x7fff;  // in both types

KernelRequest ForwardOnly(const KernelShape& shape) {
  KernelRequest request;
  request.shape = shape;
  request.training = false;
  return request;
}

constexpr AttnMaskType kAll = AttnMaskType::kNoMask;
constexpr AttnMaskType kCausal = AttnMaskType::kCausal;
constexpr AttnMaskType kBottomRight = AttnMaskType::kCausalBottomRight;

TEST_CASE("Every head dimension agrees with fp64 in both dtypes") {
  struct Dims {
    int qk, v;
  };
  const auto dims = GENERATE(Dims{64, 64}, Dims{128, 128}, Dims{192, 128}, Dims{128, 64}, Dims{256, 256});
  const auto dtype = GENERATE(Dtype::kBf16, Dtype::kFp16);
  const auto mask = GENERATE(kAll, kCausal);
  INFO(dims.qk << "/" << dims.v << " dtype " << static_cast<int>(dtype) << " mask "
               << static_cast<int>(mask));
  RunAndCheck(MakeProblem(Shape(dtype, dims.qk, dims.v, 2, 1), Spec(1, 150, 150, mask), 1, 1), 1);
}

TEST_CASE("Lengths around the tile and block sizes agree with fp64") {
  const auto seqlen_q = GENERATE(1, 2, 15, 16, 17, 63, 64, 65, 129);
  const auto seqlen_kv = GENERATE(1, 16, 63, 64, 65, 130);
  const auto mask = GENERATE(kAll, kCausal, kBottomRight);
  INFO(seqlen_q << " queries, " << seqlen_kv << " keys, mask " << static_cast<int>(mask));
  RunAndCheck(MakeProblem(Shape(Dtype::kFp16, 64, 64, 3, 1), Spec(2, seqlen_q, seqlen_kv, mask), 1, 1), 2);
}

TEST_CASE("Windows agree with fp64, also for queries that see no key") {
  const auto mask = GENERATE(kAll, kCausal, kBottomRight);
  const auto left = GENERATE(-1, 0, 3, 70);
  const auto right = GENERATE(-1, 0, 5, 66);
  const auto seqlen_q = GENERATE(96, 160, 200);
  INFO("mask " << static_cast<int>(mask) << ", window " << left << " " << right << ", " << seqlen_q
               << " queries");
  RunAndCheck(MakeProblem(Shape(Dtype::kBf16, 64, 64, 2, 2), Spec(1, seqlen_q, 144, mask, left, right), 1, 1),
              3);
}

TEST_CASE("A key/value head that no query head of the call reads has gradient zero") {
  KernelShape shape = Shape(Dtype::kFp16, 64, 64, 2, 1);
  shape.kv_heads = 3;
  shape.kv_head0 = 4;
  shape.head0 = 10;  // reads head 5, the second of three
  RunAndCheck(MakeProblem(shape, Spec(1, 40, 40, kCausal), 1, 1), 6);
}

TEST_CASE("Several calls on parts give the results of one call") {
  const auto query_parts = GENERATE(1, 2, 4);
  const auto key_parts = GENERATE(1, 2, 4);
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd);
  const auto mask = GENERATE(kAll, kCausal, kBottomRight);
  const auto left = GENERATE(-1, 20);
  const Dtype dtype = (query_parts + key_parts) % 3 == 0 ? Dtype::kBf16 : Dtype::kFp16;
  INFO(query_parts << " x " << key_parts << " parts, format " << static_cast<int>(format) << ", mask "
                   << static_cast<int>(mask) << ", left " << left);
  RunAndCheck(MakeProblem(Shape(dtype, 64, 64, 4, 2), Spec(2, 96, 160, mask, left, -1, format), query_parts,
                          key_parts),
              7);
}

TEST_CASE("Logits of 2048 do not overflow") {
  Problem problem = MakeProblem(Shape(Dtype::kFp16, 64, 64, 2, 1), Spec(1, 100, 120, kAll), 1, 2);
  problem.shape.scale = 8;
  const HostRank rank;
  const auto kernels = host::HostFamily().Open(rank.seam());
  // All logits are 8 * 64 * 2 * 2 = 2048 for the first half of the keys and -2048 for the others.
  const std::size_t rows_q = 100, rows_kv = 120;
  std::vector<std::uint16_t> q(rows_q * 2 * 64, FloatToFP16(2)), k(rows_kv * 64), v(rows_kv * 64),
      out(q.size());
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = FloatToFP16(i < k.size() / 2 ? 2.0f : -2.0f);
    v[i] = FloatToFP16(i < k.size() / 2 ? 0.5f : -7.0f);
  }
  std::vector<float> lse(rows_q * 2, kNan), sum(q.size(), kNan);
  std::vector<std::unique_ptr<BlockPlan>> plans;
  for (std::size_t j = 0; j < 2; ++j) {
    plans.push_back(kernels->Plan(ForwardOnly(problem.shape), problem.query_parts[0], problem.key_parts[j],
                                  problem.bands, rank.stream()));
    ForwardArgs args;
    args.plan = plans.back().get();
    args.q = {q.data(), Dtype::kFp16};
    args.k = {k.data() + j * 60 * 64, Dtype::kFp16};
    args.v = {v.data() + j * 60 * 64, Dtype::kFp16};
    args.accumulator = sum.data();
    args.out = {out.data(), Dtype::kFp16};
    args.lse = lse.data();
    args.first = j == 0;
    args.last = j == 1;
    kernels->Forward(problem.shape, args, rank.stream());
  }
  rank.Synchronize();
  CHECK(std::all_of(out.begin(), out.end(), [](std::uint16_t x) { return x == FloatToFP16(0.5f); }));
  CHECK(std::all_of(lse.begin(), lse.end(),
                    [](float x) { return std::abs(x - (2048 + std::log(60.0f))) < 1e-3f; }));
}

TEST_CASE("NaN in a key or value is written to the rows that see it") {
  const Problem problem = MakeProblem(Shape(Dtype::kBf16, 64, 64, 1, 1), Spec(1, 40, 40, kCausal), 1, 1);
  const HostRank rank;
  const auto kernels = host::HostFamily().Open(rank.seam());
  const auto plan = kernels->Plan(ForwardOnly(problem.shape), problem.query_parts[0], problem.key_parts[0],
                                  problem.bands, rank.stream());
  const auto where = GENERATE(0, 1);  // in a key, in a value
  std::vector<std::uint16_t> q(40 * 64, FloatToBF16(1)), k(q), v(q), out(q);
  (where == 0 ? k : v)[39 * 64 + 3] = kNanBits;
  std::vector<float> lse(40);
  ForwardArgs args;
  args.plan = plan.get();
  args.q = {q.data(), Dtype::kBf16};
  args.k = {k.data(), Dtype::kBf16};
  args.v = {v.data(), Dtype::kBf16};
  args.out = {out.data(), Dtype::kBf16};
  args.lse = lse.data();
  kernels->Forward(problem.shape, args, rank.stream());
  rank.Synchronize();
  CHECK(std::isnan(BF16ToFloat(out[39 * 64 + 3])));
  CHECK(std::isnan(lse[39]) == (where == 0));
}

TEST_CASE("Unsupported shapes are refused with an error that lists the supported ones") {
  const HostRank rank;
  const auto kernels = host::HostFamily().Open(rank.seam());
  const auto refused = [&](const KernelShape& shape) -> std::string {
    KernelRequest request;
    request.shape = shape;
    const std::optional<std::string> refusal = host::HostFamily().Refusal(request);
    try {
      kernels->Load(request);
    } catch (const RuntimeError& error) {
      CHECK(error.status() == CPPOOL_UNSUPPORTED);
      CHECK(refusal == error.what());  // Load throws the text that Refusal returns
      return error.what();
    }
    CHECK_FALSE(refusal);
    return "";
  };
  for (int qk = 1; qk <= 300; ++qk) {
    for (const int v : {64, 80, 128, 192, 256, qk}) {
      const bool allowed = (qk == 64 && v == 64) || (qk == 128 && (v == 128 || v == 64)) ||
                           (qk == 192 && v == 128) || (qk == 256 && v == 256);
      REQUIRE(refused(Shape(Dtype::kBf16, qk, v, 1, 1)).empty() == allowed);
    }
  }
  CHECK_THAT(refused(Shape(Dtype::kBf16, 96, 80, 1, 1)),
             Catch::Matchers::ContainsSubstring("96") && Catch::Matchers::ContainsSubstring("80") &&
                 Catch::Matchers::ContainsSubstring(
                     "64, 128, 256, 192 with head_dim_v 128, 128 with head_dim_v 64"));
  CHECK_THAT(refused(Shape(Dtype::kFp32, 64, 64, 1, 1)), Catch::Matchers::ContainsSubstring("dtype fp32"));
  KernelShape mixed = Shape(Dtype::kBf16, 64, 64, 1, 1);
  mixed.dtypes.dk = Dtype::kFp16;
  CHECK_THAT(refused(mixed), Catch::Matchers::ContainsSubstring("different dtypes"));
}

TEST_CASE("Gradients need a plan for training, and a bias's gradient strides that are supported") {
  const Problem problem = MakeProblem(Shape(Dtype::kBf16, 64, 64, 1, 1), Spec(1, 8, 8, kCausal), 1, 1);
  const HostRank rank;
  const auto kernels = host::HostFamily().Open(rank.seam());
  const auto plan = [&](bool training) {
    KernelRequest request = ForwardOnly(problem.shape);
    request.training = training;
    return kernels->Plan(request, problem.query_parts[0], problem.key_parts[0], problem.bands, rank.stream());
  };
  const auto forward_only = plan(false), both = plan(true);
  CHECK(forward_only->pairs() == 36);
  std::vector<float> sum(64);
  BackwardArgs args;
  args.plan = forward_only.get();
  CHECK_THROWS_AS(kernels->Backward(problem.shape, args, rank.stream()), RuntimeError);
  const auto refused = [&](BiasGradient gradient) {
    CHECK_THROWS_AS(kernels->BackwardBias(problem.shape, args, gradient, rank.stream()), RuntimeError);
  };
  refused({sum.data(), 64, 64, 8});
  args.plan = both.get();
  refused({sum.data(), 0, 8, 0});
  refused({sum.data(), 8, 0, 0});
}

}  // namespace
