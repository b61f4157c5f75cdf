// The host's attention kernels against attention in fp64, forward and backward, in one call and in several.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "host_rank.h"
#include "kernels/attention/attention_kernels.h"
#include "kernels/host/attention_kernels.h"
#include "kernels/host/half.h"
#include "naive_attention.h"

namespace {

using namespace cppool::kernels;
using cppool::test::HostRank;
using cppool::test::NaiveAttention;
using cppool::test::NaiveResult;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint16_t kNanBits = 0x7fff;  // in both types

struct Half {
  Dtype dtype;
  std::vector<std::uint16_t> bits;

  std::vector<double> Numbers() const {
    std::vector<double> numbers(bits.size());
    for (std::size_t i = 0; i < bits.size(); ++i) {
      numbers[i] = LoadElement(dtype, bits.data(), static_cast<std::int64_t>(i));
    }
    return numbers;
  }
};

Half RandomHalf(Dtype dtype, std::size_t count, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(-1.5, 1.5);
  Half half{dtype, std::vector<std::uint16_t>(count)};
  for (std::size_t i = 0; i < count; ++i) {
    StoreElement(dtype, half.bits.data(), static_cast<std::int64_t>(i), uniform(random));
  }
  return half;
}

Half Poisoned(Dtype dtype, std::size_t count) { return {dtype, std::vector<std::uint16_t>(count, kNanBits)}; }

// NaN first, then the RMS error relative to the reference's RMS, then single elements.
void CheckClose(const std::string& name, const Half& got, const std::vector<double>& want) {
  INFO(name);
  REQUIRE(got.bits.size() == want.size());
  const std::vector<double> numbers = got.Numbers();
  double error = 0, size = 0, largest_error = 0, largest = 0;
  std::size_t nans = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    nans += std::isnan(numbers[i]) ? 1 : 0;
    const double difference = std::abs(numbers[i] - want[i]);
    error += difference * difference;
    size += want[i] * want[i];
    largest_error = std::max(largest_error, difference);
    largest = std::max(largest, std::abs(want[i]));
  }
  REQUIRE(nans == 0);
  const double unit = got.dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;  // half a unit in the last place of 1
  // Where a softmax sees one key, its gradients are differences of equal numbers, and the reference is zero.
  const double floor = 0.05 * unit;
  CHECK(std::sqrt(error) <=
        1.5 * unit * std::sqrt(size) + floor * std::sqrt(static_cast<double>(want.size())));
  CHECK(largest_error <= 4 * unit * largest + 4 * floor);
}

struct Problem {
  KernelShape shape;
  // Parts of queries and of keys, each a buffer of its own; calls are made for every pair of them.
  std::vector<Layout> query_parts;
  std::vector<Layout> key_parts;
  std::vector<Band> bands;
};

// A part's place in tensors that hold the parts end to end.
std::size_t RowsBefore(const std::vector<Layout>& parts, std::size_t part) {
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < part; ++i) rows += parts[i].rows;
  return static_cast<std::size_t>(rows);
}

void RunAndCheck(const Problem& problem, unsigned seed) {
  const KernelShape& shape = problem.shape;
  const Layout query = Concatenate(problem.query_parts), key = Concatenate(problem.key_parts);
  std::mt19937 random(seed);
  const auto rows_q = static_cast<std::size_t>(query.rows), rows_kv = static_cast<std::size_t>(key.rows);
  const auto heads = static_cast<std::size_t>(shape.heads),
             kv_heads = static_cast<std::size_t>(shape.kv_heads);
  const auto dim = static_cast<std::size_t>(shape.dim_qk), dim_v = static_cast<std::size_t>(shape.dim_v);
  const Half q = RandomHalf(shape.dtype, rows_q * heads * dim, random);
  const Half k = RandomHalf(shape.dtype, rows_kv * kv_heads * dim, random);
  const Half v = RandomHalf(shape.dtype, rows_kv * kv_heads * dim_v, random);
  const Half dout = RandomHalf(shape.dtype, rows_q * heads * dim_v, random);
  Half out = Poisoned(shape.dtype, dout.bits.size());
  Half dq = Poisoned(shape.dtype, q.bits.size());
  Half dk = Poisoned(shape.dtype, k.bits.size());
  Half dv = Poisoned(shape.dtype, v.bits.size());
  std::vector<float> lse(rows_q * heads, kNan), delta(rows_q * heads, kNan);
  std::vector<float> out_sum(out.bits.size(), kNan), dq_sum(dq.bits.size(), kNan);
  std::vector<float> dk_sum(dk.bits.size(), kNan), dv_sum(dv.bits.size(), kNan);

  const HostRank rank;
  const auto kernels = MakeHostAttentionKernels(rank.seam());
  kernels->Load(shape, true);
  const std::size_t queries = problem.query_parts.size(), keys = problem.key_parts.size();
  std::vector<std::unique_ptr<BlockPlan>> plans(queries * keys);
  for (std::size_t i = 0; i < queries; ++i) {
    for (std::size_t j = 0; j < keys; ++j) {
      plans[i * keys + j] = kernels->Plan(shape, problem.query_parts[i], problem.key_parts[j], problem.bands,
                                          true, rank.stream());
    }
  }
  for (std::size_t i = 0; i < queries; ++i) {
    const std::size_t row = RowsBefore(problem.query_parts, i) * heads;
    for (std::size_t j = 0; j < keys; ++j) {
      const std::size_t kv_row = RowsBefore(problem.key_parts, j) * kv_heads;
      ForwardArgs args;
      args.plan = plans[i * keys + j].get();
      args.q = q.bits.data() + row * dim;
      args.k = k.bits.data() + kv_row * dim;
      args.v = v.bits.data() + kv_row * dim_v;
      args.accumulator = keys == 1 ? nullptr : out_sum.data() + row * dim_v;
      args.out = out.bits.data() + row * dim_v;
      args.lse = lse.data() + row;
      args.first = j == 0;
      args.last = j + 1 == keys;
      kernels->Forward(shape, args, rank.stream());
    }
  }
  kernels->Delta(shape, query.rows, out.bits.data(), dout.bits.data(), delta.data(), rank.stream());
  const auto backward_args = [&](std::size_t i, std::size_t j) {
    const std::size_t row = RowsBefore(problem.query_parts, i) * heads;
    const std::size_t kv_row = RowsBefore(problem.key_parts, j) * kv_heads;
    BackwardArgs args;
    args.plan = plans[i * keys + j].get();
    args.q = q.bits.data() + row * dim;
    args.k = k.bits.data() + kv_row * dim;
    args.v = v.bits.data() + kv_row * dim_v;
    args.dout = dout.bits.data() + row * dim_v;
    args.lse = lse.data() + row;
    args.delta = delta.data() + row;
    args.dq_accumulator = dq_sum.data() + row * dim;
    args.dq = dq.bits.data() + row * dim;
    args.dk_accumulator = dk_sum.data() + kv_row * dim;
    args.dv_accumulator = dv_sum.data() + kv_row * dim_v;
    args.dk = dk.bits.data() + kv_row * dim;
    args.dv = dv.bits.data() + kv_row * dim_v;
    return args;
  };
  for (std::size_t i = 0; i < queries; ++i) {
    for (std::size_t j = 0; j < keys; ++j) {
      BackwardArgs args = backward_args(i, j);
      args.first = j == 0;
      args.last = j + 1 == keys;
      kernels->BackwardQuery(shape, args, rank.stream());
      args.first = i == 0;
      args.last = i + 1 == queries;
      kernels->BackwardKey(shape, args, rank.stream());
    }
  }
  rank.Synchronize();

  const NaiveResult want =
      NaiveAttention(shape, query, key, problem.bands, q.Numbers(), k.Numbers(), v.Numbers(), dout.Numbers());
  CheckClose("out", out, want.out);
  CheckClose("dq", dq, want.dq);
  CheckClose("dk", dk, want.dk);
  CheckClose("dv", dv, want.dv);
  std::size_t wrong = 0, masked = 0;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    masked += std::isinf(want.lse[i]) ? 1 : 0;
    const bool right =
        std::isinf(want.lse[i]) ? lse[i] == want.lse[i] : std::abs(lse[i] - want.lse[i]) < 2e-5;
    wrong += right ? 0 : 1;
  }
  INFO("of " << lse.size() << " rows, " << masked << " see no key");
  CHECK(wrong == 0);
  // A row that sees nothing is exactly zero, and so are the gradients of its query.
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (!std::isinf(want.lse[i])) continue;
    const auto zero = [](std::uint16_t bits) { return (bits & 0x7fff) == 0; };
    CHECK(std::all_of(&out.bits[i * dim_v], &out.bits[i * dim_v] + dim_v, zero));
    CHECK(std::all_of(&dq.bits[i * dim], &dq.bits[i * dim] + dim, zero));
  }
}

// Every part of a world's layouts, as queries and as keys.
Problem MakeProblem(KernelShape shape, const AttentionSpec& spec, int query_parts, int key_parts) {
  shape.scale = 1 / std::sqrt(static_cast<float>(shape.dim_qk));
  Problem problem{shape, {}, {}, {}};
  for (int r = 0; r < query_parts; ++r) {
    problem.query_parts.push_back(RankLayout(spec.format, spec.batch, spec.seqlen_q, query_parts, r));
  }
  for (int r = 0; r < key_parts; ++r) {
    problem.key_parts.push_back(RankLayout(spec.format, spec.batch, spec.seqlen_kv, key_parts, r));
  }
  problem.bands.assign(static_cast<std::size_t>(spec.batch), BandOf(spec, spec.seqlen_q, spec.seqlen_kv));
  return problem;
}

KernelShape Shape(Dtype dtype, int dim_qk, int dim_v, int heads, int kv_heads) {
  KernelShape shape;
  shape.dtype = dtype;
  shape.dim_qk = dim_qk;
  shape.dim_v = dim_v;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.group = heads / kv_heads;
  return shape;
}

AttentionSpec Spec(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_kv, AttnMaskType mask,
                   std::int64_t left = -1, std::int64_t right = -1, QkvFormat format = QkvFormat::kBshd) {
  AttentionSpec spec;
  spec.batch = batch;
  spec.seqlen_q = seqlen_q;
  spec.seqlen_kv = seqlen_kv;
  spec.mask = mask;
  spec.window_left = left;
  spec.window_right = right;
  spec.format = format;
  return spec;
}

constexpr AttnMaskType kAll = AttnMaskType::kNoMask;
constexpr AttnMaskType kCausal = AttnMaskType::kCausal;
constexpr AttnMaskType kBottomRight = AttnMaskType::kCausalBottomRight;

TEST_CASE("Every head dimension in both types") {
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

TEST_CASE("Lengths around the tile and block sizes") {
  const auto seqlen_q = GENERATE(1, 2, 15, 16, 17, 63, 64, 65, 129);
  const auto seqlen_kv = GENERATE(1, 16, 63, 64, 65, 130);
  const auto mask = GENERATE(kAll, kCausal, kBottomRight);
  INFO(seqlen_q << " queries, " << seqlen_kv << " keys, mask " << static_cast<int>(mask));
  RunAndCheck(MakeProblem(Shape(Dtype::kFp16, 64, 64, 3, 1), Spec(2, seqlen_q, seqlen_kv, mask), 1, 1), 2);
}

TEST_CASE("Windows, with rows that see nothing") {
  const auto mask = GENERATE(kAll, kCausal, kBottomRight);
  const auto left = GENERATE(-1, 0, 3, 70);
  const auto right = GENERATE(-1, 0, 5, 66);
  const auto seqlen_q = GENERATE(96, 160, 200);
  INFO("mask " << static_cast<int>(mask) << ", window " << left << " " << right << ", " << seqlen_q
               << " queries");
  RunAndCheck(MakeProblem(Shape(Dtype::kBf16, 64, 64, 2, 2), Spec(1, seqlen_q, 144, mask, left, right), 1, 1),
              3);
}

TEST_CASE("Heads: MHA, GQA, MQA, more heads than fit in a tile") {
  struct Heads {
    int query, kv;
  };
  const auto heads = GENERATE(Heads{1, 1}, Heads{4, 4}, Heads{6, 2}, Heads{20, 1}, Heads{70, 1});
  const auto seqlen = GENERATE(1, 5, 24, 80);
  INFO(heads.query << "/" << heads.kv << " heads, " << seqlen << " tokens");
  RunAndCheck(
      MakeProblem(Shape(Dtype::kFp16, 64, 64, heads.query, heads.kv), Spec(2, seqlen, seqlen, kCausal), 1, 1),
      4);
}

TEST_CASE("A part of the heads whose groups are cut") {
  const int parts = 4;
  const auto part = GENERATE(0, 1, 2, 3);
  const auto kv_heads = GENERATE(1, 2, 6, 12);  // of 12 query heads: three in each part
  KernelShape shape = Shape(Dtype::kFp16, 64, 64, 12, kv_heads);
  shape.heads = 12 / parts;
  shape.head0 = part * shape.heads;
  shape.kv_head0 = shape.head0 / shape.group;
  shape.kv_heads = (shape.head0 + shape.heads - 1) / shape.group - shape.kv_head0 + 1;
  INFO("part " << part << " of 12 heads over " << kv_heads);
  RunAndCheck(MakeProblem(shape, Spec(1, 70, 50, kAll), 1, 1), 5);
}

TEST_CASE("A key/value head that no query head here reads has gradient zero") {
  KernelShape shape = Shape(Dtype::kFp16, 64, 64, 2, 1);
  shape.kv_heads = 3;
  shape.kv_head0 = 4;
  shape.head0 = 10;  // reads head 5, the second of three
  RunAndCheck(MakeProblem(shape, Spec(1, 40, 40, kCausal), 1, 1), 6);
}

TEST_CASE("Several calls give what one call gives") {
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

TEST_CASE("Logits of a hundred and more do not overflow") {
  Problem problem = MakeProblem(Shape(Dtype::kFp16, 64, 64, 2, 1), Spec(1, 100, 120, kAll), 1, 2);
  problem.shape.scale = 8;
  const HostRank rank;
  const auto kernels = MakeHostAttentionKernels(rank.seam());
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
    plans.push_back(kernels->Plan(problem.shape, problem.query_parts[0], problem.key_parts[j], problem.bands,
                                  false, rank.stream()));
    ForwardArgs args;
    args.plan = plans.back().get();
    args.q = q.data();
    args.k = k.data() + j * 60 * 64;
    args.v = v.data() + j * 60 * 64;
    args.accumulator = sum.data();
    args.out = out.data();
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

TEST_CASE("NaN in a value reaches the rows that see it") {
  const Problem problem = MakeProblem(Shape(Dtype::kBf16, 64, 64, 1, 1), Spec(1, 40, 40, kCausal), 1, 1);
  const HostRank rank;
  const auto kernels = MakeHostAttentionKernels(rank.seam());
  const auto plan = kernels->Plan(problem.shape, problem.query_parts[0], problem.key_parts[0], problem.bands,
                                  false, rank.stream());
  const auto where = GENERATE(0, 1);  // in a key, in a value
  std::vector<std::uint16_t> q(40 * 64, FloatToBF16(1)), k(q), v(q), out(q);
  (where == 0 ? k : v)[39 * 64 + 3] = kNanBits;
  std::vector<float> lse(40);
  ForwardArgs args;
  args.plan = plan.get();
  args.q = q.data();
  args.k = k.data();
  args.v = v.data();
  args.out = out.data();
  args.lse = lse.data();
  kernels->Forward(problem.shape, args, rank.stream());
  rank.Synchronize();
  CHECK(std::isnan(BF16ToFloat(out[39 * 64 + 3])));
  CHECK(std::isnan(lse[39]) == (where == 0));
}

TEST_CASE("Shapes that there are no kernels for are refused with what there is") {
  const HostRank rank;
  const auto kernels = MakeHostAttentionKernels(rank.seam());
  const auto refused = [&](const KernelShape& shape) -> std::string {
    try {
      kernels->Load(shape, true);
    } catch (const RuntimeError& error) {
      CHECK(error.status() == CPPOOL_UNSUPPORTED);
      return error.what();
    }
    return "";
  };
  for (int qk = 1; qk <= 300; ++qk) {
    for (const int v : {64, 80, 128, 192, 256, qk}) {
      const bool allowed = (qk == 64 && v == 64) || (qk == 128 && (v == 128 || v == 64)) ||
                           (qk == 192 && v == 128) || (qk == 256 && v == 256);
      REQUIRE(refused(Shape(Dtype::kBf16, qk, v, 1, 1)).empty() == allowed);
    }
  }
  CHECK_THAT(refused(Shape(Dtype::kBf16, 96, 80, 1, 1)), Catch::Matchers::Contains("96") &&
                                                             Catch::Matchers::Contains("80") &&
                                                             Catch::Matchers::Contains(kSupportedHeadDims));
  CHECK_FALSE(refused(Shape(Dtype::kFp32, 64, 64, 1, 1)).empty());
}

TEST_CASE("Gradients need a plan for training") {
  const Problem problem = MakeProblem(Shape(Dtype::kBf16, 64, 64, 1, 1), Spec(1, 8, 8, kCausal), 1, 1);
  const HostRank rank;
  const auto kernels = MakeHostAttentionKernels(rank.seam());
  const auto plan = kernels->Plan(problem.shape, problem.query_parts[0], problem.key_parts[0], problem.bands,
                                  false, rank.stream());
  CHECK(plan->pairs() == 36);
  BackwardArgs args;
  args.plan = plan.get();
  CHECK_THROWS_AS(kernels->BackwardQuery(problem.shape, args, rank.stream()), RuntimeError);
  CHECK_THROWS_AS(kernels->BackwardKey(problem.shape, args, rank.stream()), RuntimeError);
}

}  // namespace
