// The recipes of fp8 with every schedule and feature, judged as fp8 is; and what the checks must see.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace cppool::test {
namespace {

using namespace kernels;

// All twelve that differ (f16_o only matters to a backward pass in fp8 with current scaling).
std::vector<Fp8Recipe> Recipes() {
  std::vector<Fp8Recipe> recipes;
  for (const bool bwd : {true, false}) {
    for (const bool mha : {false, true}) {
      recipes.push_back({ScalingMode::kDelayed, true, mha, bwd, false});
      recipes.push_back({ScalingMode::kCurrent, true, mha, bwd, true});
      if (bwd) recipes.push_back({ScalingMode::kCurrent, true, mha, bwd, false});
    }
    recipes.push_back({ScalingMode::kMxfp8, true, false, bwd, true});
  }
  return recipes;
}

std::string TextOf(const Fp8Recipe& recipe) {
  constexpr const char* kModes[] = {"delayed", "current", "mxfp8"};
  return std::string(kModes[static_cast<int>(recipe.scaling_mode)]) + (recipe.mha ? " mha" : " dpa") +
         (recipe.bwd ? " bwd" : "") + (recipe.f16_o ? " f16_o" : "");
}

std::string TextOf(const Finding& f) {
  return "rank " + std::to_string(f.rank) + " " + NameOf(f.tensor) + " against " + f.against +
         ": max_abs_err " + std::to_string(f.verdict.max_abs_err) + ", rel_err " +
         std::to_string(f.verdict.rel_err) + ", ratio " + std::to_string(f.verdict.ratio) + ", tolerance " +
         std::to_string(f.verdict.tolerance) + ", mismatches " + std::to_string(f.verdict.mismatches);
}

// Every result is judged, and so are the bits of every quantized input.
void RequireAllHold(HostWorld& world, const AttentionSpec& spec, TensorSource* source = nullptr) {
  INFO(test::Describe(spec) << ", " << TextOf(*spec.fp8) << ", on " << world.size() << " ranks");
  std::set<std::pair<CheckedTensor, std::string>> checked;
  for (const Finding& f : world.Run(spec, {}, source)) {
    checked.insert({f.tensor, f.against});
    INFO(TextOf(f));
    CHECK(f.verdict.ok);
  }
  for (const TensorInfo& tensor : OutputTensors(spec)) {
    const auto kind = std::get<CheckedTensor>(tensor.kind);
    INFO(NameOf(kind));
    CHECK(checked.count({kind, "oracle"}) == 1);
    CHECK(checked.count({kind, "no_cp"}) == 1);
  }
  for (const CheckedTensor kind :
       {CheckedTensor::kQ, CheckedTensor::kK, CheckedTensor::kV, CheckedTensor::kOut})
    CHECK(checked.count({kind, "bits"}) == 1);
  CHECK(checked.count({CheckedTensor::kDout, "bits"}) == (spec.training && spec.fp8->bwd ? 1u : 0u));
  CHECK(checked.count({CheckedTensor::kDelta, "bits"}) == (spec.training ? 1u : 0u));
}

AttentionSpec Case(int world, CpCommType comm, const Fp8Recipe& recipe) {
  AttentionSpec spec = Small(world, comm);
  // Chunks of 32 tokens where those are blocks, else of 8.
  spec.seqlen_q = spec.seqlen_kv = (recipe.scaling_mode == ScalingMode::kMxfp8 ? 64 : 16) * world;
  spec.batch = 1;
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.fp8 = recipe;
  return spec;
}

void WithEverySchedule(HostWorld& world, const std::vector<Fp8Recipe>& recipes,
                       const std::function<void(AttentionSpec&)>& vary) {
  for (const Fp8Recipe& recipe : recipes) {
    for (const CpCommType comm : kComms) {
      if (!Possible(comm, world.size())) continue;
      AttentionSpec spec = Case(world.size(), comm, recipe);
      vary(spec);
      RequireAllHold(world, spec);
    }
  }
}

// One of each scaling mode, with as much of it in fp8 as there is.
const std::vector<Fp8Recipe> kFullRecipes = {{ScalingMode::kDelayed, true, true, true, false},
                                             {ScalingMode::kCurrent, true, true, true, false},
                                             {ScalingMode::kMxfp8, true, false, true, true}};

}  // namespace

// In its context_parallel.py. Every forward pass casts P.
TEST_CASE("the table of a recipe has what Transformer Engine casts") {
  struct Casts {
    std::string recipe;
    bool out_leaves, out_of_delta, backward, gradients;
  };
  const std::vector<Casts> expected = {{"delayed mha bwd", true, true, true, true},
                                       {"delayed dpa bwd", true, true, true, true},
                                       {"delayed mha", true, true, false, false},
                                       {"delayed dpa", true, true, false, false},
                                       {"current mha bwd f16_o", true, false, true, true},
                                       {"current mha bwd", true, true, true, true},
                                       {"current dpa bwd f16_o", false, false, true, false},
                                       {"current dpa bwd", false, true, true, false},
                                       {"current mha f16_o", true, false, false, false},
                                       {"current dpa f16_o", false, false, false, false},
                                       {"mxfp8 dpa bwd f16_o", false, false, true, false},
                                       {"mxfp8 dpa f16_o", false, false, false, false}};
  for (const Fp8Recipe& recipe : Recipes()) {
    INFO(TextOf(recipe));
    const auto casts = std::find_if(expected.begin(), expected.end(),
                                    [&](const Casts& each) { return each.recipe == TextOf(recipe); });
    REQUIRE(casts != expected.end());
    const Fp8Table table = Fp8TableOf(recipe, true);
    CHECK(table.Has(Fp8Tensor::kOut, kForCaller) == casts->out_leaves);
    CHECK(table.Has(Fp8Tensor::kOut, kForDelta) == casts->out_of_delta);
    for (const Fp8Tensor tensor : {Fp8Tensor::kP, Fp8Tensor::kDs, Fp8Tensor::kDout})
      CHECK(table.Has(tensor, kBackwardPass) == casts->backward);
    for (const Fp8Tensor tensor : {Fp8Tensor::kQ, Fp8Tensor::kK, Fp8Tensor::kV, Fp8Tensor::kP})
      CHECK(table.Has(tensor, kForwardPass));
    const bool blocks = recipe.scaling_mode == ScalingMode::kMxfp8;
    for (const Fp8Tensor tensor : {Fp8Tensor::kDq, Fp8Tensor::kDk, Fp8Tensor::kDv})
      CHECK(table.Has(tensor, kForCaller) == casts->gradients);
    for (const Fp8Row& row : table) {
      const bool of_backward = row.tensor == Fp8Tensor::kDout || row.tensor == Fp8Tensor::kDs ||
                               row.tensor == Fp8Tensor::kDq || row.tensor == Fp8Tensor::kDk ||
                               row.tensor == Fp8Tensor::kDv;
      CHECK(row.format == (of_backward && !blocks ? Dtype::kE5M2 : Dtype::kE4M3));
    }
    for (const Fp8Row& row : Fp8TableOf(recipe, false))
      CHECK((row.readers & ~(kForwardPass | kForCaller)) == 0);
  }
}

TEST_CASE("every recipe of fp8 with every schedule") {
  HostWorld world(4);
  WithEverySchedule(world, Recipes(), [](AttentionSpec&) {});
}

TEST_CASE("fp8 with every format, mask and feature") {
  HostWorld world(2);
  WithEverySchedule(world, kFullRecipes, [](AttentionSpec& spec) {
    spec.format = QkvFormat::kSbhd;
    spec.mask = AttnMaskType::kNoMask;
    spec.dim_qk = 192;
    spec.dim_v = 128;
    spec.seqlen_kv = 2 * spec.seqlen_q;
  });
  WithEverySchedule(world, kFullRecipes, [](AttentionSpec& spec) {
    spec.format = QkvFormat::kThd;
    spec.pad_between_seqs = true;
    spec.mask = AttnMaskType::kPaddingCausal;
    spec.batch = 5;
    spec.softmax = SoftmaxType::kLearnable;
    spec.max_logit = true;
    spec.kv_heads = 1;  // replicated by an exchange of heads
  });
  WithEverySchedule(world, kFullRecipes, [](AttentionSpec& spec) {
    spec.bias = BiasType::kPostScale;
    spec.bias_shape = {false, true, true};
    spec.window_left = 40;
    spec.softmax = SoftmaxType::kOffByOne;
    spec.deterministic = true;
  });
  WithEverySchedule(world, kFullRecipes, [](AttentionSpec& spec) {
    spec.training = false;
    spec.bias = BiasType::kAlibi;
    spec.mask = AttnMaskType::kCausalBottomRight;
  });
}

TEST_CASE("fp8 where ranks do not see all blocks of keys, which then do not move") {
  HostWorld world(4);
  for (const bool training : {true, false}) {
    WithEverySchedule(world, kFullRecipes, [&](AttentionSpec& spec) {
      spec.window_left = spec.seqlen_q / 6;
      spec.training = training;
    });
  }
}

TEST_CASE("The backward passes with and without CP have the same delta") {
  HostWorld world(2);
  // Their outs are rounded independently. What is left between 16-bit backward passes is the order of sums.
  const AttentionSpec spec = Case(2, CpCommType::kP2p, {ScalingMode::kDelayed, true, false, false, false});
  int judged = 0;
  for (const Finding& f : world.Run(spec)) {
    if (f.against != "no_cp" || (f.tensor != CheckedTensor::kDq && f.tensor != CheckedTensor::kDk)) continue;
    INFO(TextOf(f));
    ++judged;
    CHECK(f.verdict.rel_err < 1e-3);
  }
  CHECK(judged == 4);
}

TEST_CASE("fp8 where each query sees one key, and dS is the rounding of O alone") {
  HostWorld world(2);
  WithEverySchedule(world, Recipes(), [](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kCausal;
    spec.window_left = spec.window_right = 0;
  });
}

// Values in [-1, 1], times a factor for each element.
class Scaled : public TensorSource {
 public:
  using Factor = std::function<double(InputTensor, std::int64_t row, std::int64_t column)>;
  explicit Scaled(Factor factor) : factor_(std::move(factor)) {}
  void ReadRow(const TensorInfo& tensor, std::int64_t row, double* to) override {
    const auto kind = std::get<InputTensor>(tensor.kind);
    for (std::int64_t i = 0; i < tensor.columns; ++i) {
      const std::uint64_t bits = ((static_cast<std::uint64_t>(kind) << 40 |
                                   static_cast<std::uint64_t>(row) << 16 | static_cast<std::uint64_t>(i)) +
                                  1) *
                                 0x9E3779B97F4A7C15u;
      to[i] = (static_cast<double>(bits >> 11) * 0x1p-52 - 1) * factor_(kind, row, i);
    }
  }

 private:
  Factor factor_;
};

TEST_CASE("fp8 of zeros, of the largest and the smallest numbers, and of blocks of them") {
  HostWorld world(2);
  const std::map<std::string, Scaled::Factor> all = {
      {"zeros", [](InputTensor, std::int64_t, std::int64_t) { return 0.0; }},
      {"dout of zeros",
       [](InputTensor tensor, auto, auto) { return tensor == InputTensor::kDout ? 0.0 : 1.0; }},
      {"values of 2^100",
       [](InputTensor tensor, auto, auto) { return tensor == InputTensor::kV ? 0x1p100 : 1.0; }},
      {"all of 2^-128", [](InputTensor, auto, auto) { return 0x1p-128; }},
      {"blocks of zeros and of 2^-124",
       [](InputTensor, std::int64_t row, std::int64_t column) {
         return row / 32 % 3 == 0 ? 0.0 : column / 32 % 2 == 0 ? 0x1p-124 : 1.0;
       }},
      {"one number beyond all others", [](InputTensor, std::int64_t row, std::int64_t column) {
         return row == 5 && column == 3 ? 0x1p40 : 1.0;
       }}};
  for (const auto& [name, factor] : all) {
    INFO(name);
    Scaled source(factor);
    for (const Fp8Recipe& recipe : kFullRecipes) {
      RequireAllHold(world, Case(2, CpCommType::kP2p, recipe), &source);
      RequireAllHold(world, Case(2, CpCommType::kAllGather, recipe), &source);
    }
  }
}

// With 65,536 elements on a rank, in short sequences. The verdicts hold, whatever the seed.
void FortySeeds(HostWorld& world, AttentionSpec spec, std::int64_t batch, std::int64_t queries,
                std::int64_t keys) {
  spec.heads = spec.kv_heads = 16;
  spec.batch = batch;
  spec.seqlen_q = queries;
  spec.seqlen_kv = keys;
  for (spec.seed = 1; spec.seed <= 40; ++spec.seed) {
    int failed = 0;
    for (const Finding& f : world.Run(spec)) {
      INFO("seed " << spec.seed << ": " << TextOf(f));
      CHECK(f.verdict.ok);
      failed += f.verdict.ok ? 0 : 1;
    }
    if (failed) break;
  }
}

TEST_CASE("fp8 with a window that leaves one key: statistics do not judge a dq that is noise") {
  HostWorld world(1);
  AttentionSpec spec = Case(1, CpCommType::kP2p, {ScalingMode::kDelayed, true, false, true, false});
  spec.mask = AttnMaskType::kCausal;
  spec.window_left = spec.window_right = 0;
  FortySeeds(world, spec, 4, 16, 16);
}

TEST_CASE("fp8 with two keys in a block of a ring: half of P is exact") {
  HostWorld world(2);
  AttentionSpec spec = Case(2, CpCommType::kP2p, {ScalingMode::kCurrent, true, false, true, true});
  spec.mask = AttnMaskType::kNoMask;
  FortySeeds(world, spec, 4, 32, 4);
}

TEST_CASE("fp8 with enough elements for statistics") {
  HostWorld world(2);
  int large = 0;
  for (const Fp8Recipe& recipe : kFullRecipes) {
    AttentionSpec spec = Case(2, CpCommType::kP2p, recipe);
    spec.seqlen_q = spec.seqlen_kv = 128;  // in more sequences and heads the oracle affords more elements
    spec.heads = spec.kv_heads = 16;
    spec.batch = 4;
    spec.mask = AttnMaskType::kNoMask;
    for (const Finding& f : world.Run(spec)) {
      INFO(TextOf(recipe) << ": " << TextOf(f));
      CHECK(f.verdict.ok);
      if (f.against != "oracle" || f.verdict.ratio == 0 || f.tensor == CheckedTensor::kLse) continue;
      ++large;
      CHECK(f.verdict.ratio > 0.7);
      CHECK(f.verdict.ratio < 1.25);
    }
  }
  CHECK(large == 24);  // out, dq, dk and dv of each rank
}

}  // namespace cppool::test
