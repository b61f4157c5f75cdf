// Forward attention on Hopper: out = softmax(scale q k^T, masked) v and lse, for tiles of queries of one
// head.
//
// Tiling (config.h): a thread block per multiprocessor stays and takes tile after tile; one warpgroup copies
// (producer.cuh), two or three compute 64 query rows each (consumer.cuh) with wgmma. Logits, exponentials and
// output stay in registers. Shared memory: stages of queries, keys and values, and their barriers
// (shared.cuh), 227 KB at most.
#pragma once

#include <type_traits>

#include "kernels/attention/families/sm90/consumer.cuh"
#include "kernels/attention/families/sm90/parts_consumer.cuh"
#include "kernels/attention/families/sm90/producer.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename Config>
concept TakesParts = requires {
  Config::kPartDims;
};

template <typename T, typename Config>
struct ConsumerOf : std::type_identity<Consumer<T, Config>> {};
template <typename T, TakesParts Config>
struct ConsumerOf<T, Config> : std::type_identity<PartsConsumer<T, Config>> {};

template <typename T, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    ForwardKernel(const __grid_constant__ ForwardParameters p) {
  extern __shared__ unsigned char bytes[];
  const Shared<Config> shared(bytes);
  if (threadIdx.x == 0) {
    shared.InitBarriers();
    if constexpr (Config::kFp8) {
      shared.control->units = ForwardUnitsOf<Config>::Of(p);
      shared.control->units.lift -= kSlack<Config>;
    }
    if (p.work.busy_tiles > 0) {
      ptx::PrefetchMap(&p.q);
      ptx::PrefetchMap(&p.k);
      ptx::PrefetchMap(&p.v);
      if (p.arriving.flags) {
        ptx::PrefetchMap(&p.arriving.k);
        ptx::PrefetchMap(&p.arriving.v);
      }
    }
    if (p.last) ptx::PrefetchMap(&p.out);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::GiveRegisters<Config::kProducerRegisters>();
    if (threadIdx.x == 0) Produce<Config>(p, shared);
  } else {
    ptx::TakeRegisters<Config::kConsumerRegisters>();
    typename ConsumerOf<T, Config>::type consumer(p, shared);
    consumer.Run();
    consumer.RunEmptyTiles();
  }
}

}  // namespace cppool::kernels::cuda::sm90
