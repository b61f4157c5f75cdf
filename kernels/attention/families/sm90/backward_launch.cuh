// Launches one instance of the backward kernel, and what comes before and after it.
#pragma once

#include <algorithm>

#include "kernels/attention/families/sm90/backward.cuh"
#include "kernels/attention/families/sm90/backward.h"
#include "kernels/attention/families/sm90/dq.cuh"
#include "kernels/attention/families/sm90/launch.h"
#include "kernels/attention/families/sm90/tensor_map.h"
#include "kernels/error.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
void LoadBackward() {
  LoadKernel(&BackwardKernel<T, Config>, Config::kSharedBytes);
  LoadKernel(&ZeroDqKernel, 0);
  LoadKernel(&RoundDqKernel<T, Config::kDqAsMade>, 0);
}

// Few items are best balanced all together.
template <typename Config>
int SectionHeads(const BackwardCall& call) {
  constexpr std::int64_t kCachedBytes = 24 << 20, kItemsPerMultiprocessor = 8;
  const HeadMap& map = call.map;
  if (std::int64_t{call.work.busy_tiles} * map.kv_heads < kItemsPerMultiprocessor * call.multiprocessors)
    return map.kv_heads;
  const std::int64_t head_bytes =
      call.rows_q * map.heads / map.kv_heads * (2 * Config::kDimQk + 2 * Config::kDimV + 4 * Config::kDimQk);
  return static_cast<int>(
      std::clamp<std::int64_t>(kCachedBytes / std::max<std::int64_t>(head_bytes, 1), 1, map.kv_heads));
}

// In step through the blocks for all heads of a group, tiles read and add to the same rows at a time: 8 %
// faster with 32 query and 4 key/value heads with head dim 128 and 4096 tokens. With a window of 512, where a
// tile has few blocks, what all heads touch does not stay in the L2 cache: a quarter slower. For turns it
// matters whether tiles have as many blocks as their neighbours.
inline bool HeadsTogether(const BackwardCall& call) {
  constexpr int kFewBlocks = 16;
  const BackwardWork& work = call.work;
  return call.turns ? work.most_blocks * 2 > work.mean_blocks * 3 : work.mean_blocks > kFewBlocks;
}

// What comes on `later` waits for what `earlier` has so far.
inline void Order(cudaStream_t earlier, cudaStream_t later) {
  cudaEvent_t event = nullptr;
  CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  CheckCuda(cudaEventRecord(event, earlier), "cudaEventRecord");
  CheckCuda(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
  CheckCuda(cudaEventDestroy(event), "cudaEventDestroy");
}

template <typename T, typename Config>
void LaunchBackward(const BackwardCall& call, cudaStream_t stream) {
  const BackwardWork& work = call.work;
  const HeadMap& map = call.map;
  const int step = work.query_step, row_size = map.heads * Config::kDimQk;
  const dim3 dq_grid(static_cast<unsigned>(work.blocks_count), Config::kRows / kDqRowsPerBlock);
  if (call.query_first && work.blocks_count > 0) {
    LaunchKernel(&ZeroDqKernel, dq_grid, kDqThreads, 0, stream, "zeroing dq", work.blocks, step, row_size,
                 call.dq_sum);
  }
  if (call.query_first && call.beside) Order(stream, call.beside);

  const std::int64_t items =
      std::int64_t{call.key_first || call.key_last ? work.tiles_count : work.busy_tiles} * map.kv_heads;
  if (items > 0x7fffffff || std::int64_t{work.blocks_count} * map.heads > 0x7fffffff / kTurns)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "launching backward attention: more tiles than one kernel takes");
  if (items > 0) {
    BackwardParameters p{};
    if (work.busy_tiles > 0) {
      p.q = EncodeRows({call.q, call.rows_q, step, map.heads, Config::kDimQk}, Config::kRows);
      p.dout = EncodeRows({call.dout, call.rows_q, step, map.heads, Config::kDimV}, Config::kRows);
      p.k = EncodeRows({call.k, call.rows_kv, work.key_step, map.kv_heads, Config::kDimQk}, Config::kTileKeys,
                       Config::kPairs ? Config::kDimQk / 2 : Config::kDimQk);
      p.v = EncodeRows({call.v, call.rows_kv, work.key_step, map.kv_heads, Config::kDimV}, Config::kTileKeys);
      if constexpr (Config::kInBlocks) {
        p.q_of_dk = EncodeRows({call.q_of_dk, call.rows_q, step, map.heads, Config::kDimQk}, Config::kRows);
        p.dout_of_dv =
            EncodeRows({call.dout_of_dv, call.rows_q, step, map.heads, Config::kDimV}, Config::kRows);
        p.k_of_dq = EncodeRows({call.k_of_dq, call.rows_kv, work.key_step, map.kv_heads, Config::kDimQk},
                               Config::kTileKeys);
      }
      p.dq = EncodeFloatRows({call.dq_sum, call.rows_q, step, map.heads, Config::kDimQk}, Config::kDqRows,
                             Config::kDqDims);
    }
    p.work = work;
    p.map = map;
    p.lse = call.lse;
    p.delta = call.delta;
    p.dk_sum = call.dk_sum;
    p.dv_sum = call.dv_sum;
    p.dk = call.dk;
    p.dv = call.dv;
    p.section_heads = SectionHeads<Config>(call);
    p.heads_together = HeadsTogether(call);
    p.schedule = call.schedule;
    p.turns = call.turns;
    p.scale = call.scale;
    p.scale_log2 = call.scale * kLog2e;
    p.first = call.key_first;
    p.last = call.key_last;
    if constexpr (Config::kFp8) p.fp8 = call.fp8;
    if constexpr (Config::kBias) {
      p.bias = BiasParametersOf(call.bias, call.scale, Config::kRows);
      p.tile_biases = call.tile_biases;
    }
    CheckCuda(cudaMemsetAsync(call.schedule, 0, call.state_bytes, stream), "cudaMemsetAsync");
    const char* const what = "launching backward attention";
    if constexpr (Config::kPairs) {
      const std::int64_t pairs = std::clamp<std::int64_t>(call.multiprocessors / 2, 1, items);
      LaunchClusters(&BackwardKernel<T, Config>, 2, dim3(static_cast<unsigned>(pairs * 2)), Config::kThreads,
                     Config::kSharedBytes, stream, what, p);
    } else {
      const unsigned grid = static_cast<unsigned>(std::min<std::int64_t>(items, call.multiprocessors));
      LaunchKernel(&BackwardKernel<T, Config>, dim3(grid), Config::kThreads, Config::kSharedBytes, stream,
                   what, p);
    }
  }

  if (call.query_last && call.beside) Order(call.beside, stream);
  if (call.query_last && work.blocks_count > 0) {
    LaunchKernel(&RoundDqKernel<T, Config::kDqAsMade>, dq_grid, kDqThreads, 0, stream, "rounding dq",
                 work.blocks, step, row_size, call.dq_sum, static_cast<T*>(call.dq));
  }
}

template <typename T, template <int, int> typename TilingOf>
BackwardKernelEntry BackwardEntry(int dim_qk, int dim_v) {
  BackwardKernelEntry entry;
  const auto offer = [&]<int kDimQk, int kDimV>() {
    using Config = TilingOf<kDimQk, kDimV>;
    if (dim_qk == kDimQk && dim_v == kDimV)
      entry = {Config::kListKeys, Config::kRows, &LoadBackward<T, Config>, &LaunchBackward<T, Config>};
  };
  offer.template operator()<64, 64>();
  offer.template operator()<128, 128>();
  offer.template operator()<128, 64>();
  offer.template operator()<192, 128>();
  offer.template operator()<256, 256>();
  return entry;
}

template <typename T>
BackwardKernelEntry BackwardKernelOf(int dim_qk, int dim_v) {
  return BackwardEntry<T, BackwardTiling>(dim_qk, dim_v);
}

template <typename T>
BackwardKernelEntry BiasedBackwardKernelOf(int dim_qk, int dim_v) {
  return BackwardEntry<T, BiasedBackwardTiling>(dim_qk, dim_v);
}

}  // namespace cppool::kernels::cuda::sm90
