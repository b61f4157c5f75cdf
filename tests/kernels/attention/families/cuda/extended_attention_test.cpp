// Compares the extended attention kernels on a GPU with fp64 on the host: bias and its gradient, ALiBi,
// softmax offsets, max_logit.
#include <cmath>
#include <limits>
#include <string>

#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"

namespace cppool::kernels::test {
namespace {

constexpr Band kCausal{-kOpen, 0};
constexpr Band kAll{-kOpen, kOpen};
// 1hss, 11ss, b1ss, bhss, 111s.
constexpr BiasShape kBiasShapes[] = {{false, true, true},
                                     {false, false, true},
                                     {true, false, true},
                                     {true, true, true},
                                     {false, false, false}};

Problem WithBias(Problem problem, BiasShape shape) {
  problem.bias = BiasType::kPostScale;
  problem.bias_shape = shape;
  problem.max_logit = true;
  return problem;
}

Problem WithAlibi(Problem problem) {
  problem.bias = BiasType::kAlibi;
  problem.max_logit = true;
  return problem;
}

Problem WithOffset(Problem problem) {
  problem.softmax_offset = true;
  return problem;
}

// Packed sequences, some of them empty or of a single token, on one side or on both; the longest has `keys`
// keys.
Problem Ragged(const KernelShape& shape, int keys) {
  Problem problem{shape, {}, {}, {kCausal, kAll, {-40, 20}, kAll, kAll}};
  problem.query = {{{0, 0, 131, 0}, {1, 0, 1, 140}, {2, 0, 64, 150}, {4, 0, 77, 250}}, 330, 1};
  problem.key = {{{0, 0, keys, 0}, {1, 0, 1, 140}, {2, 0, 65, 150}, {3, 0, 5, 220}, {4, 0, 1, 250}}, 330, 1};
  return problem;
}

// Names a section, so that a run can take it alone.
std::string SectionOf(Dims dims) {
  return "head dims " + std::to_string(dims.qk) + "/" + std::to_string(dims.v);
}

}  // namespace

TEST_CASE("a bias and its gradient agree with fp64 for every head dim, dtype and shape") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    DYNAMIC_SECTION(SectionOf(dims)) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
        for (const BiasShape bias : kBiasShapes) {
          CAPTURE(static_cast<int>(dtype), bias.batch, bias.heads, bias.queries);
          // With 201 keys, consecutive rows of the bias have different alignments.
          for (const int keys : {200, 201})
            RunAndExpect(
                device,
                WithBias(Global(Shape(dims, dtype, 4, 2), QkvFormat::kBshd, 2, 130, keys, kCausal), bias));
          RunAndExpect(device,
                       WithOffset(WithBias(
                           Global(Shape(dims, dtype, 2, 1), QkvFormat::kSbhd, 2, 70, 136, kAll), bias)),
                       3);
        }
      }
    }
  }
}

TEST_CASE("a bias is indexed by position: packed and empty sequences, windows, chunks of a rank") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : {Dims{64, 64}, Dims{128, 128}, Dims{256, 256}}) {
    for (const BiasShape bias : kBiasShapes) {
      CAPTURE(dims.qk, bias.batch, bias.heads, bias.queries);
      const KernelShape shape = Shape(dims, Dtype::kBf16, 2, 1);
      RunAndExpect(device, WithOffset(WithBias(Ragged(shape, 131), bias)));
      for (const int keys : {131, 136}) RunAndExpect(device, WithBias(Ragged(shape, keys), bias), 2);
      const Sequences sequences = UniformSequences(2, 400);
      Problem chunks{shape,
                     RankLayout(QkvFormat::kBshd, sequences, 2, 1),
                     Concatenate({RankLayout(QkvFormat::kBshd, sequences, 2, 0),
                                  RankLayout(QkvFormat::kBshd, sequences, 2, 1)}),
                     {{-70, 3}, kCausal}};
      RunAndExpect(device, WithBias(chunks, bias));
    }
  }
}

TEST_CASE("a bias and its gradient where no pair is visible") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  const KernelShape shape = Shape({128, 128}, Dtype::kBf16, 2, 1);
  for (const BiasShape bias : kBiasShapes) {
    CAPTURE(bias.batch, bias.heads, bias.queries);
    // The queries of a rank that come behind all keys of their window; and a rank without tokens.
    RunAndExpect(device, WithBias(Global(shape, QkvFormat::kBshd, 2, 130, 200, {-2000, -1000}), bias));
    RunAndExpect(device, WithBias({shape, {{}, 130, 1}, {{{0, 0, 200, 0}}, 200, 1}, {kAll}}, bias));
  }
}

TEST_CASE("a bias is indexed by the heads of the call") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  // The middle of 12 query heads in groups of 4: heads 6 to 9 read key/value heads 1 and 2.
  KernelShape shape = Shape({128, 128}, Dtype::kBf16, 4, 2);
  shape.group = 4;
  shape.head0 = 6;
  shape.kv_head0 = 1;
  const Problem problem = Global(shape, QkvFormat::kSbhd, 2, 130, 131, kCausal);
  for (const BiasShape bias : kBiasShapes) {
    CAPTURE(bias.batch, bias.heads, bias.queries);
    RunAndExpect(device, WithOffset(WithBias(problem, bias)));
    RunAndExpect(device, WithBias(Global(shape, QkvFormat::kBshd, 2, 130, 264, kCausal), bias));
  }
  RunAndExpect(device, WithOffset(WithAlibi(problem)));
}

TEST_CASE("ALiBi's distance is relative to the diagonal of the band") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    DYNAMIC_SECTION(SectionOf(dims)) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
        for (const Band band :
             {kAll, kCausal, Band{-kOpen, 51, 51}, Band{-30, 60, 51}, Band{-kOpen, kOpen, -9}}) {
          CAPTURE(static_cast<int>(dtype), band.low, band.high, band.diagonal);
          RunAndExpect(device,
                       WithAlibi(Global(Shape(dims, dtype, 4, 2), QkvFormat::kBshd, 2, 150, 201, band)));
        }
        RunAndExpect(device,
                     WithAlibi(Global(Shape(dims, dtype, 2, 1), QkvFormat::kSbhd, 2, 150, 201, kCausal)), 3);
      }
    }
  }
  SECTION("packed sequences") {
    RunAndExpect(device, WithAlibi(Ragged(Shape({128, 128}, Dtype::kBf16, 2, 1), 131)));
  }
}

TEST_CASE("a softmax offset is added to the denominator once") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
      CAPTURE(dims.qk, dims.v, static_cast<int>(dtype));
      const Problem problem =
          WithOffset(Global(Shape(dims, dtype, 4, 2), QkvFormat::kBshd, 2, 150, 20, kCausal));
      RunAndExpect(device, problem);
      RunAndExpect(device, problem, 3);
    }
  }
  RunAndExpect(device, WithOffset(Ragged(Shape({128, 128}, Dtype::kBf16, 2, 1), 131)));
  // Bottom-right: with more queries than keys, the first queries see no key.
  RunAndExpect(device, WithOffset(Global(Shape({128, 128}, Dtype::kBf16, 2, 1), QkvFormat::kBshd, 1, 150, 20,
                                         {-kOpen, -130})));
}

TEST_CASE("softmax offsets far above and below the logits do not overflow") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  const Problem problem =
      WithOffset(Global(Shape({64, 64}, Dtype::kBf16, 3, 1), QkvFormat::kBshd, 1, 40, 40, kAll));
  Inputs inputs = MakeInputs(problem, 5);
  inputs.softmax_offset = {300, -300, -std::numeric_limits<float>::infinity()};
  const Outputs got = Run(device, problem, inputs, {problem.key}, {problem.query});
  const Outputs want = Reference(problem, inputs);
  CHECK(Difference(got.out, want.out, 1.0 / 256) == "");
  CHECK(Difference(got.dq, want.dq, 1.0 / 128) == "");
  CHECK(Difference(got.dv, want.dv, 1.0 / 128) == "");
  CHECK(std::abs(got.out[0]) == 0);
  CHECK(std::abs(got.doffset[1]) == 0);
}

TEST_CASE("max_logit has the same bits for every order of the calls") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    CAPTURE(dims.qk, dims.v);
    Problem problem = Global(Shape(dims, Dtype::kBf16, 4, 2), QkvFormat::kBshd, 2, 150, 300, kCausal);
    problem.max_logit = true;
    RunAndExpect(device, problem);
    const Inputs inputs = MakeInputs(problem, 9);
    const Outputs whole = Run(device, problem, inputs, {problem.key}, {problem.query});
    Layout early = problem.key, late = problem.key;
    early.segments = {{0, 0, 77, 0}, {1, 0, 33, 300}};
    late.segments = {{0, 77, 223, 77}, {1, 33, 267, 333}};
    for (const auto& parts : {std::vector{early, late}, std::vector{late, early}})
      CHECK(Run(device, problem, inputs, parts, {problem.query}).max_logit == whole.max_logit);
  }
}

TEST_CASE("max_logit is the maximum over visible logits of tokens only") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  // A bias makes every logit negative, so that rows and columns beyond the tokens would have larger logits.
  Problem problem =
      WithBias(Global(Shape({128, 128}, Dtype::kBf16, 2, 1), QkvFormat::kBshd, 1, 67, 72, kCausal),
               {false, false, true});
  Inputs inputs = MakeInputs(problem, 9);
  for (float& bias : inputs.bias) bias = -64;
  const Outputs got = Run(device, problem, inputs, {problem.key}, {problem.query});
  const Outputs want = Reference(problem, inputs);
  CHECK(want.max_logit[0] < -32);
  CHECK(Difference(got.max_logit, want.max_logit, 1e-5) == "");
  // No query sees a key.
  problem = Global(Shape({128, 128}, Dtype::kBf16, 2, 1), QkvFormat::kBshd, 1, 67, 67, {100, 90});
  problem.max_logit = true;
  RunAndExpect(device, problem);
}

TEST_CASE("bias, softmax offset and max_logit together give the same bits when repeated") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const BiasShape bias : kBiasShapes) {
    CAPTURE(bias.batch, bias.heads, bias.queries);
    Problem problem = WithOffset(WithBias(
        Global(Shape({128, 128}, Dtype::kBf16, 8, 2), QkvFormat::kBshd, 4, 700, 704, kCausal), bias));
    problem.deterministic = true;
    const Inputs inputs = MakeInputs(problem, 3);
    const Outputs first = Run(device, problem, inputs, {problem.key}, {problem.query});
    for (int i = 0; i < 3; ++i) CHECK(first == Run(device, problem, inputs, {problem.key}, {problem.query}));
  }
}

TEST_CASE("a bias gradient summed over queries and also over heads or sequences is refused") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  const Problem problem = Global(Shape({64, 64}, Dtype::kBf16, 1, 1), QkvFormat::kBshd, 1, 8, 8, kAll);
  const auto plan =
      device.kernel().Plan(RequestOf(problem), problem.query, problem.key, problem.bands, device.stream());
  BackwardArgs args;
  args.plan = plan.get();
  CHECK_THROWS_AS(device.kernel().BackwardBias(problem.shape, args, {nullptr, 8, 0, 0}, device.stream()),
                  RuntimeError);
  CHECK_THROWS_AS(device.kernel().BackwardBias(problem.shape, args, {nullptr, 0, 8, 0}, device.stream()),
                  RuntimeError);
}

}  // namespace cppool::kernels::test
