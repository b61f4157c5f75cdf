// Compares the attention kernels on a GPU with fp64 on the host: every head dim and dtype, bands, lengths
// that are not multiples of a tile, head maps, layouts, and several calls on parts.
#include <cmath>
#include <utility>

#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"

namespace cppool::kernels::test {
namespace {

constexpr Band kCausal{-kOpen, 0};
constexpr Band kAll{-kOpen, kOpen};

}  // namespace

TEST_CASE("attention on a GPU agrees with fp64 for every head dim and dtype") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
      for (const Band band : {kAll, kCausal}) {
        CAPTURE(dims.qk, dims.v, static_cast<int>(dtype), band.high);
        RunAndExpect(device, Global(Shape(dims, dtype, 4, 2), QkvFormat::kBshd, 2, 150, 200, band));
        RunAndExpect(device, Global(Shape(dims, dtype, 2, 1), QkvFormat::kSbhd, 2, 150, 200, band), 3);
      }
    }
  }
}

TEST_CASE("attention on a GPU agrees with fp64 for lengths that are not multiples of a tile") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : {Dims{64, 64}, Dims{128, 128}, Dims{192, 128}, Dims{256, 256}}) {
    for (const int seqlen_q : {1, 7, 63, 64, 129, 257}) {
      for (const int seqlen_kv : {1, 15, 64, 65, 191}) {
        CAPTURE(dims.qk, seqlen_q, seqlen_kv);
        RunAndExpect(device,
                     Global(Shape(dims, Dtype::kBf16, 2, 1), QkvFormat::kBshd, 1, seqlen_q, seqlen_kv, kAll));
        // Bottom-right: with more queries than keys, the first queries see no key.
        const Band band{-kOpen, seqlen_kv - seqlen_q};
        RunAndExpect(device,
                     Global(Shape(dims, Dtype::kFp16, 2, 1), QkvFormat::kSbhd, 2, seqlen_q, seqlen_kv, band));
      }
    }
  }
}

TEST_CASE("attention on a GPU uses exactly the pairs inside the band") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  // {-128, 0}: of 128 keys some warpgroups see one half alone, the first or the second.
  for (const Band band : {Band{-1, 0}, Band{0, 0}, Band{-70, 3}, Band{-128, 0}, Band{-kOpen, -100},
                          Band{40, kOpen}, Band{100, 90}, Band{500, 600}}) {
    for (const Dims dims : {Dims{64, 64}, Dims{128, 128}, Dims{192, 128}, Dims{256, 256}}) {
      CAPTURE(band.low, band.high, dims.qk);
      RunAndExpect(device, Global(Shape(dims, Dtype::kBf16, 2, 2), QkvFormat::kBshd, 2, 260, 300, band));
      RunAndExpect(device, Global(Shape(dims, Dtype::kBf16, 2, 2), QkvFormat::kBshd, 2, 260, 300, band), 4);
    }
  }
}

TEST_CASE("attention on a GPU makes more tiles than run at a time") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    CAPTURE(dims.qk, dims.v);
    // At least one tile for each of four heads of each sequence.
    const KernelShape shape = Shape(dims, Dtype::kBf16, 4, 2);
    RunAndExpect(device, Global(shape, QkvFormat::kBshd, 40, 70, 70, kCausal));
    RunAndExpect(device, Global(shape, QkvFormat::kSbhd, 40, 70, 90, kCausal), 2);
  }
}

TEST_CASE("attention on a GPU maps query heads to key/value heads") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  KernelShape shape = Shape({128, 128}, Dtype::kBf16, 6, 1);  // MQA
  RunAndExpect(device, Global(shape, QkvFormat::kBshd, 1, 130, 130, kCausal));
  shape = Shape({128, 128}, Dtype::kBf16, 8, 8);  // MHA
  RunAndExpect(device, Global(shape, QkvFormat::kBshd, 1, 130, 130, kCausal));
  // The middle of 12 query heads in groups of 4: heads 6 to 9 read key/value heads 1 and 2.
  shape = Shape({128, 128}, Dtype::kBf16, 4, 2);
  shape.group = 4;
  shape.head0 = 6;
  shape.kv_head0 = 1;
  RunAndExpect(device, Global(shape, QkvFormat::kSbhd, 2, 130, 130, kCausal));
}

TEST_CASE("attention on a GPU agrees with fp64 on the chunks that a rank holds") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
    for (int rank = 0; rank < 2; ++rank) {
      CAPTURE(static_cast<int>(format), rank);
      Problem problem{Shape({128, 128}, Dtype::kBf16, 2, 1),
                      RankLayout(format, UniformSequences(2, 400), 2, rank),
                      RankLayout(format, UniformSequences(2, 400), 2, 0),
                      {kCausal, kCausal}};
      RunAndExpect(device, problem);
      // Both ranks' keys in one buffer, as an all-gather leaves them.
      problem.key = Concatenate({RankLayout(format, UniformSequences(2, 400), 2, 0),
                                 RankLayout(format, UniformSequences(2, 400), 2, 1)});
      RunAndExpect(device, problem);
    }
  }
}

TEST_CASE("attention on a GPU does not write rows outside segments and does not mix sequences") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  Problem problem{Shape({128, 128}, Dtype::kBf16, 2, 1), {}, {}, {kCausal, kAll, Band{-20, 0}}};
  problem.query = {{{0, 0, 70, 5}, {1, 30, 1, 80}, {2, 0, 140, 90}}, 240, 1};
  problem.key = {{{0, 0, 50, 3}, {0, 50, 20, 60}, {2, 10, 150, 90}}, 250, 1};  // sequence 1 has no keys
  RunAndExpect(device, problem);
}

TEST_CASE("attention on a GPU does not depend on what rows of no segment hold") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    CAPTURE(dims.qk, dims.v);
    Problem problem{Shape(dims, Dtype::kBf16, 2, 1), {}, {}, {kAll}};
    problem.query = {{{0, 0, 70, 0}}, 90, 1};
    problem.key = {{{0, 0, 700, 0}}, 730, 1};
    problem.deterministic = true;
    Inputs inputs = MakeInputs(problem, 4);
    const Outputs first = Run(device, problem, inputs, {problem.key}, {problem.query});
    std::mt19937 random(5);
    for (Values* values : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) {
      const Values other = Random(random, values->size(), Dtype::kBf16);
      for (std::size_t i = 0; i < values->size(); ++i)
        if (std::isnan((*values)[i])) (*values)[i] = 100 * other[i];
    }
    CHECK(first == Run(device, problem, inputs, {problem.key}, {problem.query}));
  }
}

TEST_CASE("attention on a GPU gives the same bits on every run when it is asked to") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    for (const Band band : {kCausal, kAll, Band{-150, 40}}) {
      CAPTURE(dims.qk, dims.v, band.low, band.high);
      // Several tiles of keys that add to the same queries, on more thread blocks than run at a time.
      Problem problem = Global(Shape(dims, Dtype::kBf16, 8, 4), QkvFormat::kSbhd, 4, 1300, 1290, band);
      problem.deterministic = true;
      const Inputs inputs = MakeInputs(problem, 3);
      const Outputs first = Run(device, problem, inputs, {problem.key}, {problem.query});
      for (int i = 0; i < 2; ++i)
        CHECK(first == Run(device, problem, inputs, {problem.key}, {problem.query}));
      problem = Global(Shape(dims, Dtype::kBf16, 2, 1), QkvFormat::kBshd, 2, 300, 290, band);
      problem.deterministic = true;
      RunAndExpect(device, problem);
      RunAndExpect(device, problem, 3);
    }
  }
}

TEST_CASE("attention on a GPU does not overflow on large logits and propagates NaN") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  Problem problem = Global(Shape({64, 64}, Dtype::kBf16, 1, 1), QkvFormat::kBshd, 1, 100, 300, kAll);
  problem.shape.scale = 20;
  Inputs inputs = MakeInputs(problem, 11);
  const Outputs got = Run(device, problem, inputs, {problem.key}, {problem.query});
  CHECK(Difference(got.out, Reference(problem, inputs).out, 1.0 / 128) == "");
  inputs.q[5 * 64] = std::nanf("");
  const Outputs poisoned = Run(device, problem, inputs, {problem.key}, {problem.query});
  CHECK(std::isnan(poisoned.out[5 * 64]));
  CHECK(std::isnan(poisoned.dq[5 * 64]));
  CHECK(!std::isnan(poisoned.out[6 * 64]));
  // However the exponential of one key is made.
  inputs.q[5 * 64] = 0;
  for (const std::size_t key : {3, 12, 299}) {
    const float was = std::exchange(inputs.k[key * 64], std::nanf(""));
    CHECK(std::isnan(Run(device, problem, inputs, {problem.key}, {problem.query}).out[5 * 64]));
    inputs.k[key * 64] = was;
  }
}

TEST_CASE("head dims without a CUDA kernel are unsupported") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  try {
    KernelRequest request;
    request.shape = Shape({96, 96}, Dtype::kBf16, 2, 2);
    device.kernel().Load(request);
    FAIL("loaded");
  } catch (const RuntimeError& error) {
    CHECK(error.status() == CPPOOL_UNSUPPORTED);
    CHECK(std::string(error.what()).find("96") != std::string::npos);
  }
}

}  // namespace cppool::kernels::test
