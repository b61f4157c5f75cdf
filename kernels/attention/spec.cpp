#include "kernels/attention/spec.h"

#include <algorithm>

namespace cppool::kernels {
namespace {

std::int32_t Clamp(std::int64_t distance) {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(distance, -kOpen, kOpen));
}

}  // namespace

Band BandOf(const AttentionSpec& spec, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  const bool causal = spec.mask != AttnMaskType::kNoMask;
  std::int64_t left = spec.window_left;
  std::int64_t right = causal ? 0 : spec.window_right;
  if (!causal && left < 0 && right == 0) right = -1;  // (-1, 0) is how a causal mask is asked for elsewhere
  // Key position minus query position on the anchored diagonal.
  const std::int64_t shift = spec.mask == AttnMaskType::kCausal ? 0 : seqlen_kv - seqlen_q;
  left = std::min<std::int64_t>(left, 2 * std::int64_t{kOpen});  // no sum below overflows
  right = std::min<std::int64_t>(right, 2 * std::int64_t{kOpen});
  return {left < 0 ? -kOpen : Clamp(shift - left), right < 0 ? kOpen : Clamp(shift + right)};
}

bool SupportedHeadDims(int dim_qk, int dim_v) {
  if (dim_qk == dim_v) return dim_qk == 64 || dim_qk == 128 || dim_qk == 256;
  return (dim_qk == 192 && dim_v == 128) || (dim_qk == 128 && dim_v == 64);
}

}  // namespace cppool::kernels
