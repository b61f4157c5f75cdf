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
  groups.world = world;
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
  double whole = 0;
  if (spec.training) {
    if (spec.softmax != SoftmaxType::kVanilla) whole += 4 * rows;
    if (spec.bias == BiasType::kPostScale) {
      whole += 4.0 * static_cast<double>(ExtentOfBias(spec).elements);
      if (!spec.bias_shape.queries) whole += 4.0 * spec.batch * spec.heads * spec.seqlen_kv;
    }
  }
  if (spec.comm == CpCommType::kAllGather) {
    return whole + kv * world_size * element + 4 * out +
           (spec.training ? 4 * (rows + q + kv * world_size + kv) : 0);
  }
  const int parts = spec.comm == CpCommType::kP2p ? 1 : spec.comm == CpCommType::kA2a ? world_size : 2;
  const int members = world_size / parts;
  // Replicated heads make blocks of keys larger than this rank's share.
  const bool replicated = parts > 1 && spec.kv_heads % parts != 0;
  if (replicated) kv *= std::max(1.0, static_cast<double>(parts) / spec.kv_heads + 1);
  const int slots = std::min(2, members - 1);
  double bytes = whole;
  if (parts > 1) {
    const double packed = std::max({q, out, kv * (replicated ? 4 / element : 1)}) * element;
    bytes += (q + out + kv) * element + 4 * rows + packed;
    if (spec.training) bytes += (out + q + (replicated ? 0 : kv)) * element;
  }
  bytes += slots * kv * element + (members > 1 ? 4 * out : 0);
  if (spec.training) {
    bytes += 4 * rows + (members > 1 ? 4 * q : 0);
    if (members > 1 || replicated) bytes += 4 * kv;  // the own block's gradients
    if (members > 1) bytes += 4 * kv * (slots + 1);  // parts sent and taken
  }
  return bytes;
}

}  // namespace cppool::kernels
