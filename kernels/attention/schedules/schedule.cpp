#include "kernels/attention/schedule.h"

#include <algorithm>

#include "all_gather.h"
#include "head_ring.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

std::unique_ptr<Schedule> MakeSchedule(cppool_runtime* runtime, AttentionKernels& kernels,
                                       const AttentionSpec& spec) {
  const Group world = GetGroup(runtime, CPPOOL_WORLD);
  HeadRingGroups groups;
  switch (spec.comm) {
    case CpCommType::kAllGather:
      return std::make_unique<AllGatherSchedule>(runtime, kernels, spec, world);
    case CpCommType::kP2p:
      groups.ring = world;
      break;
    case CpCommType::kA2a:
      groups.heads = world;
      break;
    case CpCommType::kA2aP2p:
      groups.heads = GetGroup(runtime, CPPOOL_PAIR);
      groups.ring = GetGroup(runtime, CPPOOL_STRIDE);
      if (!groups.heads.comm || !groups.ring.comm) {
        throw RuntimeError(CPPOOL_INVALID_REQUEST, "a2a+p2p needs an even world size from 4");
      }
      break;
  }
  return std::make_unique<HeadRingSchedule>(runtime, kernels, spec, groups);
}

std::unique_ptr<Schedule> MakeNoCpSchedule(cppool_runtime* runtime, AttentionKernels& kernels,
                                           const AttentionSpec& spec) {
  return std::make_unique<HeadRingSchedule>(runtime, kernels, spec, HeadRingGroups{}, "reference/");
}

double ScheduleBytes(const AttentionSpec& spec, int world_size) {
  const double element = SizeOf(spec.dtype);
  const double tokens_q = static_cast<double>(spec.batch) * spec.seqlen_q / world_size;
  const double tokens_kv = static_cast<double>(spec.batch) * spec.seqlen_kv / world_size;
  const double q = tokens_q * spec.heads * spec.dim_qk;
  const double out = tokens_q * spec.heads * spec.dim_v;
  const double rows = tokens_q * spec.heads;
  double kv = tokens_kv * spec.kv_heads * (spec.dim_qk + spec.dim_v);
  if (spec.comm == CpCommType::kAllGather) {
    return kv * world_size * element + 4 * out + (spec.training ? 4 * (rows + q + kv * world_size + kv) : 0);
  }
  const int parts = spec.comm == CpCommType::kP2p ? 1 : spec.comm == CpCommType::kA2a ? world_size : 2;
  const bool rings = parts < world_size;
  // Replicated heads make blocks of keys larger than this rank's share.
  const double copies = std::max(1.0, static_cast<double>(parts) / spec.kv_heads + 1);
  if (parts > 1 && spec.kv_heads % parts != 0) kv *= copies;
  double bytes = 0;
  if (parts > 1)
    bytes += (q + out) * element + 4 * rows + kv * element + std::max({q * element, out * element, 4 * kv});
  if (rings) bytes += 4 * out + 2 * kv * element;
  if (spec.training)
    bytes += 4 * rows + (rings ? 4 * q : 0) + 8 * kv + (parts > 1 ? (out + q + kv) * element : 0);
  return bytes;
}

}  // namespace cppool::kernels
