// A kernel that knows rectangular calls alone, under every schedule: masks, windows, packed and padded sequences, GQA,
// softmax offsets; however its lse, its results and what it takes are limited.
#include <cstdint>
#include <functional>
#include <string>

#include "kernels/attention/families/table/family.h"
#include "kernels/attention/schedule.h"
#include "kernels/error.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/table/test_kernel.h"
#include "tests/kernels/attention/schedules/host_world.h"

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

void WithEverySchedule(HostWorld& world, const std::function<void(AttentionSpec&)>& vary) {
  for (const CpCommType comm : kComms) {
    if (!Possible(comm, world.size())) continue;
    AttentionSpec spec = Small(world.size(), comm);
    vary(spec);
    world.RequireAllHold(spec);
  }
}

void RunCausal(HostWorld& world) {
  const int size = world.size();
  WithEverySchedule(world, [](AttentionSpec&) {});
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kNoMask;
    spec.kv_heads = 2;
    spec.dtypes = TensorDtypes(Dtype::kFp16);
    spec.dim_qk = 128;
    spec.seqlen_q = 6 * size;
    spec.seqlen_kv = 10 * size;
  });
  WithEverySchedule(world, [](AttentionSpec& spec) {
    spec.format = QkvFormat::kThd;
    spec.pad_between_seqs = true;
    spec.batch = 5;
    spec.mask = AttnMaskType::kPaddingCausal;
    spec.softmax = SoftmaxType::kLearnable;
    spec.kv_heads = 2;
  });
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kCausalBottomRight;  // rows that see no key
    spec.seqlen_q = 18 * size;
    spec.seqlen_kv = 4 * size;
    spec.softmax = SoftmaxType::kOffByOne;
  });
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kCausalBottomRight;
    spec.seqlen_q = 4 * size;
    spec.seqlen_kv = 10 * size;
    spec.format = QkvFormat::kSbhd;
    spec.training = false;
  });
}

void RunWindows(HostWorld& world) {
  WithEverySchedule(world, [](AttentionSpec& spec) {
    spec.window_left = 5;
    spec.kv_heads = 1;
    spec.format = QkvFormat::kSbhd;
  });
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kPadding;
    spec.window_left = 7;
    spec.window_right = 3;
    spec.seqlen_q = 10 * world.size();
    spec.seqlen_kv = 6 * world.size();
    spec.batch = 3;
  });
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
  CHECK_THAT(deterministic.Refusal(request).value_or(""), ContainsSubstring("bias"));
}

TEST_CASE("a call counts few kernels: one for each step of a causal ring") {
  const TableFamily family(TestKernel(0, {}));
  HostWorld world(4);
  world.UseFamily(family);
  AttentionSpec spec = Small(4, CpCommType::kP2p);
  spec.training = false;
  world.Run(spec);
  // Two iterations and three trials of 4 ranks with 4 steps, and the run without CP on each rank.
  CHECK(TestKernelCalls() == 5 * 4 * 4 + 4);
}

TEST_CASE("what a kernel fails with is told with its name and the call") {
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
