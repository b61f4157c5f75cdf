// The instructions of sm_90 for thread blocks of one cluster that use each other's shared memory.
#pragma once

#include "kernels/attention/families/sm90/ptx.cuh"

namespace cppool::kernels::cuda::ptx {

__device__ __forceinline__ int ClusterRank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// An address of this block's shared memory as that of the same place in the block of `rank`.
__device__ __forceinline__ std::uint32_t In(std::uint32_t address, int rank) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Until all threads of the cluster are here.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Orders nothing that this thread wrote for the other block: a release at the cluster's scope waits for all
// of its writes to memory. What was read is read.
__device__ __forceinline__ void ArriveIn(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Starts a copy of this block's shared memory to `to`; its bytes count at `barrier`, which is beside `to`.
__device__ __forceinline__ void CopyIn(std::uint32_t to, std::uint32_t from, int bytes,
                                       std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Stores a number, whose 4 bytes count at `barrier`, which is beside `to`.
__device__ __forceinline__ void StoreIn(std::uint32_t to, int value, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(to),
               "r"(value), "r"(barrier)
               : "memory");
}

}  // namespace cppool::kernels::cuda::ptx
