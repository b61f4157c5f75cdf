// Compares the declared memory of a schedule with its allocations.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>

#include "kernels/attention/schedule.h"
#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"
#include "tests/kernels/attention/schedules/limited_family.h"
#include "tests/kernels/runtime/host/world.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

std::array<std::size_t, 8> allocated;  // by rank
std::atomic<decltype(cppool_runtime::alloc)> original_alloc;

// The bytes that a rank allocates for the schedule; the maximum over ranks.
std::size_t Allocated(World& world, const AttentionFamily& family, const AttentionSpec& spec) {
  allocated = {};
  world.Case([&](cppool_runtime* rt) {
    cppool_runtime seam = *rt;
    original_alloc = seam.alloc;
    seam.alloc = [](cppool_runtime* self, std::size_t bytes, cppool_stream stream, void** out) {
      allocated[static_cast<std::size_t>(self->rank)] += bytes;
      return original_alloc.load()(self, bytes, stream, out);
    };
    RankKernels kernels(&seam, family);
    const auto schedule = MakeSchedule(&seam, kernels, spec);
    Sync(rt);
  });
  return *std::max_element(allocated.begin(), allocated.end());
}

// The host's tables are not in device memory, so the allocated bytes must equal the declared buffers.
void RequireExact(World& world, const AttentionFamily& family, const AttentionSpec& spec, int size) {
  const auto actual = static_cast<double>(Allocated(world, family, spec));
  const MemoryUse declared = ScheduleMemory(family, spec, size);
  INFO(Describe(spec) << " on " << size << " ranks, family " << family.name() << ": " << actual
                      << " allocated, " << declared.buffers << " declared");
  CHECK(actual == declared.buffers);
  CHECK(declared.tables > 0);
}

TEST_CASE("a schedule allocates exactly the memory that it declares") {
  const int size = GENERATE(1, 2, 4, 8);
  const int a2a_size = GENERATE(2, 4);
  if (a2a_size > 2 && size != 8) return;
  World world(size);
  const AttentionFamily& host = *AttentionFamilies("host").front();
  const LimitedFamily limited{Capabilities{}};
  for (const CpCommType comm : kComms) {
    if (!Possible(comm, size) || (a2a_size > 2 && comm != CpCommType::kA2aP2p)) continue;
    for (const int kv_heads : {8, 2, 1}) {
      for (const bool training : {true, false}) {
        for (const BiasShape& shape : {BiasShape{true, true, true}, BiasShape{false, false, false}}) {
          AttentionSpec spec = Small(size, comm);
          spec.a2a_size = a2a_size;
          spec.dim_qk = 192;
          spec.dim_v = 128;
          spec.kv_heads = kv_heads;
          spec.training = training;
          spec.bias = BiasType::kPostScale;
          spec.bias_shape = shape;
          spec.softmax = SoftmaxType::kLearnable;
          spec.mask = AttnMaskType::kNoMask;
          DrawSequences(spec, size);
          RequireExact(world, host, spec, size);
          RequireExact(world, limited, spec, size);
          spec.launches = Launches::kOne;
          if (!WhyNotOneLaunch(host, spec)) RequireExact(world, host, spec, size);
        }
      }
    }
    // Masks with which some steps of the ring have no work, and ALiBi's slopes.
    AttentionSpec spec = Small(size, comm);
    spec.bias = BiasType::kAlibi;
    spec.seqlen_q = spec.seqlen_kv = 32 * size;
    spec.window_left = 3;
    DrawSequences(spec, size);
    RequireExact(world, host, spec, size);
    spec.format = QkvFormat::kThd;
    spec.mask = AttnMaskType::kPaddingCausal;
    spec.pad_between_seqs = true;
    DrawSequences(spec, size);
    RequireExact(world, host, spec, size);
    RequireExact(world, limited, spec, size);
  }
}

}  // namespace
