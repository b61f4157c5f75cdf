// The instructions of sm_90a, and older ones, that CUDA C++ has no name for: barriers in shared memory,
// tensor copies, registers handed between warpgroups. The matrix products are in wgmma.cuh. Shared memory is
// named by its 32-bit address.
#pragma once

#include <cuda.h>  // CUtensorMap; nothing of libcuda is linked

#include <cstdint>
#include <cstdio>

#include "kernels/attention/families/common/ptx.cuh"

namespace cppool::kernels::cuda::ptx {

// mbarrier: a phase ends when `count` threads have arrived and every byte announced has been copied.
__device__ __forceinline__ void InitBarrier(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void ArriveExpecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// The same without an arrival, which may come later.
__device__ __forceinline__ void Expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool TryWait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for the end of the phase with this parity. Compiled with CPPOOL_BOUNDED_WAITS a wait of seconds says
// where it is and stops the kernel.
__device__ __forceinline__ void Wait(std::uint32_t barrier, std::uint32_t parity) {
#ifdef CPPOOL_BOUNDED_WAITS
  for (int i = 0; !TryWait(barrier, parity); ++i) {
    if (i < 1 << 20) continue;
    printf("block %d thread %d: barrier %u, parity %u: not reached\n", static_cast<int>(blockIdx.x),
           static_cast<int>(threadIdx.x), barrier, parity);
    __trap();
  }
#else
  while (!TryWait(barrier, parity)) {
  }
#endif
}

// Barriers between `threads` threads by number; 0 is __syncthreads'.
__device__ __forceinline__ void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void ArriveNamed(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Writes to shared memory before it are seen by tensor copies and wgmma that follow a barrier.
__device__ __forceinline__ void FenceShared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Releases a buffer that this thread has read with ordinary loads to TMA. Loads before an arrival are not
// ordered with writes of the asynchronous proxy: without the fence they may still be under way, and read what
// is copied next.
__device__ __forceinline__ void ReleaseToCopies(std::uint32_t barrier) {
  FenceShared();
  Arrive(barrier);
}

// Data whose flag this thread has read with ordinary loads is seen by tensor copies that follow.
__device__ __forceinline__ void FenceGlobalForCopies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Words that another device, a copy engine or the host writes or reads.
__device__ __forceinline__ std::uint32_t LoadAcquireSystem(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void StoreSystem(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned long long NowNs() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Four values in E4M3, the first in the lowest byte.
__device__ __forceinline__ std::uint32_t PackE4M3(float a, float b, float c, float d) {
  std::uint32_t four;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, "
      "%3; "
      "mov.b32 %0, {low, high};}"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// Coordinates of a box in a map of token rows, see tensor_map.h.
struct RowCoordinates {
  int token;   // row / row step
  int member;  // row % row step
  int head;
};

// Starts the copy of a box to shared memory; its bytes count at `barrier`.
__device__ __forceinline__ void LoadBox(std::uint32_t to, const CUtensorMap* map, RowCoordinates at,
                                        std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%3, "
      "%5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(at.token), "r"(at.head), "r"(at.member)
      : "memory");
}

// Starts the copy of a box of a transposed payload, from this slot and line on.
__device__ __forceinline__ void LoadSlots(std::uint32_t to, const CUtensorMap* map, int slot, int line,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(slot), "r"(line)
      : "memory");
}

// Does the same from the `part`th 64 dims on.
__device__ __forceinline__ void LoadBoxPart(std::uint32_t to, const CUtensorMap* map, RowCoordinates at,
                                            int part, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, "
      "%6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(at.token), "r"(part), "r"(at.head), "r"(at.member)
      : "memory");
}

// Coordinates of a box in a map of a bias or its gradient, see tensor_map.h.
struct BiasCoordinates {
  int key, query, head, sequence;
};

__device__ __forceinline__ void LoadBiasBox(std::uint32_t to, const CUtensorMap* map, BiasCoordinates at,
                                            std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(at.key), "r"(at.query), "r"(at.head), "r"(at.sequence)
      : "memory");
}

// Adds a box of floats to global memory, each element atomically.
__device__ __forceinline__ void AddBiasBox(const CUtensorMap* map, BiasCoordinates at, std::uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(from), "r"(at.key), "r"(at.query), "r"(at.head), "r"(at.sequence)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void StoreBox(const CUtensorMap* map, RowCoordinates at, std::uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %2, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(0), "r"(at.token), "r"(at.head), "r"(at.member)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Adds a box of floats, from the `part`th 32 columns on, to global memory, each element atomically.
__device__ __forceinline__ void AddBox(const CUtensorMap* map, RowCoordinates at, int part,
                                       std::uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(map),
      "r"(from), "r"(0), "r"(at.token), "r"(part), "r"(at.head), "r"(at.member)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the calling thread's stores and additions are done.
__device__ __forceinline__ void WaitForStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Until the calling thread's stores have read shared memory.
__device__ __forceinline__ void WaitForStoresToRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Returns the value in a way that the compiler cannot see through, neither after this nor before it.
template <typename Integer>
__device__ __forceinline__ Integer Opaque(Integer value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void StoreMatrix(std::uint32_t to, std::uint32_t a, std::uint32_t b,
                                            std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The same, each matrix transposed: register i of lane l holds row l / 4 and columns 2 (l % 4) and the next,
// and the address is of a column.
__device__ __forceinline__ void StoreMatrixTransposed(std::uint32_t to, std::uint32_t a, std::uint32_t b,
                                                      std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements: register i of lane l holds row l / 4 and columns 2 (l % 4) and the
// next of matrix i; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrix(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// The same, each matrix transposed: register i of lane l holds column l / 4 and rows 2 (l % 4) and the next.
__device__ __forceinline__ void LoadMatrixTransposed(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ int LoadAcquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void StoreRelease(int* to, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreShared8(std::uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void StoreShared16(std::uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

__device__ __forceinline__ void StoreShared16(std::uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint4 LoadShared16(std::uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// most = max(most, |x|), unless x is NaN; in the order of the program, so that one register is enough.
__device__ __forceinline__ void RaiseToMagnitude(float& most, float x) {
  asm volatile("{.reg .f32 size; abs.f32 size, %1; max.f32 %0, %0, size;}" : "+f"(most) : "f"(x));
}
// Raises a number in shared memory to `x`, which is not negative.
__device__ __forceinline__ void RaiseShared(std::uint32_t to, float x) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(to), "r"(__float_as_uint(x)) : "memory");
}

}  // namespace cppool::kernels::cuda::ptx
