#include "kernels/attention/schedule.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "kernels/attention/schedules/fp8_schedule.h"
#include "kernels/attention/schedules/head_ring.h"
#include "kernels/backend.h"
#include "kernels/ring_transfers.h"
#include "kernels/runtime.h"

namespace cppool::kernels {
namespace {

MemoryUse UseOf(const MemoryList& list) { return {list.buffer_bytes(), list.table_bytes()}; }

MemoryUse HeadRingMemory(const AttentionFamily& family, const AttentionSpec& spec, const RingSteps& ring,
                         int a2a_rank, int position) {
  const HeadRingUse use(spec, family, ring, a2a_rank, position);
  HeadRingBuffers buffers;
  BlockBuffers block;
  WholeBuffers whole;
  MemoryList list;
  ListHeadRing(spec, use, buffers, block, whole, list);
  ListHeadRingPlans(spec, use, ring, position, list);
  Fp8Buffers fp8;
  if (spec.fp8) fp8.List(spec, ring.a2a_size * ring.ring_size, position * ring.a2a_size + a2a_rank, list);
  return UseOf(list);
}

std::optional<std::string> HeadRingRefusal(BlockAsker& asker, const AttentionFamily& family,
                                           const AttentionSpec& spec, const RingSteps& ring) {
  for (int position = 0; position < ring.ring_size; ++position) {
    for (int a2a_rank = 0; a2a_rank < ring.a2a_size; ++a2a_rank) {
      const HeadRingUse use(spec, family, ring, a2a_rank, position);
      for (const Layout& keys : KeysOfCalls(spec, use, ring, position)) {
        if (auto refusal = asker.Refusal(use.block.request, use.block.queries, keys, ring.bands))
          return refusal;
      }
    }
  }
  return std::nullopt;
}

// Returns how many ranks exchange heads.
int A2aSizeOf(const AttentionSpec& spec, int world_size) {
  switch (spec.comm) {
    case CpCommType::kAllGather:
    case CpCommType::kP2p:
      return 1;
    case CpCommType::kA2a:
      return world_size;
    case CpCommType::kA2aP2p:
      return spec.a2a_size;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such schedule");
}

// Makes the schedule without what fp8 puts around it.
std::unique_ptr<Schedule> MakeCpSchedule(cppool_runtime* runtime, RankKernels& kernels,
                                         const AttentionSpec& spec) {
  const bool copies = TransfersOf(runtime, spec) == Transfers::kPeer;
  const auto group = [&](int size, int stride) {
    const GroupShape shape{size, stride};
    return copies ? GetCopyGroup(runtime, shape) : GetGroup(runtime, shape);
  };
  HeadRingGroups groups;
  groups.world = GetGroup(runtime, CPPOOL_WORLD);
  const int a2a_size = A2aSizeOf(spec, groups.world.size), ring_size = groups.world.size / a2a_size;
  if (a2a_size > 1) groups.heads = group(a2a_size, 1);
  if (ring_size > 1) groups.ring = group(ring_size, a2a_size);
  groups.ring_by_kernels = !copies && std::string_view(runtime->transport) == "nccl";
  return std::make_unique<HeadRingSchedule>(runtime, kernels, spec, groups);
}

}  // namespace

Transfers TransfersOf(cppool_runtime* runtime, const AttentionSpec& spec) {
  if (spec.transfers == Transfers::kComm) return Transfers::kComm;
  if (GetCopyGroup(runtime, {runtime->world_size, 1}).comm) return Transfers::kPeer;
  if (spec.transfers == Transfers::kPeer) {
    throw RuntimeError(CPPOOL_UNSUPPORTED,
                       "transfers 'peer' copies between devices, and here " +
                           std::string(PlaceOf(runtime).whole() ? "not all devices reach each other"
                                                                : "ranks are in several processes"));
  }
  return Transfers::kComm;
}

std::optional<std::string> WhyNotOneLaunch(const AttentionFamily& family, const AttentionSpec& spec) {
  if (spec.comm != CpCommType::kP2p && spec.comm != CpCommType::kAllGather)
    return "it is for cp_comm_type 'p2p' and 'all_gather'";
  if (spec.transfers == Transfers::kComm)
    return "keys then come by calls of the transport (transfers 'comm')";
  if (family.capabilities(RequestOf(spec)).arriving_piece_bytes == 0)
    return "the kernels '" + std::string(family.name()) +
           "' do not take keys that arrive while they run here";
  return std::nullopt;
}

Launches LaunchesOf(cppool_runtime* runtime, const AttentionFamily& family, const AttentionSpec& spec) {
  const bool chosen = spec.launches != Launches::kAuto;
  if (spec.launches == Launches::kSteps || runtime->world_size == 1 ||
      (!chosen && TransfersOf(runtime, spec) != Transfers::kPeer))
    return Launches::kSteps;
  std::optional<std::string> why = WhyNotOneLaunch(family, spec);
  if (!why) why = WhyNoRing(runtime);
  if (!why) return Launches::kOne;
  if (!chosen) return Launches::kSteps;
  throw RuntimeError(CPPOOL_UNSUPPORTED, "launches 'one': " + *why);
}

std::unique_ptr<Schedule> MakeSchedule(cppool_runtime* runtime, RankKernels& kernels,
                                       const AttentionSpec& spec) {
  std::unique_ptr<Schedule> schedule = MakeCpSchedule(runtime, kernels, spec);
  if (!spec.fp8) return schedule;
  return std::make_unique<Fp8Schedule>(runtime, kernels, spec, GetGroup(runtime, CPPOOL_WORLD),
                                       std::move(schedule), "", false);
}

std::unique_ptr<Schedule> MakeNoCpSchedule(cppool_runtime* runtime, RankKernels& kernels,
                                           const AttentionSpec& spec) {
  std::unique_ptr<Schedule> schedule =
      std::make_unique<HeadRingSchedule>(runtime, kernels, spec, HeadRingGroups{}, "reference/");
  if (!spec.fp8) return schedule;
  return std::make_unique<Fp8Schedule>(runtime, kernels, spec, Group{}, std::move(schedule), "reference/",
                                       true);
}

std::optional<std::string> ScheduleRefusal(const AttentionFamily& family, const AttentionSpec& spec,
                                           int world_size) {
  const std::unique_ptr<BlockAsker> asker = family.AskBlocks();
  if (!asker) return std::nullopt;
  const int a2a_size = A2aSizeOf(spec, world_size);
  std::optional<std::string> refusal =
      HeadRingRefusal(*asker, family, spec, RingSteps(spec, a2a_size, world_size / a2a_size));
  return refusal ? refusal : HeadRingRefusal(*asker, family, spec, RingSteps(spec, 1, 1));
}

MemoryUse ScheduleMemory(const AttentionFamily& family, const AttentionSpec& spec, int world_size) {
  MemoryUse most;
  const auto raise = [&](const MemoryUse& use) {
    if (use.total() > most.total()) most = use;
  };
  const int a2a_size = A2aSizeOf(spec, world_size);
  const RingSteps ring(spec, a2a_size, world_size / a2a_size);
  for (int rank = 0; rank < world_size; ++rank)
    raise(HeadRingMemory(family, spec, ring, rank % a2a_size, rank / a2a_size));
  return most;
}

MemoryUse NoCpMemory(const AttentionFamily& family, const AttentionSpec& spec) {
  return HeadRingMemory(family, spec, RingSteps(spec, 1, 1), 0, 0);
}

}  // namespace cppool::kernels
