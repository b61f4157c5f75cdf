#include "kernels/attention/families/sm90/choice.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/problem/transposed.h"
#include "kernels/error.h"

namespace cppool::kernels::cuda::sm90 {

ForwardKernelEntry ForwardKernelOf(Dtype dtype, int dim_qk, int dim_v, bool bias, Products products) {
  if (products != Products::kPlain) {
    if (products == Products::kFp8Native)
      return bias ? ForwardKernelEntry{} : NativeForwardKernelOf(dim_qk, dim_v);
    return bias ? BiasedFp8ForwardKernelOf(dim_qk, dim_v) : Fp8ForwardKernelOf(dim_qk, dim_v);
  }
  const auto of = [&]<typename T>() {
    return bias ? BiasedForwardKernelOf<T>(dim_qk, dim_v) : ForwardKernelOf<T>(dim_qk, dim_v);
  };
  if (dtype == Dtype::kBf16) return of.operator()<__nv_bfloat16>();
  if (dtype == Dtype::kFp16) return of.operator()<__half>();
  return {};
}

BackwardKernelEntry BackwardKernelOf(Dtype dtype, int dim_qk, int dim_v, bool bias, Casts casts) {
  if (casts == Casts::kBlocks) return BlocksBackwardKernelOf(dim_qk, dim_v, bias);
  if (casts == Casts::kP) return FindingBackwardKernelOf(dim_qk, dim_v, bias);
  if (casts == Casts::kPAndDs)
    return bias ? BiasedFp8BackwardKernelOf(dim_qk, dim_v) : Fp8BackwardKernelOf(dim_qk, dim_v);
  const auto of = [&]<typename T>() {
    return bias ? BiasedBackwardKernelOf<T>(dim_qk, dim_v) : BackwardKernelOf<T>(dim_qk, dim_v);
  };
  if (dtype == Dtype::kBf16) return of.operator()<__nv_bfloat16>();
  if (dtype == Dtype::kFp16) return of.operator()<__half>();
  return {};
}

ForwardKernelEntry ForwardOf(const KernelShape& shape, BiasType bias, Products products) {
  return ForwardKernelOf(shape.dtypes.q, shape.dim_qk, shape.dim_v, bias != BiasType::kNone, products);
}
BiasGradientKernelEntry BiasGradientOf(const KernelShape& shape, bool fp8) {
  return BiasGradientKernelOf(shape.dtypes.q, shape.dim_qk, shape.dim_v, fp8);
}
BackwardKernelEntry BackwardOf(const KernelShape& shape, BiasType bias, Casts casts) {
  return BackwardKernelOf(shape.dtypes.q, shape.dim_qk, shape.dim_v, bias != BiasType::kNone, casts);
}

// With head dim 64 the time is that of exponentials and of sums in fp32: products of payloads are 6 to 9 %
// slower there than those of their values (tests/measure/README.md).
static bool PayloadsPay(const KernelShape& shape) { return shape.dim_qk > 64; }

bool MultipliesPayloads(const KernelRequest& request) {
  if (!request.fp8 || InBlocks(*request.fp8)) return false;
  const Fp8Products products = request.fp8->products;
  return (products == Fp8Products::kNative ||
          (products == Fp8Products::kAuto && PayloadsPay(request.shape))) &&
         ForwardOf(request.shape, request.bias, Products::kFp8Native).tile_rows > 0;
}

KernelRequest ForGeneral(KernelRequest request) {
  if (request.fp8) request.fp8->products = Fp8Products::kBf16;
  return request;
}

ForwardKernelEntry ForwardOf(const KernelRequest& request) {
  return ForwardOf(request.shape, request.bias,
                   !request.fp8                  ? Products::kPlain
                   : MultipliesPayloads(request) ? Products::kFp8Native
                                                 : Products::kFp8Values);
}
BackwardKernelEntry BackwardOf(const KernelRequest& request) {
  return BackwardOf(request.shape, request.bias,
                    CastsInBlocks(request)   ? Casts::kBlocks
                    : CastsBackward(request) ? Casts::kPAndDs
                                             : Casts::kNone);
}

bool HasAlignedBias(const KernelRequest& request) {
  return request.bias != BiasType::kPostScale || request.bias_extent.keys % 8 == 0;
}

bool HasForward(const KernelRequest& request) {
  return HasAlignedBias(request) && ForwardOf(request).tile_rows > 0;
}
bool HasBiasGradient(const KernelRequest& request) {
  return request.training && request.bias == BiasType::kPostScale && HasAlignedBias(request) &&
         request.bias_extent.query_stride != 0 && BiasGradientOf(request.shape, false).tile_rows > 0;
}
bool HasBackward(const KernelRequest& request) {
  return request.training && HasAlignedBias(request) && BackwardOf(request).tile_keys > 0;
}

bool MayNeedGeneral(const KernelRequest& request) {
  return request.bias == BiasType::kPostScale || !HasForward(request) ||
         (request.training && !HasBackward(request));
}

bool KeysAligned(const WorkList& list) {
  return std::ranges::all_of(list.ranges,
                             [](const Range& range) { return range.position % kBiasKeyStep == 0; });
}
bool KeysAligned(const BackwardList& list) {
  return std::ranges::all_of(list.tiles,
                             [](const KeyTile& tile) { return tile.position % kBiasKeyStep == 0; });
}

void AlignToSlots(WorkList& list, const Layout& keys) {
  const std::vector<Segment> runs = Joined(keys);
  std::vector<std::int64_t> first_slots;
  std::int64_t slots = 0;
  for (const Segment& run : runs) {
    first_slots.push_back(slots);
    slots += SlotsOfRun(run.length);
  }
  if (keys.rows > 0x7fffffff || slots > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "a tensor of " + std::to_string(keys.rows) + " rows");
  for (const Tile& tile : list.tiles) {
    for (std::int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      Range& range = list.ranges[static_cast<std::size_t>(i)];
      // The last run that does not begin behind the range.
      const auto after =
          std::ranges::upper_bound(runs, std::pair(tile.sequence, range.position), {},
                                   [](const Segment& run) { return std::pair(run.sequence, run.position); });
      const auto run = after - runs.begin() - 1;
      const Segment& of = runs[static_cast<std::size_t>(run)];
      const std::int32_t rest = (range.position - of.position) % 16;
      range.row -= std::int64_t{rest} * keys.row_step;
      range.position -= rest;
      range.length += rest;
      const std::int64_t slot = first_slots[static_cast<std::size_t>(run)] + range.position - of.position;
      range.row |= slot << 32;
    }
  }
}

}  // namespace cppool::kernels::cuda::sm90
