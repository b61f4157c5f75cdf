// Backward attention on Hopper: dk and dv of tiles of keys of one key/value head, and what they add to dq:
// five products for each pair of a tile and a block of queries (backward_consumer.cuh,
// backward_halves_consumer.cuh, backward_dims_consumer.cuh, backward_pair_consumer.cuh,
// backward_blocks_consumer.cuh).
//
// Tiling (backward_config.h): a thread block per multiprocessor stays and takes tile after tile; one warp
// copies (backward_producer.cuh), two warpgroups compute with wgmma, and two threads add to dq
// (backward_dq.cuh). dk, dv and logits stay in registers. Shared memory: stages of keys and values, queries
// and output gradients, ds, dq, and barriers (backward_shared.cuh), 227 KB at most.
#pragma once

#include <type_traits>

#include "kernels/attention/families/sm90/backward_blocks_consumer.cuh"
#include "kernels/attention/families/sm90/backward_consumer.cuh"
#include "kernels/attention/families/sm90/backward_dims_consumer.cuh"
#include "kernels/attention/families/sm90/backward_dq.cuh"
#include "kernels/attention/families/sm90/backward_halves_consumer.cuh"
#include "kernels/attention/families/sm90/backward_pair_consumer.cuh"
#include "kernels/attention/families/sm90/backward_producer.cuh"
#include "kernels/attention/families/sm90/cluster.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
using BackwardConsumerOf = std::conditional_t<
    Config::kInBlocks, BackwardBlocksConsumer<T, Config>,
    std::conditional_t<
        Config::kPairs, BackwardPairConsumer<T, Config>,
        std::conditional_t<Config::kSplitsDims, BackwardDimsConsumer<T, Config>,
                           std::conditional_t<Config::kTakesHalves, BackwardHalvesConsumer<T, Config>,
                                              BackwardConsumer<T, Config>>>>>;

// Synchronises a thread block, or a cluster of two.
template <typename Config>
__device__ __forceinline__ void SyncAll() {
  if constexpr (Config::kPairs) {
    ptx::SyncCluster();
  } else {
    __syncthreads();
  }
}

template <typename T, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    BackwardKernel(const __grid_constant__ BackwardParameters p) {
  extern __shared__ unsigned char bytes[];
  const BackwardShared<Config> shared(bytes);
  if (threadIdx.x == 0) {
    shared.Init();
    if constexpr (Config::kFp8) shared.control->units = BackwardUnitsOf<Config>::template Of<Config>(p);
    if (p.work.busy_tiles > 0) {
      ptx::PrefetchMap(&p.q);
      ptx::PrefetchMap(&p.dout);
      ptx::PrefetchMap(&p.k);
      ptx::PrefetchMap(&p.v);
      ptx::PrefetchMap(&p.dq);
    }
  }
  SyncAll<Config>();
  if (threadIdx.x < kWarpgroup) {
    ptx::GiveRegisters<Config::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      ProduceBackward<Config>(p, shared);
    } else if (warp < 3 && threadIdx.x % 32 == 0) {
      AddDq<Config>(p, shared, warp - 1);
    }
  } else {
    ptx::TakeRegisters<Config::kConsumerRegisters>();
    BackwardConsumerOf<T, Config> consumer(p, shared);
    consumer.Run();
    consumer.RunEmptyTiles();
  }
  // The other block of a cluster may still arrive here.
  if constexpr (Config::kPairs) {
    __syncwarp();
    ptx::SyncCluster();
  }
}

}  // namespace cppool::kernels::cuda::sm90
