// Compares the host's kernels with attention in fp64: bias, ALiBi, softmax offset, max_logit, and sequences
// of different lengths.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/families/host/family.h"
#include "kernels/error.h"
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

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr AttnMaskType kAll = AttnMaskType::kNoMask;
constexpr AttnMaskType kCausal = AttnMaskType::kCausal;
constexpr AttnMaskType kBottomRight = AttnMaskType::kCausalBottomRight;

constexpr BiasShape k1hss{.batch = false, .heads = true, .queries = true};
constexpr BiasShape k11ss{.batch = false, .heads = false, .queries = true};
constexpr BiasShape kb1ss{.batch = true, .heads = false, .queries = true};
constexpr BiasShape kbhss{.batch = true, .heads = true, .queries = true};
constexpr BiasShape k111s{.batch = false, .heads = false, .queries = false};

std::string Text(BiasShape shape) {
  return std::string(shape.batch ? "b" : "1") + (shape.heads ? "h" : "1") + (shape.queries ? "s" : "1") + "s";
}

Problem WithBias(Problem problem, BiasShape shape) {
  problem.bias = BiasType::kPostScale;
  problem.bias_shape = shape;
  return problem;
}

Problem WithAlibi(Problem problem) {
  problem.bias = BiasType::kAlibi;
  return problem;
}

Problem WithOffset(Problem problem) {
  problem.offset = true;
  return problem;
}

// Sequences of `length` tokens each, padded to `room`.
Sequences Padded(const std::vector<std::int64_t>& length, const std::vector<std::int64_t>& room,
                 std::int64_t rows) {
  Sequences sequences;
  sequences.length = length;
  sequences.room = room;
  sequences.rows = rows;
  return sequences;
}

TEST_CASE("A bias of every shape agrees with fp64, in one call and in several") {
  const auto shape = GENERATE(k1hss, k11ss, kb1ss, kbhss, k111s);
  const auto query_parts = GENERATE(1, 2);
  const auto key_parts = GENERATE(1, 4);
  const auto mask = GENERATE(kAll, kCausal);
  const auto dtype = GENERATE(Dtype::kFp16, Dtype::kBf16);
  INFO(Text(shape) << ", " << query_parts << " x " << key_parts << " parts, mask " << static_cast<int>(mask)
                   << ", dtype " << static_cast<int>(dtype));
  RunAndCheck(
      WithBias(MakeProblem(Shape(dtype, 64, 64, 4, 2), Spec(2, 88, 112, mask), query_parts, key_parts),
               shape),
      11);
}

TEST_CASE("A bias and a softmax offset agree with fp64 for every head dimension") {
  struct Dims {
    int qk, v;
  };
  const auto dims = GENERATE(Dims{64, 64}, Dims{128, 128}, Dims{192, 128}, Dims{128, 64}, Dims{256, 256});
  const auto shape = GENERATE(kbhss, k111s);
  const auto dtype = GENERATE(Dtype::kFp16, Dtype::kBf16);
  INFO(dims.qk << "/" << dims.v << ", " << Text(shape) << ", dtype " << static_cast<int>(dtype));
  RunAndCheck(
      WithOffset(WithBias(
          MakeProblem(Shape(dtype, dims.qk, dims.v, 2, 1), Spec(1, 72, 80, kBottomRight), 1, 2), shape)),
      12);
}

TEST_CASE("A bias with a window agrees with fp64 in every format") {
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd);
  const auto left = GENERATE(-1, 3, 70);
  const auto shape = GENERATE(k11ss, k111s);
  INFO("format " << static_cast<int>(format) << ", left " << left << ", " << Text(shape));
  RunAndCheck(WithBias(MakeProblem(Shape(Dtype::kFp16, 64, 64, 2, 1),
                                   Spec(2, 136, 136, kCausal, left, -1, format), 2, 2),
                       shape),
              13);
}

TEST_CASE("MHA, GQA, MQA and more heads than fit in a tile agree with fp64, with and without a bias") {
  struct Heads {
    int query, kv;
  };
  const auto heads = GENERATE(Heads{1, 1}, Heads{4, 4}, Heads{6, 2}, Heads{20, 1}, Heads{70, 1});
  const auto seqlen = GENERATE(1, 5, 24, 80);
  const auto shape = GENERATE(k1hss, kb1ss, k111s);
  const auto bias = GENERATE(BiasType::kNone, BiasType::kPostScale);
  if (bias == BiasType::kNone && !(shape == k1hss)) return;
  INFO(heads.query << "/" << heads.kv << " heads, " << seqlen << " tokens, bias " << static_cast<int>(bias)
                   << " " << Text(shape));
  Problem problem = WithBias(
      MakeProblem(Shape(Dtype::kFp16, 64, 64, heads.query, heads.kv), Spec(2, seqlen, seqlen, kCausal), 1, 1),
      shape);
  problem.bias = bias;
  RunAndCheck(problem, 14);
}

TEST_CASE("A range of heads that begins or ends inside a group uses its own bias, slopes and offsets") {
  const auto part = GENERATE(0, 1, 2, 3);
  const auto kv_heads = GENERATE(1, 2, 6, 12);  // of 12 query heads: three in each part
  const auto bias = GENERATE(BiasType::kNone, BiasType::kPostScale, BiasType::kAlibi);
  KernelShape shape = Shape(Dtype::kFp16, 64, 64, 12, kv_heads);
  shape.heads = 3;
  shape.head0 = part * shape.heads;
  shape.kv_head0 = shape.head0 / shape.group;
  shape.kv_heads = (shape.head0 + shape.heads - 1) / shape.group - shape.kv_head0 + 1;
  INFO("part " << part << " of 12 heads over " << kv_heads << ", bias " << static_cast<int>(bias));
  Problem problem = WithOffset(MakeProblem(shape, Spec(1, 70, 50, kAll), 1, 1));
  problem.bias = bias;
  RunAndCheck(problem, 15);
}

TEST_CASE("ALiBi is counted from the diagonal of the sequence's band") {
  const auto mask = GENERATE(kAll, kCausal, kBottomRight);
  const auto left = GENERATE(-1, 40);
  const auto diagonal = GENERATE(0, 24, -7);
  const auto parts = GENERATE(1, 2);
  INFO("mask " << static_cast<int>(mask) << ", left " << left << ", diagonal " << diagonal);
  Problem problem =
      WithAlibi(MakeProblem(Shape(Dtype::kFp16, 64, 64, 4, 2), Spec(2, 88, 112, mask, left), parts, parts));
  problem.bands[0].diagonal = diagonal;
  problem.bands[1].diagonal = diagonal / 2;
  RunAndCheck(problem, 16);
}

TEST_CASE("A softmax offset is added to the denominator once, after all keys") {
  const auto mask = GENERATE(kAll, kCausal, kBottomRight);
  const auto seqlen_q = GENERATE(64, 160);  // with more queries than keys, some see none
  const auto query_parts = GENERATE(1, 2);
  const auto key_parts = GENERATE(1, 2, 4);
  const auto dtype = GENERATE(Dtype::kFp16, Dtype::kBf16);
  INFO("mask " << static_cast<int>(mask) << ", " << seqlen_q << " queries, " << query_parts << " x "
               << key_parts << " parts, dtype " << static_cast<int>(dtype));
  RunAndCheck(WithOffset(MakeProblem(Shape(dtype, 64, 64, 4, 2), Spec(1, seqlen_q, 96, mask, 50), query_parts,
                                     key_parts)),
              17);
}

TEST_CASE("Sequences of different lengths, with padding rows, agree with fp64") {
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd);
  const auto mask =
      GENERATE(AttnMaskType::kPadding, AttnMaskType::kPaddingCausal, AttnMaskType::kPaddingCausalBottomRight);
  const auto left = GENERATE(-1, 9);
  const auto parts = GENERATE(1, 2);
  const auto bias = GENERATE(BiasType::kNone, BiasType::kPostScale, BiasType::kAlibi);
  const auto shape = GENERATE(kb1ss, k1hss, k111s);
  if (bias != BiasType::kPostScale && !(shape == kb1ss)) return;
  AttentionSpec spec = Spec(5, 80, 80, mask, left, -1, format);
  const bool packed = format == QkvFormat::kThd;
  const std::vector<std::int64_t> rooms(5, 80);
  spec.queries =
      Padded({70, 0, 1, 33, 12}, packed ? std::vector<std::int64_t>{72, 0, 4, 40, 12} : rooms, 400);
  spec.keys = Padded({77, 5, 1, 0, 29}, packed ? std::vector<std::int64_t>{80, 8, 4, 4, 32} : rooms, 400);
  INFO("format " << static_cast<int>(format) << ", mask " << static_cast<int>(mask) << ", left " << left
                 << ", " << parts << " parts, bias " << static_cast<int>(bias) << " " << Text(shape));
  Problem problem = WithOffset(MakeProblem(Shape(Dtype::kBf16, 64, 64, 2, 1), spec, parts, parts));
  problem.bias = bias;
  problem.bias_shape = shape;
  RunAndCheck(problem, 18);
}

// One query and one key, whose logit is zero and whose value is one.
struct OnePair {
  float Out(float offset) {
    const Problem problem = MakeProblem(Shape(Dtype::kBf16, 64, 64, 1, 1), Spec(1, 1, 1, kAll), 1, 1);
    const HostRank rank;
    const auto kernels = host::HostFamily().Open(rank.seam());
    KernelRequest request;
    request.shape = problem.shape;
    request.training = false;
    const auto plan =
        kernels->Plan(request, problem.query_parts[0], problem.key_parts[0], problem.bands, rank.stream());
    const std::vector<std::uint16_t> zero(64, 0), one(64, FloatToBF16(1));
    std::vector<std::uint16_t> out(64, 0x7fff);
    ForwardArgs args;
    args.plan = plan.get();
    args.q = {zero.data(), Dtype::kBf16};
    args.k = {zero.data(), Dtype::kBf16};
    args.v = {one.data(), Dtype::kBf16};
    args.out = {out.data(), Dtype::kBf16};
    args.lse = &lse;
    args.softmax_offset = &offset;
    args.max_logit = &max_logit;
    kernels->Forward(problem.shape, args, rank.stream());
    rank.Synchronize();
    return BF16ToFloat(out[17]);
  }
  float lse = 7, max_logit = -kInfinity;
};

TEST_CASE("Large softmax offsets do not overflow and do not change lse or max_logit") {
  OnePair pair;
  CHECK(pair.Out(0) == 0.5f);
  CHECK(pair.lse == 0);
  CHECK(pair.max_logit == 0);
  CHECK(pair.Out(300) == 0);
  CHECK(pair.Out(-300) == 1);
  CHECK(pair.lse == 0);
  CHECK(pair.max_logit == 0);
}

TEST_CASE("max_logit is raised, never lowered") {
  OnePair pair;
  pair.max_logit = 3;
  pair.Out(0);
  CHECK(pair.max_logit == 3);
  pair.max_logit = -3;
  pair.Out(0);
  CHECK(pair.max_logit == 0);
}

}  // namespace
