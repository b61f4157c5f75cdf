// A kernel that knows rectangular calls alone, under every schedule: masks, windows, packed and padded
// sequences, GQA, softmax offsets; however its lse, its results and what it takes are limited.
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/attention/families/table/family.h"
#include "kernels/attention/schedule.h"
#include "kernels/error.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/table/test_kernel.h"
#include "tests/kernels/attention/schedules/host_world.h"
#include "tests/kernels/attention/schedules/variations.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;
using Catch::Matchers::ContainsSubstring;
using cppool::kernels::table::TableFamily;

std::string FullOrSquare(const cppool_attention_call& call) {
  if (call.window_left == -1 && call.window_right == -1) return "";
  const bool square = call.seqlen_q == call.seqlen_kv && call.window_left == -1 && call.window_right == 0;
  return square ? "" : "only no mask and square causal ones";
}

// cuDNN's rule.
std::string BottomRightOfWide(const cppool_attention_call& call) {
  if (call.window_left == -1 && call.window_right == -1) return "";
  if (call.seqlen_q > call.seqlen_kv) return "no more queries than keys";
  const bool square = call.seqlen_q == call.seqlen_kv;
  return square || call.anchor == CPPOOL_BOTTOM_RIGHT ? "" : "the anchor is the bottom right";
}

void RunCausal(HostWorld& world) {
  const int size = world.size();
  WithEverySchedule(world, [](AttentionSpec&) {});
  WithEverySchedule(world, [&](AttentionSpec& spec) { UnequalGqa(spec, size); });
  WithEverySchedule(world, PackedAndPadded);
  WithEverySchedule(world, [&](AttentionSpec& spec) { BlindQueries(spec, size); });
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kCausalBottomRight;
    spec.seqlen_q = 4 * size;
    spec.seqlen_kv = 10 * size;
    spec.format = QkvFormat::kSbhd;
    spec.training = false;
  });
}

void RunWindows(HostWorld& world) {
  WithEverySchedule(world, NarrowWindow);
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kPadding;
    spec.window_left = 7;
    spec.window_right = 3;
    spec.seqlen_q = 10 * world.size();
    spec.seqlen_kv = 6 * world.size();
    spec.batch = 3;
  });
}

// Every tensor of cppool/attention.h, in the shapes that the cases have.
constexpr std::uint32_t kEverything =
    CPPOOL_ATTENTION_BIAS | CPPOOL_ATTENTION_ALIBI | CPPOOL_ATTENTION_MAX_LOGIT | CPPOOL_ATTENTION_VARLEN;

// Smaller ones, for kernels in fp64.
void Shrink(const HostWorld& world, AttentionSpec& spec) {
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.seqlen_q = spec.seqlen_kv = 4 * world.size();
}

// An exchange of heads over 4 ranks then gives one of them heads of two key/value heads, unequally many of
// each.
void CutThroughGroups(AttentionSpec& spec) {
  spec.heads = 12;
  spec.kv_heads = 3;
}

void RunBias(HostWorld& world) {
  const std::pair<BiasShape, QkvFormat> kinds[] = {{{false, true, true}, QkvFormat::kBshd},
                                                   {{true, true, true}, QkvFormat::kThd},
                                                   {{true, false, true}, QkvFormat::kSbhd},
                                                   {{false, false, true}, QkvFormat::kThd},
                                                   {{false, false, false}, QkvFormat::kBshd}};
  for (const auto& [shape, format] : kinds) {
    WithEverySchedule(world, [&](AttentionSpec& spec) {
      Shrink(world, spec);
      spec.bias = BiasType::kPostScale;
      spec.bias_shape = shape;
      spec.format = format;
      spec.mask = AttnMaskType::kPaddingCausal;
      spec.softmax = SoftmaxType::kLearnable;
      spec.max_logit = true;
    });
  }
}

// The first and the third sequence are in one call, and so are their biases.
void RunBiasOfEveryOtherSequence(HostWorld& world) {
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    Shrink(world, spec);
    CutThroughGroups(spec);
    spec.batch = 3;
    spec.format = QkvFormat::kThd;
    spec.pad_between_seqs = true;
    spec.mask = AttnMaskType::kPaddingCausal;
    spec.bias = BiasType::kPostScale;
    spec.bias_shape = {true, true, true};
    spec.queries = UniformSequences(spec.batch, spec.seqlen_q);
    spec.queries.length[1] -= 3;
    spec.keys = spec.queries;
  });
}

void RunAlibi(HostWorld& world) {
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    Shrink(world, spec);
    spec.bias = BiasType::kAlibi;
  });
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    Shrink(world, spec);
    CutThroughGroups(spec);
    spec.bias = BiasType::kAlibi;
    spec.mask = AttnMaskType::kPadding;  // distances to both sides, from the bottom right
    spec.window_left = 6;
    spec.window_right = 4;
    spec.format = QkvFormat::kThd;
    spec.seqlen_kv = 6 * world.size();
  });
}

// Packed sequences of different lengths, with rows of padding and without.
void RunPacked(HostWorld& world) {
  for (const bool padded : {false, true}) {
    WithEverySchedule(world, [&](AttentionSpec& spec) {
      Shrink(world, spec);
      spec.format = QkvFormat::kThd;
      spec.pad_between_seqs = padded;
      spec.batch = 5;
      spec.mask = padded ? AttnMaskType::kPaddingCausalBottomRight : AttnMaskType::kPaddingCausal;
      spec.window_left = padded ? 3 : -1;
      if (padded) spec.seqlen_kv = 6 * world.size();
      spec.max_logit = true;
    });
  }
}

// Those with scales of tensors.
constexpr Fp8Recipe kRecipes[] = {
    {ScalingMode::kDelayed, true, false, true, false}, {ScalingMode::kDelayed, true, true, true, false},
    {ScalingMode::kDelayed, true, true, false, false}, {ScalingMode::kCurrent, true, false, true, false},
    {ScalingMode::kCurrent, true, true, true, true},   {ScalingMode::kCurrent, true, false, false, true}};

AttentionSpec Fp8Case(int world, CpCommType comm, const Fp8Recipe& recipe) {
  AttentionSpec spec = Small(world, comm);
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.fp8 = recipe;
  return spec;
}

// How many checks of the case fail; each tensor that is quantized was compared bit by bit.
int WrongChecks(HostWorld& world, const AttentionSpec& spec) {
  int wrong = 0, bits = 0;
  for (const Finding& finding : world.Run(spec)) {
    wrong += !finding.verdict.ok;
    bits += finding.against == "bits";
    UNSCOPED_INFO(NameOf(finding.tensor) << " against " << finding.against << ": " << finding.verdict.ok);
  }
  CHECK(bits >= 4 * world.size());
  return wrong;
}

std::string ErrorOf(HostWorld& world, const AttentionSpec& spec, cppool_status status) {
  try {
    world.Run(spec);
  } catch (const RuntimeError& error) {
    CHECK(error.status() == status);
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("a kernel of rectangular calls runs every schedule") {
  const TableFamily family(TestKernel(0, {.workspace_bytes = 300}));
  HostWorld world(GENERATE(1, 2, 4, 8));
  world.UseFamily(family);
  RunCausal(world);
  if (world.size() < 8) RunWindows(world);
}

TEST_CASE("a kernel with an lse of its own, and one that writes fp32, run every schedule") {
  constexpr std::uint32_t kFeatures[] = {CPPOOL_ATTENTION_LSE_BASE2, CPPOOL_ATTENTION_LSE_HEADS_FIRST,
                                         CPPOOL_ATTENTION_LSE_BASE2 | CPPOOL_ATTENTION_LSE_HEADS_FIRST,
                                         CPPOOL_ATTENTION_FP32_RESULTS};
  const TableFamily family(TestKernel(kFeatures[GENERATE(0, 1, 2, 3)], {}));
  HostWorld world(2);
  world.UseFamily(family);
  RunCausal(world);
  RunWindows(world);
}

TEST_CASE("a kernel with a bias, ALiBi, max_logit and packed sequences runs every schedule") {
  const TableFamily family(TestKernel(kEverything, {.workspace_bytes = 300}));
  HostWorld world(GENERATE(1, 4));
  world.UseFamily(family);
  RunBias(world);
  RunBiasOfEveryOtherSequence(world);
  RunAlibi(world);
  RunPacked(world);
}

TEST_CASE("a bias, ALiBi, max_logit and packed sequences of a kernel with results of its own") {
  constexpr std::uint32_t kFeatures[] = {CPPOOL_ATTENTION_LSE_BASE2 | CPPOOL_ATTENTION_LSE_HEADS_FIRST,
                                         CPPOOL_ATTENTION_FP32_RESULTS};
  const TableFamily family(TestKernel(kEverything | kFeatures[GENERATE(0, 1)], {}));
  HostWorld world(2);
  world.UseFamily(family);
  RunBias(world);
  RunAlibi(world);
  RunPacked(world);
}

TEST_CASE("a kernel that takes fp8 runs every schedule with scales of tensors") {
  constexpr std::uint32_t kFeatures[] = {0, CPPOOL_ATTENTION_LSE_BASE2 | CPPOOL_ATTENTION_LSE_HEADS_FIRST,
                                         CPPOOL_ATTENTION_FP32_RESULTS,
                                         CPPOOL_ATTENTION_FP32_RESULTS | CPPOOL_ATTENTION_FP8_OUT};
  const int variant = GENERATE(0, 1, 2, 3);
  const TableFamily family(TestKernel(CPPOOL_ATTENTION_FP8 | kEverything | kFeatures[variant], {}));
  HostWorld world(variant == 0 ? 4 : 2);
  world.UseFamily(family);
  for (const Fp8Recipe& recipe : kRecipes) {
    for (const CpCommType comm : kComms) {
      if (!Possible(comm, world.size())) continue;
      AttentionSpec spec = Fp8Case(world.size(), comm, recipe);
      spec.dim_qk = 32;
      spec.dim_v = 16;
      if (variant == 1) {
        spec.format = QkvFormat::kThd;
        spec.mask = AttnMaskType::kPaddingCausal;
        spec.pad_between_seqs = true;
        spec.bias = BiasType::kPostScale;
        spec.bias_shape = {false, true, true};
      }
      if (variant == 2) NarrowWindow(spec);
      INFO(Describe(spec));
      if (variant == 3 && recipe.scaling_mode == ScalingMode::kCurrent && !recipe.mha) {
        CHECK_THAT(family.Refusal(RequestOf(spec)).value_or(""), ContainsSubstring("writes out in e4m3"));
        continue;
      }
      CHECK(WrongChecks(world, spec) == 0);
    }
  }
}

TEST_CASE("fp8 that a kernel of the table gets wrong is seen, and what it lacks is a reason") {
  HostWorld world(2);
  AttentionSpec spec = Fp8Case(2, CpCommType::kP2p, kRecipes[3]);
  spec.training = false;
  {
    const TableFamily family(TestKernel(CPPOOL_ATTENTION_FP8, {.fault = Behaviour::Fault::kNoScale}));
    world.UseFamily(family);
    CHECK(WrongChecks(world, spec) > 0);
  }
  {
    const TableFamily family(TestKernel(CPPOOL_ATTENTION_FP8 | CPPOOL_ATTENTION_FP8_OUT,
                                        {.fault = Behaviour::Fault::kNoOutScale}));
    world.UseFamily(family);
    AttentionSpec delayed = spec;
    delayed.fp8 = kRecipes[0];
    CHECK(WrongChecks(world, delayed) > 0);
  }
  {
    // Within the bounds: that a cast was left out shows in the statistics of 65,536 elements on a rank.
    const TableFamily family(TestKernel(CPPOOL_ATTENTION_FP8, {.fault = Behaviour::Fault::kPStays}));
    HostWorld one(1);
    one.UseFamily(family);
    spec.seqlen_q = spec.seqlen_kv = 128;
    CHECK(WrongChecks(one, spec) > 0);
  }
  const TableFamily without(TestKernel(0, {}));
  CHECK(without.Refusal(RequestOf(spec)) == "planted: it does not claim fp8 (CPPOOL_ATTENTION_FP8)");
  const TableFamily family(TestKernel(CPPOOL_ATTENTION_FP8, {}));
  CHECK_FALSE(family.Refusal(RequestOf(spec)));
  spec.fp8 = Fp8Recipe{ScalingMode::kMxfp8, true, false, true, true};
  CHECK_THAT(family.Refusal(RequestOf(spec)).value_or(""), ContainsSubstring("no scales of blocks"));
}

TEST_CASE("what a family says of its sums of payloads is the limit on lse") {
  class Summing : public TableFamily {
   public:
    Summing(const cppool_attention_kernel& kernel, int keys) : TableFamily(kernel), keys_(keys) {}
    Capabilities capabilities(const KernelRequest& request) const override {
      Capabilities can = TableFamily::capabilities(request);
      can.fp8_sum_keys = keys_;
      return can;
    }

   private:
    int keys_;
  };
  const cppool_attention_kernel& kernel =
      TestKernel(CPPOOL_ATTENTION_FP8, {.fault = Behaviour::Fault::kLseOfPayloads});
  AttentionSpec spec = Fp8Case(1, CpCommType::kP2p, kRecipes[3]);
  spec.training = false;
  HostWorld world(1);
  const Summing in_fp32(kernel, 0), in_payloads(kernel, 128);
  world.UseFamily(in_fp32);
  CHECK(WrongChecks(world, spec) > 0);
  world.UseFamily(in_payloads);
  CHECK(WrongChecks(world, spec) == 0);

  const auto keys_of = [&](const char* backend, const std::optional<Fp8Recipe>& recipe) {
    cppool_attention_kernel there = kernel;
    there.backend = backend;
    AttentionSpec of = spec;
    of.fp8 = recipe;
    return TableFamily(there).capabilities(RequestOf(of)).fp8_sum_keys;
  };
  CHECK(keys_of("host", kRecipes[3]) == 0);
  CHECK(keys_of("cuda", kRecipes[3]) == Capabilities::kAllKeys);
  CHECK(keys_of("cuda", std::nullopt) == 0);
}

TEST_CASE("a kernel that knows ALiBi's distance from one corner alone is skipped where that is not enough") {
  const auto own_corner = [](const cppool_attention_call& call) {
    return std::string(call.alibi_diagonal == call.seqlen_kv - call.seqlen_q ? "" : "not from there");
  };
  const TableFamily family(TestKernel(CPPOOL_ATTENTION_ALIBI, {.refuse = own_corner}));
  AttentionSpec spec = Small(1, CpCommType::kP2p);
  spec.bias = BiasType::kAlibi;
  DrawSequences(spec, 1);
  CHECK_FALSE(ScheduleRefusal(family, spec, 1));
  spec.queries = spec.keys = {};
  DrawSequences(spec, 2);
  CHECK(ScheduleRefusal(family, spec, 2) == "planted: not from there");
}

TEST_CASE("a step of a causal ring is one call, also of packed sequences of different lengths") {
  const int size = GENERATE(2, 4);
  const TableFamily family(TestKernel(size == 2 ? CPPOOL_ATTENTION_VARLEN : 0, {}));
  HostWorld world(size);
  world.UseFamily(family);
  AttentionSpec spec = Small(size, CpCommType::kP2p);
  spec.training = false;
  if (size == 2) {
    spec.format = QkvFormat::kThd;
    spec.mask = AttnMaskType::kPaddingCausal;
    spec.batch = 6;
  }
  world.Run(spec);
  // Two iterations and three trials of the ranks with a step each per rank, and the run without CP on each
  // rank.
  CHECK(TestKernelCalls() == 5 * size * size + size);
}

TEST_CASE("a kernel with few masks gets calls that it takes") {
  HostWorld world(2);
  {
    const TableFamily family(TestKernel(0, {.refuse = FullOrSquare}));
    world.UseFamily(family);
    RunCausal(world);
  }
  {
    const TableFamily family(TestKernel(0, {.refuse = BottomRightOfWide}));
    world.UseFamily(family);
    RunCausal(world);
    RunWindows(world);
  }
}

TEST_CASE("a kernel under random delays") {
  const TableFamily family(TestKernel(0, {}));
  HostWorld world(4);
  world.UseFamily(family);
  world.Perturb(5);
  WithEverySchedule(world, [](AttentionSpec& spec) { spec.softmax = SoftmaxType::kLearnable; });
}

TEST_CASE("what a kernel does not take is known before it runs, with its reason") {
  AttentionSpec spec = Small(2, CpCommType::kP2p);
  DrawSequences(spec, 2);
  const auto refusal = [&] {
    const TableFamily family(TestKernel(0, {.refuse = FullOrSquare}));
    return ScheduleRefusal(family, spec, 2).value_or("");
  };
  CHECK(refusal() == "");
  spec.window_left = 5;
  CHECK(refusal() == "planted: only no mask and square causal ones");
  const TableFamily forward_only(TestKernel(0, {}, false));
  KernelRequest request = RequestOf(spec);
  CHECK_THAT(forward_only.Refusal(request).value_or(""),
             ContainsSubstring("planted: it has no backward pass"));
  request.training = false;
  CHECK_FALSE(forward_only.Refusal(request));
  request.deterministic = true;
  CHECK_THAT(forward_only.Refusal(request).value_or(""), ContainsSubstring("deterministic"));
  const TableFamily deterministic(TestKernel(CPPOOL_ATTENTION_DETERMINISTIC, {}));
  CHECK_FALSE(deterministic.Refusal(request));
  request.bias = BiasType::kAlibi;
  CHECK_THAT(deterministic.Refusal(request).value_or(""), ContainsSubstring("CPPOOL_ATTENTION_ALIBI"));
  request.bias = BiasType::kPostScale;
  CHECK_THAT(deterministic.Refusal(request).value_or(""), ContainsSubstring("CPPOOL_ATTENTION_BIAS"));
  request.bias = BiasType::kNone;
  request.max_logit = true;
  CHECK_THAT(deterministic.Refusal(request).value_or(""), ContainsSubstring("CPPOOL_ATTENTION_MAX_LOGIT"));
  const TableFamily everything(TestKernel(kEverything | CPPOOL_ATTENTION_DETERMINISTIC, {}));
  CHECK_FALSE(everything.Refusal(request));
}

TEST_CASE("a kernel whose supports fails or throws is an error, with the call") {
  AttentionSpec spec = Small(2, CpCommType::kP2p);
  DrawSequences(spec, 2);
  const auto error = [&](std::function<std::string(const cppool_attention_call&)> refuse) -> std::string {
    const TableFamily family(TestKernel(0, {.refuse = std::move(refuse)}));
    try {
      return "refused: " + ScheduleRefusal(family, spec, 2).value_or("");
    } catch (const RuntimeError& failed) {
      CHECK(failed.status() == CPPOOL_INTERNAL);
      return failed.what();
    }
  };
  CHECK_THAT(error([](const auto&) -> std::string { throw std::runtime_error("out of ideas"); }),
             ContainsSubstring("kernel planted, supports: threw out of ideas (forward: batch "));
  CHECK_THAT(
      error([](const auto&) -> std::string { throw 7; }),
      ContainsSubstring("kernel planted, supports: threw something that is not a std::exception (forward"));
}

TEST_CASE("the floating-point environment that a kernel changes ends with each of its functions") {
  std::atomic<int> found{0};
  const TableFamily family(TestKernel(0, {.in_each = [&] {
                                        found += std::fegetround() != FE_TONEAREST || fegetexcept() != 0;
                                        std::fesetround(FE_DOWNWARD);
                                        feenableexcept(FE_DIVBYZERO);
                                      }}));
  HostWorld world(2);
  world.UseFamily(family);
  world.Run(Small(2, CpCommType::kP2p));
  CHECK(found == 0);
}

TEST_CASE("the error of a kernel has its name and the call") {
  HostWorld world(1);  // others would say that they were stopped
  const AttentionSpec spec = Small(1, CpCommType::kP2p);
  const auto error = [&](Behaviour behaviour, cppool_status status) {
    const TableFamily family(TestKernel(0, std::move(behaviour)));
    world.UseFamily(family);
    return ErrorOf(world, spec, status);
  };
  CHECK_THAT(error({.fault = Behaviour::Fault::kFails}, CPPOOL_CUDA),
             ContainsSubstring("kernel planted, forward: cannot today (forward: batch 2, "));
  CHECK_THAT(error({.fault = Behaviour::Fault::kThrows}, CPPOOL_INTERNAL),
             ContainsSubstring("kernel planted, forward: threw out of ideas"));
  CHECK_THAT(error({.fault = Behaviour::Fault::kFailsBackward}, CPPOOL_INTERNAL),
             ContainsSubstring("kernel planted, backward: cannot today"));
  CHECK_THAT(error({.refuse_in_prepare = true}, CPPOOL_UNSUPPORTED),
             ContainsSubstring("kernel planted, prepare: not on this device"));
  CHECK_THAT(error({.workspace_bytes = std::size_t{1} << 60}, CPPOOL_OUT_OF_MEMORY),
             ContainsSubstring("kernel planted asks for 1152921504606846976 bytes of workspace"));
}
