// Launches one instance of the forward kernel.
#pragma once

#include <algorithm>

#include "kernels/attention/families/sm90/forward.cuh"
#include "kernels/attention/families/sm90/forward.h"
#include "kernels/attention/families/sm90/launch.h"
#include "kernels/attention/families/sm90/tensor_map.h"
#include "kernels/error.h"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
void LoadForward() {
  LoadKernel(&ForwardKernel<T, Config>, Config::kSharedBytes);
}

template <typename T, typename Config>
void LaunchForward(const ForwardCall& call, cudaStream_t stream) {
  const HeadMap& map = call.map;
  const std::int64_t items =
      std::int64_t{call.first || call.last ? call.work.tiles_count : call.work.busy_tiles} * map.heads;
  if (items == 0) return;
  if (items > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "launching forward attention: more tiles than one kernel takes");
  ForwardParameters p{};
  const RowTensor q{call.q, call.rows_q, call.work.query_step, map.heads, Config::kDimQk},
      k{call.k, call.rows_kv, call.work.key_step, map.kv_heads, Config::kDimQk};
  p.q = Config::kNative ? EncodePayloadRows(q, 64) : EncodeRows(q, 64);
  if (call.work.busy_tiles > 0) {
    p.k = Config::kNative ? EncodePayloadRows(k, Config::kBlock) : EncodeRows(k, Config::kBlock);
    p.v = Config::kNative
              ? EncodeTransposed(call.v, std::int64_t{map.kv_heads} * Config::kDimV, call.all_slots,
                                 Config::kDimV)
              : EncodeRows({call.v, call.rows_kv, call.work.key_step, map.kv_heads, Config::kDimV},
                           Config::kBlock);
  }
  if (call.last)
    p.out = EncodeRows({call.out, call.rows_q, call.work.query_step, map.heads, Config::kDimV}, 16);
  p.work = call.work;
  p.map = map;
  const int tiles = std::max(call.work.busy_tiles, 1);  // of a head
  p.order = OrderOfHeads(map.heads, tiles, call.multiprocessors);
  if (const ArrivingCall& arriving = call.arriving; arriving.flags) {
    p.order = OrderOfArrivals(map.heads, tiles, call.multiprocessors);
    const std::int64_t rows = (arriving.blocks - 1) * arriving.block_rows;
    p.arriving.k =
        EncodeRows({arriving.k, rows, call.work.key_step, map.kv_heads, Config::kDimQk}, Config::kBlock);
    p.arriving.v =
        EncodeRows({arriving.v, rows, call.work.key_step, map.kv_heads, Config::kDimV}, Config::kBlock);
    p.arriving.flags = arriving.flags;
    p.arriving.control = arriving.control;
    p.arriving.pass = arriving.pass;
    p.arriving.block_rows = static_cast<int>(arriving.block_rows);
    p.arriving.blocks = arriving.blocks;
    p.arriving.heads_per_piece = arriving.heads_per_piece;
  }
  p.accumulator = call.accumulator;
  p.out_rows = call.out;
  p.lse = call.lse;
  p.softmax_offset = call.softmax_offset;
  p.max_logit = call.max_logit;
  p.schedule = call.schedule;
  p.scale = call.scale;
  p.scale_log2 = call.scale * kLog2e;
  p.first = call.first;
  p.last = call.last;
  if constexpr (Config::kFp8) p.fp8 = call.fp8;
  if constexpr (Config::kBias) p.bias = BiasParametersOf(call.bias, call.scale);
  const unsigned blocks = static_cast<unsigned>(std::min<std::int64_t>(items, call.multiprocessors));
  LaunchKernel(&ForwardKernel<T, Config>, dim3(blocks), Config::kThreads, Config::kSharedBytes, stream,
               "launching forward attention", p);
}

template <typename T, template <int, int> typename TilingOf>
ForwardKernelEntry ForwardEntry(int dim_qk, int dim_v) {
  ForwardKernelEntry entry;
  const auto offer = [&]<int kDimQk, int kDimV>() {
    using Config = TilingOf<kDimQk, kDimV>;
    if (dim_qk == kDimQk && dim_v == kDimV)
      entry = {Config::kTileRows, &LoadForward<T, Config>, &LaunchForward<T, Config>};
  };
  offer.template operator()<64, 64>();
  offer.template operator()<128, 128>();
  offer.template operator()<128, 64>();
  offer.template operator()<192, 128>();
  offer.template operator()<256, 256>();
  return entry;
}

template <typename T>
ForwardKernelEntry ForwardKernelOf(int dim_qk, int dim_v) {
  return ForwardEntry<T, ForwardTiling>(dim_qk, dim_v);
}

template <typename T>
ForwardKernelEntry BiasedForwardKernelOf(int dim_qk, int dim_v) {
  return ForwardEntry<T, BiasedForwardTiling>(dim_qk, dim_v);
}

}  // namespace cppool::kernels::cuda::sm90
