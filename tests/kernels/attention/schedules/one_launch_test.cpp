// The forward pass of a ring in one launch on the host runtime: every piece of keys and values comes under
// the kernel, with a flag of its own, and each output is what it is in steps.
#include <functional>
#include <utility>
#include <vector>

#include "kernels/attention/schedule.h"
#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"
#include "tests/kernels/attention/schedules/limited_family.h"
#include "tests/kernels/attention/schedules/variations.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

AttentionSpec One(int ranks, CpCommType comm) {
  AttentionSpec spec = Small(ranks, comm);
  spec.launches = Launches::kOne;
  return spec;
}

using Vary = std::function<void(AttentionSpec&, int ranks)>;
const std::vector<Vary> kVariations = {
    [](AttentionSpec&, int) {},
    [](AttentionSpec& spec, int) { spec.training = false; },
    [](AttentionSpec& spec, int) { spec.mask = AttnMaskType::kNoMask; },
    [](AttentionSpec& spec, int) { spec.heads = 9, spec.kv_heads = 9; },  // the last piece has fewer heads
    UnequalGqa,
    [](AttentionSpec& spec, int) { NarrowWindow(spec); },  // most steps have no work
    [](AttentionSpec& spec, int) { PackedAndPadded(spec); },
    BlindQueries,
    [](AttentionSpec& spec, int) { spec.dim_qk = 192, spec.dim_v = 128, spec.max_logit = true; },
    [](AttentionSpec& spec, int) { spec.bias = BiasType::kPostScale, spec.deterministic = true; },
};

}  // namespace

TEST_CASE("one launch has the results of the steps, in every format and mask") {
  HostWorld world(GENERATE(2, 4, 8));
  for (const CpCommType comm : {CpCommType::kP2p, CpCommType::kAllGather}) {
    for (const Vary& vary : kVariations) {
      AttentionSpec spec = One(world.size(), comm);
      vary(spec, world.size());
      world.RequireAllHold(spec);
    }
  }
}

TEST_CASE("one launch waits for every piece, however late it is") {
  HostWorld world(GENERATE(2, 4));
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    world.Perturb(seed);
    world.RequireAllHold(One(world.size(), CpCommType::kP2p));
  }
}

TEST_CASE("one launch is for rings of keys that kernels can take while they come") {
  const AttentionFamily& host = *AttentionFamilies("host").front();
  const auto why = [&](const AttentionFamily& family, const std::function<void(AttentionSpec&)>& change) {
    AttentionSpec spec = One(2, CpCommType::kP2p);
    change(spec);
    return WhyNotOneLaunch(family, spec).value_or("");
  };
  CHECK(why(host, [](AttentionSpec&) {}).empty());
  for (const CpCommType comm : {CpCommType::kA2a, CpCommType::kA2aP2p}) {
    CHECK(why(host, [&](AttentionSpec& spec) { spec.comm = comm; }) ==
          "it is for cp_comm_type 'p2p' and 'all_gather'");
  }
  CHECK(why(host, [](AttentionSpec& spec) { spec.transfers = Transfers::kComm; }) ==
        "keys then come by calls of the transport (transfers 'comm')");
  CHECK(why(LimitedFamily{Capabilities{}}, [](AttentionSpec&) {}) ==
        "the kernels 'limited' do not take keys that arrive while they run here");
  CHECK(why(host, [](AttentionSpec& spec) { spec.fp8.emplace(); }) != "");
}
