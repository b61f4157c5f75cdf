// What the kernels' shared memory has in common: tiles, then the barriers and descriptions that control them;
// and rings of buffers, through which a producer hands tiles to consumers.
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm90/config.h"
#include "kernels/attention/families/sm90/ptx.cuh"

namespace cppool::kernels::cuda::sm90 {

// kTileBytes of tiles from `base` on, which is aligned to kSharedAlignment, then *control. `shared` has
// kSharedAlignment bytes more than both take.
template <typename Control, int kTileBytes>
struct SharedMemory {
  __device__ __forceinline__ explicit SharedMemory(unsigned char* shared)
      : base((ptx::SharedAddress(shared) + kSharedAlignment - 1) & ~(kSharedAlignment - 1u)),
        control(reinterpret_cast<Control*>(shared + (base - ptx::SharedAddress(shared)) + kTileBytes)) {}

  static __device__ __forceinline__ std::uint32_t At(const std::uint64_t* barrier) {
    return ptx::SharedAddress(barrier);
  }

  std::uint32_t base;
  Control* control;
};

// A place in a ring of kStages buffers, and the parity of the phase that its full barrier ends next.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ Ring Previous() const {
    return stage == 0 ? Ring{kStages - 1, parity ^ 1} : Ring{stage - 1, parity};
  }
};

}  // namespace cppool::kernels::cuda::sm90
