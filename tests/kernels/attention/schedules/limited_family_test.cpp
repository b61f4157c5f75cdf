// Every schedule with families that lack capabilities: the schedules then merge partial outputs, add the
// gradients of blocks, and compute dq, dk and dv in one call.
#include "tests/kernels/attention/schedules/limited_family.h"

#include <cstdint>
#include <functional>

#include "kernels/attention/schedules/head_ring_use.h"
#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"
#include "tests/kernels/attention/schedules/variations.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

constexpr Capabilities kNone{};
constexpr Capabilities kAll{.continues_softmax = true,
                            .gradients_apart = true,
                            .accumulates_gradients = true,
                            .splits_keys = true,
                            .overlapping_keys = 1};
constexpr Capabilities Without(bool Capabilities::*capability) {
  Capabilities can = kAll;
  can.*capability = false;
  return can;
}
constexpr Capabilities kAlmost[] = {
    Without(&Capabilities::continues_softmax), Without(&Capabilities::gradients_apart),
    Without(&Capabilities::accumulates_gradients), Without(&Capabilities::splits_keys)};

// Runs cases with GQA, windows, causal and no mask, unequal lengths, both dtypes, packed and padded
// sequences, a softmax offset, biases and max_logit.
void RunFeatures(HostWorld& world) {
  const int size = world.size();
  WithEverySchedule(world, [](AttentionSpec&) {});
  WithEverySchedule(world, [&](AttentionSpec& spec) { UnequalGqa(spec, size); });
  WithEverySchedule(world, NarrowWindow);
  WithEverySchedule(world, [](AttentionSpec& spec) {
    PackedAndPadded(spec);
    spec.max_logit = true;
  });
  WithEverySchedule(world, [&](AttentionSpec& spec) {
    BlindQueries(spec, size);
    spec.bias = BiasType::kAlibi;
  });
  WithEverySchedule(world, [](AttentionSpec& spec) {
    spec.bias = BiasType::kPostScale;
    spec.bias_shape = {false, true, true};
    spec.deterministic = true;
  });
  WithEverySchedule(world, [](AttentionSpec& spec) {
    spec.training = false;
    spec.softmax = SoftmaxType::kLearnable;
  });
}

}  // namespace

TEST_CASE("a family without any capability runs every schedule") {
  const LimitedFamily family(kNone);
  HostWorld world(GENERATE(1, 2, 4, 8));
  world.UseFamily(family);
  RunFeatures(world);
}

TEST_CASE("a family that lacks one capability runs every schedule") {
  const LimitedFamily family(kAlmost[GENERATE(0, 1, 2, 3)]);
  HostWorld world(GENERATE(2, 4));
  world.UseFamily(family);
  RunFeatures(world);
}

// As the family "sm90", which hands a bias to kernels of another family.
TEST_CASE("a family whose capabilities depend on the request runs every schedule by the request's") {
  constexpr Capabilities kWhole = Without(&Capabilities::splits_keys);
  const LimitedFamily family(
      [=](const KernelRequest& request) { return request.bias == BiasType::kNone ? kWhole : kAll; });
  HostWorld world(2);
  world.UseFamily(family);
  for (const BiasType bias : {BiasType::kNone, BiasType::kAlibi}) {
    CAPTURE(static_cast<int>(bias));
    AttentionSpec spec = Small(2, CpCommType::kAllGather);
    spec.bias = bias;
    const HeadRingUse use(spec, family, RingSteps(spec, 1, 2), 0, 0);
    CHECK(use.block.capabilities().splits_keys == (bias != BiasType::kNone));
  }
  RunFeatures(world);
}

TEST_CASE("a family without any capability gives right results under random delays") {
  const LimitedFamily family(kNone);
  HostWorld world(4);
  world.UseFamily(family);
  world.Perturb(5);
  WithEverySchedule(world, [](AttentionSpec& spec) {
    spec.softmax = SoftmaxType::kLearnable;
    spec.kv_heads = 2;
  });
}
