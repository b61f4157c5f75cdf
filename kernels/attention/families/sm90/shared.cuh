// The forward kernel's shared memory, and the rings through which the producer hands buffers to the
// consumers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/families/sm90/config.h"
#include "kernels/attention/families/sm90/fp8.cuh"
#include "kernels/attention/families/sm90/parameters.h"
#include "kernels/attention/families/sm90/shared_memory.cuh"

namespace cppool::kernels::cuda::sm90 {

// A tile of queries of one head.
struct TileInfo {
  int head;    // -1: there are no more tiles
  int blocks;  // of keys
  int token;   // row = token * step + member
  int member;
  int position;  // of the first row
  int length;
  int low, high;  // the band
};

struct BlockInfo {
  int position;  // of the first key
  int length;
};

// What lies behind the tiles in shared memory. A buffer is full when its copy has ended, empty when every
// consumer warp has released it; of queries, every consumer thread.
template <int kStages>
struct Control {
  std::uint64_t full_q[2], empty_q[2];
  std::uint64_t full_k[kStages], empty_k[kStages];
  std::uint64_t full_v[kStages], empty_v[kStages];
  TileInfo tiles[2];
  BlockInfo blocks[kStages];  // that full_k announces
  // The producer's: which blocks' pieces with the heads of this one have arrived.
  std::uint64_t arrived;
  int arrived_piece;
};

// What a tile's bias takes beside TileInfo.
struct BiasInfo {
  float slope;   // of ALiBi, divided by the scale; 0 without
  int diagonal;  // of the band
  int sequence;
};

// With a bias. Each consumer has buffers of its own, empty when all its threads, which all read them, have
// released them.
template <typename Config>
struct BiasControl : Control<Config::kStages> {
  std::uint64_t full_bias[Config::kConsumers][Config::kBiasStages];
  std::uint64_t empty_bias[Config::kConsumers][Config::kBiasStages];
  BiasInfo biases[2];  // of `tiles`
};

template <typename Config>
using BaseControlOf = std::conditional_t<Config::kBias, BiasControl<Config>, Control<Config::kStages>>;

template <typename Config>
struct Fp8Control : BaseControlOf<Config> {
  ForwardUnitsOf<Config> units;
};

// With products of payloads.
template <typename Config>
struct NativeControl : Fp8Control<Config> {
  // The producer's own, whose registers are few.
  int slots[Config::kStages];  // of the first keys of `blocks`
  unsigned tile_count;         // that this thread block has begun
};

template <typename Config>
using ControlOf =
    std::conditional_t<Config::kNative, NativeControl<Config>,
                       std::conditional_t<Config::kFp8, Fp8Control<Config>, BaseControlOf<Config>>>;

template <typename Config>
struct Shared : SharedMemory<ControlOf<Config>, Config::kTileBytes> {
  using Memory = SharedMemory<ControlOf<Config>, Config::kTileBytes>;
  using Memory::At, Memory::base, Memory::control, Memory::Memory;
  static_assert(sizeof(ControlOf<Config>) <= Config::kControlBytes);

  __device__ __forceinline__ std::uint32_t Queries(int stage) const {
    return base + stage * Config::kQueryBytes;
  }
  __device__ __forceinline__ std::uint32_t Keys(int stage) const {
    return base + Config::kQueryStages * Config::kQueryBytes + stage * Config::kKeyBytes;
  }
  __device__ __forceinline__ std::uint32_t Values(int stage) const {
    return base + Config::kQueryStages * Config::kQueryBytes + Config::kStages * Config::kKeyBytes +
           stage * Config::kValueBytes;
  }
  // A consumer's 64 rows, [kBlock / 64][64][64] swizzled.
  __device__ __forceinline__ std::uint32_t Bias(int group, int stage) const {
    return base + Config::kQueryStages * Config::kQueryBytes +
           Config::kStages * (Config::kKeyBytes + Config::kValueBytes) +
           (group * Config::kBiasStages + stage) * Config::kBiasBytes;
  }

  __device__ __forceinline__ std::uint32_t FullQ(int i) const { return At(control->full_q + i); }
  __device__ __forceinline__ std::uint32_t EmptyQ(int i) const { return At(control->empty_q + i); }
  __device__ __forceinline__ std::uint32_t FullK(int i) const { return At(control->full_k + i); }
  __device__ __forceinline__ std::uint32_t EmptyK(int i) const { return At(control->empty_k + i); }
  __device__ __forceinline__ std::uint32_t FullV(int i) const { return At(control->full_v + i); }
  __device__ __forceinline__ std::uint32_t EmptyV(int i) const { return At(control->empty_v + i); }
  __device__ __forceinline__ std::uint32_t FullBias(int group, int i) const {
    return At(control->full_bias[group] + i);
  }
  __device__ __forceinline__ std::uint32_t EmptyBias(int group, int i) const {
    return At(control->empty_bias[group] + i);
  }

  // One thread calls this; a barrier of the whole block follows.
  __device__ __forceinline__ void InitBarriers() const {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    for (int i = 0; i < 2; ++i) {
      ptx::InitBarrier(FullQ(i), 1);
      ptx::InitBarrier(EmptyQ(i), Config::kConsumers * kWarpgroup);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::InitBarrier(FullK(i), 1);
      ptx::InitBarrier(FullV(i), 1);
      ptx::InitBarrier(EmptyK(i), kConsumerWarps);
      ptx::InitBarrier(EmptyV(i), kConsumerWarps);
    }
    if constexpr (Config::kBias) {
      for (int i = 0; i < Config::kConsumers * Config::kBiasStages; ++i) {
        ptx::InitBarrier(At(control->full_bias[0] + i), 1);
        ptx::InitBarrier(At(control->empty_bias[0] + i), kWarpgroup);
      }
    }
    ptx::FenceBarrierInit();
    control->arrived = 0;
    control->arrived_piece = -1;
  }
};

}  // namespace cppool::kernels::cuda::sm90
