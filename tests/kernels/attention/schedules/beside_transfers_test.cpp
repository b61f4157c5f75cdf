// Which calls of a schedule leave multiprocessors to the kernels of a communicator: those under which the
// ring's keys, values and gradients move, where the transport moves them by kernels. And which run on a
// second stream.
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/schedule.h"
#include "kernels/attention/schedules/head_ring_use.h"
#include "kernels/attention/tensors/tensor_set.h"
#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"
#include "tests/kernels/attention/schedules/limited_family.h"
#include "tests/kernels/runtime/host/world.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

using Told =
    std::array<std::string, 8>;  // by rank: of each call '+' beside transfers, '2' on a second stream, or '.'

class TellingKernel : public AttentionKernel {
 public:
  TellingKernel(std::unique_ptr<AttentionKernel> kernel, cppool_stream main, std::string& told)
      : kernel_(std::move(kernel)), main_(main), told_(told) {}
  void Load(const KernelRequest& request) override { kernel_->Load(request); }
  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream stream) override {
    return kernel_->Plan(request, query, key, bands, stream);
  }
  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    told_ += args.beside_transfers ? '+' : '.';
    kernel_->Forward(shape, args, stream);
  }
  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    told_ += args.beside_transfers ? '+' : stream == main_ ? '.' : '2';
    kernel_->Backward(shape, args, stream);
  }
  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    kernel_->BackwardBias(shape, args, gradient, stream);
  }

 private:
  std::unique_ptr<AttentionKernel> kernel_;
  cppool_stream main_;
  std::string& told_;
};

class TellingFamily : public LimitedFamily {
 public:
  explicit TellingFamily(Told& told)
      : LimitedFamily([](const KernelRequest& request) {
          return AttentionFamilies("host").front()->capabilities(request);
        }),
        told_(told) {}
  std::unique_ptr<AttentionKernel> Open(cppool_runtime* rt) const override {
    return std::make_unique<TellingKernel>(LimitedFamily::Open(rt), rt->stream,
                                           told_[static_cast<std::size_t>(rt->rank)]);
  }

 private:
  Told& told_;
};

// What each rank's calls are told in a forward and a backward pass, as "calls/calls".
Told CallsOf(AttentionSpec spec, int size, const char* transport, bool reference = false) {
  DrawSequences(spec, size);
  Told told;
  const TellingFamily family(told);
  World world(size);
  world.Case([&](cppool_runtime* rt) {
    cppool_runtime seam = *rt;
    if (transport) seam.transport = transport;
    RankKernels kernels(&seam, family);
    const auto schedule =
        reference ? MakeNoCpSchedule(&seam, kernels, spec) : MakeSchedule(&seam, kernels, spec);
    const TensorSet tensors(&seam, spec, reference ? 1 : size);
    schedule->Forward(tensors.pointers());
    told[static_cast<std::size_t>(rt->rank)] += '/';
    schedule->Backward(tensors.pointers());
    Sync(rt);
  });
  return told;
}

void CheckAll(const Told& told, int size, const std::string& calls) {
  for (int rank = 0; rank < size; ++rank) {
    INFO("rank " << rank << " of " << size);
    CHECK(told[static_cast<std::size_t>(rank)] == calls);
  }
}

}  // namespace

TEST_CASE("calls under which a ring's keys and gradients move are told so") {
  const auto calls = [](CpCommType comm, int size) { return CallsOf(Small(size, comm), size, "nccl"); };
  // Own keys, others'; backward: later own keys, others', earlier own keys.
  CheckAll(calls(CpCommType::kP2p, 2), 2, "+./+.+");
  CheckAll(calls(CpCommType::kP2p, 4), 4, "+++./+++++");
  // Own keys, all others' at once.
  CheckAll(calls(CpCommType::kAllGather, 2), 2, "+./+.+");
  CheckAll(calls(CpCommType::kAllGather, 4), 4, "+./+++++");
  // The ring across two groups.
  CheckAll(calls(CpCommType::kA2aP2p, 4), 4, "+./+.+");
}

TEST_CASE("calls without transfers beside them may use the whole device") {
  CheckAll(CallsOf(Small(4, CpCommType::kA2a), 4, "nccl"), 4, "./.");
  for (const CpCommType comm : {CpCommType::kP2p, CpCommType::kAllGather}) {
    CheckAll(CallsOf(Small(2, comm), 2, "nccl", true), 2, "./.");  // the reference run
    for (const char* transport : {"peer", "host"})                 // these move by copies
      CheckAll(CallsOf(Small(2, comm), 2, transport), 2, "../.2.");
  }
  AttentionSpec one = Small(2, CpCommType::kP2p);
  one.launches = Launches::kOne;
  CheckAll(CallsOf(one, 2, nullptr), 2, "./.2.");
  // No rank sees another's keys.
  AttentionSpec narrow = Small(4, CpCommType::kP2p);
  narrow.window_left = 0;
  CheckAll(CallsOf(narrow, 4, "nccl"), 4, "./.");
}

TEST_CASE("every second call of a backward pass runs on a second stream, where sums need no order") {
  for (const CpCommType comm : {CpCommType::kP2p, CpCommType::kAllGather}) {
    const std::string forward = comm == CpCommType::kP2p ? "..../" : "../";
    AttentionSpec spec = Small(4, comm);
    CheckAll(CallsOf(spec, 4, nullptr), 4, forward + ".2.2.");
    spec.deterministic = true;
    CheckAll(CallsOf(spec, 4, nullptr), 4, forward + ".....");
    spec.deterministic = false;
    spec.bias = BiasType::kPostScale;
    CheckAll(CallsOf(spec, 4, nullptr), 4, forward + ".....");
  }
}

TEST_CASE("a rank that only gives its keys is told of them, too") {
  // The four keys are all on rank 0.
  AttentionSpec spec = Small(4, CpCommType::kP2p);
  spec.format = QkvFormat::kThd;
  spec.mask = AttnMaskType::kPadding;
  spec.pad_between_seqs = true;
  spec.batch = 1;
  spec.queries = {{32}, {32}, 32};
  spec.keys = {{4}, {32}, 32};
  Told told;
  const TellingFamily family(told);
  const RingSteps ring(spec, 1, 4);
  const HeadRingUse gives(spec, family, ring, 0, 0), takes(spec, family, ring, 0, 2);
  CHECK(gives.MovesUnderForward(0));
  CHECK(gives.MovesUnderBackward(0));
  CHECK(takes.MovesUnderForward(0));
  CHECK(takes.MovesUnderForward(1));
  CHECK_FALSE(takes.MovesUnderForward(2));
  CHECK_FALSE(takes.MovesUnderBackward(2));
}
