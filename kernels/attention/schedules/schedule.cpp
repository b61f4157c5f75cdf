#include "kernels/attention/schedule.h"

#include <algorithm>

#include "kernels/attention/schedules/all_gather.h"
#include "kernels/attention/schedules/head_ring.h"
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
      groups.heads = GetGroup(runtime, GroupShape{spec.a2a_size, 1});
      groups.ring = GetGroup(runtime, GroupShape{world.size / spec.a2a_size, spec.a2a_size});
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
  const int parts = spec.comm == CpCommType::kA2a      ? world_size
                    : spec.comm == CpCommType::kA2aP2p ? spec.a2a_size
                                                       : 1;
  const double tokens_q = static_cast<double>(spec.batch) * spec.seqlen_q / world_size;
  const double tokens_kv = static_cast<double>(spec.batch) * spec.seqlen_kv / world_size;
  const double rows = tokens_q * spec.heads;  // an exchange of heads leaves as many
  const double q = rows * spec.dim_qk, out = rows * spec.dim_v;
  double bytes = 0;
  if (spec.training) {
    if (spec.softmax != SoftmaxType::kVanilla) bytes += 4 * rows;
    if (spec.bias == BiasType::kPostScale) {
      bytes += 4.0 * static_cast<double>(ExtentOfBias(spec).elements);
      if (!spec.bias_shape.queries) bytes += 4.0 * spec.batch * (spec.heads / parts) * spec.seqlen_kv;
    }
    bytes += 4 * rows;
  }
  if (spec.comm == CpCommType::kAllGather) {
    const double kv = tokens_kv * spec.kv_heads * (spec.dim_qk + spec.dim_v);
    return bytes + kv * world_size * element + 4 * out + (spec.training ? 4 * (q + kv * world_size + kv) : 0);
  }

  const HeadPlan heads = DealHeads(spec.heads, spec.kv_heads, parts);
  int most = 0, all = 0;  // key/value heads of a rank, and over the exchange's members
  for (const HeadRange& range : heads.key) {
    most = std::max(most, range.count);
    all += range.count;
  }
  const double kv = tokens_kv * parts * most * (spec.dim_qk + spec.dim_v);  // a block
  if (parts > 1) {
    const int dim = std::max(spec.dim_qk, spec.dim_v);
    bytes += (q + out + kv) * element + 4 * rows;
    bytes += std::max(rows * dim * element, tokens_kv * all * dim * (heads.replicated ? 4 : element));
    if (spec.training) bytes += (out + q + (heads.replicated ? 0 : kv)) * element;
  }
  // As if no mask left a step of the ring without work.
  const int members = world_size / parts, slots = std::min(2, members - 1);
  bytes += slots * kv * element + (members > 1 ? 4 * out : 0);
  if (spec.training) {
    if (members > 1 || heads.replicated) bytes += 4 * kv;    // the own block's gradients
    if (members > 1) bytes += 4 * q + 4 * kv * (slots + 1);  // dq, and parts sent and taken
  }
  return bytes;
}

}  // namespace cppool::kernels
