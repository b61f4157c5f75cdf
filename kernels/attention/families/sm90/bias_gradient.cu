#include "kernels/attention/families/sm90/bias_gradient.cuh"

#include <algorithm>

#include "kernels/attention/families/sm90/bias_call.h"
#include "kernels/attention/families/sm90/bias_gradient.h"
#include "kernels/attention/families/sm90/launch.h"
#include "kernels/error.h"

namespace cppool::kernels::cuda::sm90 {
namespace {

template <typename T, typename Config>
void Load() {
  LoadKernel(&BiasGradientKernel<T, Config>, Config::kSharedBytes);
}

template <typename T, typename Config>
void Launch(const BiasGradientCall& call, cudaStream_t stream) {
  if (call.tiles_count == 0) return;
  const HeadMap& map = call.map;
  const bool sum_heads = call.gradient.head_step == 0;
  if (call.bias.query_step == 0 || call.gradient.query_step == 0)
    throw RuntimeError(CPPOOL_INTERNAL, "launching dbias: queries that share the bias");
  const std::int64_t items = std::int64_t{call.tiles_count} * (sum_heads ? 1 : map.heads);
  if (items > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "launching dbias: more tiles than one kernel takes");
  BiasGradientParameters p{};
  p.q = EncodeRows({call.q, call.rows_q, call.query_step, map.heads, Config::kDimQk}, 64);
  p.dout = EncodeRows({call.dout, call.rows_q, call.query_step, map.heads, Config::kDimV}, 64);
  p.k = EncodeRows({call.k, call.rows_kv, call.key_step, map.kv_heads, Config::kDimQk}, Config::kBlock);
  p.v = EncodeRows({call.v, call.rows_kv, call.key_step, map.kv_heads, Config::kDimV}, Config::kBlock);
  p.gradient = EncodeBiasGradient(call.gradient);
  p.bias = BiasParametersOf({call.bias, nullptr}, call.scale);
  p.tiles = call.tiles, p.ranges = call.ranges;
  p.query_step = call.query_step, p.key_step = call.key_step;
  p.map = map;
  p.lse = call.lse, p.delta = call.delta;
  p.scale_log2 = call.scale * kLog2e;
  if constexpr (Config::kFp8) p.fp8 = call.fp8;
  p.sum_heads = sum_heads;
  p.head_factor = sum_heads ? 0 : 1;
  p.sequence_factor = call.gradient.sequence_step == 0 ? 0 : 1;
  // Few tiles are shared by several thread blocks each.
  const std::int64_t busy = 4 * std::int64_t{call.multiprocessors};
  const dim3 grid(static_cast<unsigned>(items),
                  static_cast<unsigned>(std::clamp<std::int64_t>(busy / items, 1, 16)));
  LaunchKernel(&BiasGradientKernel<T, Config>, grid, Config::kThreads, Config::kSharedBytes, stream,
               "launching dbias", p);
}

template <typename T, template <int, int> typename TilingOf = BiasGradientTiling>
BiasGradientKernelEntry EntryOf(int dim_qk, int dim_v) {
  BiasGradientKernelEntry entry;
  const auto offer = [&]<int kDimQk, int kDimV>() {
    using Config = TilingOf<kDimQk, kDimV>;
    if (dim_qk == kDimQk && dim_v == kDimV) entry = {Config::kTileRows, &Load<T, Config>, &Launch<T, Config>};
  };
  offer.template operator()<64, 64>();
  offer.template operator()<128, 128>();
  offer.template operator()<128, 64>();
  offer.template operator()<192, 128>();
  offer.template operator()<256, 256>();
  return entry;
}

template <int kDimQk, int kDimV>
using Fp8Tiling = InFp8<BiasGradientTiling<kDimQk, kDimV>>;

}  // namespace

BiasGradientKernelEntry BiasGradientKernelOf(Dtype dtype, int dim_qk, int dim_v, bool fp8) {
  if (fp8) return EntryOf<__nv_bfloat16, Fp8Tiling>(dim_qk, dim_v);
  if (dtype == Dtype::kBf16) return EntryOf<__nv_bfloat16>(dim_qk, dim_v);
  if (dtype == Dtype::kFp16) return EntryOf<__half>(dim_qk, dim_v);
  return {};
}

}  // namespace cppool::kernels::cuda::sm90
