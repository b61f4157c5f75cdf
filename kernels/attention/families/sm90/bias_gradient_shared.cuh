// Tile sizes and shared memory of the kernel that makes the gradient of a bias, by head dims (query/key and
// value).
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm90/config.h"
#include "kernels/attention/families/sm90/shared.cuh"
#include "kernels/attention/families/sm90/shared_memory.cuh"

namespace cppool::kernels::cuda::sm90 {

// Each consumer warpgroup has 64 queries: 32 registers a thread each for logits, dout v^T and the gradient.
template <int kDimQkValue, int kDimVValue, int kConsumersValue, int kQueryStagesValue, int kStagesValue>
struct BiasGradientBuffers {
  static constexpr int kDimQk = kDimQkValue, kDimV = kDimVValue;
  static constexpr int kConsumers = kConsumersValue;
  static constexpr int kTileRows = kConsumers * 64;
  static constexpr int kBlock = 64;                       // keys at a time
  static constexpr int kQueryStages = kQueryStagesValue;  // buffers for a tile's queries and output gradients
  static constexpr int kStages = kStagesValue;            // buffers for a block's keys and values
  static constexpr int kBiasStages = 2;                   // buffers of each consumer for blocks of the bias
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr bool kFp8 = false;  // see InFp8

  static constexpr int kQueryBytes = kTileRows * (kDimQk + kDimV) * 2;
  static constexpr int kKeyBytes = kBlock * (kDimQk + kDimV) * 2;
  static constexpr int kGradientBytes = 2 * kBiasBoxBytes;  // of one consumer: floats, on their way to memory
  static constexpr int kTileBytes = kQueryStages * kQueryBytes + kStages * kKeyBytes +
                                    kConsumers * (kBiasStages * kBiasBoxBytes + kGradientBytes);
  static constexpr int kControlBytes = 512;
  static constexpr int kSharedBytes = kTileBytes + kControlBytes + kSharedAlignment;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

template <int kDimQk, int kDimV>
struct BiasGradientTiling;
template <>
struct BiasGradientTiling<64, 64> : BiasGradientBuffers<64, 64, 2, 2, 4> {};
template <>
struct BiasGradientTiling<128, 128> : BiasGradientBuffers<128, 128, 2, 1, 2> {};
template <>
struct BiasGradientTiling<128, 64> : BiasGradientBuffers<128, 64, 2, 2, 2> {};
template <>
struct BiasGradientTiling<192, 128> : BiasGradientBuffers<192, 128, 2, 1, 2> {};
template <>
struct BiasGradientTiling<256, 256> : BiasGradientBuffers<256, 256, 1, 1, 2> {};

// What lies behind the tiles in shared memory. A buffer is full when its copies have ended, empty when all
// threads that read it or its description have released it; queries, which products alone read, when every
// consumer warp has.
template <typename Config>
struct BiasGradientControl {
  std::uint64_t full_q[Config::kQueryStages], empty_q[Config::kQueryStages];
  std::uint64_t full_k[Config::kStages], empty_k[Config::kStages];
  std::uint64_t full_bias[Config::kConsumers][Config::kBiasStages];
  std::uint64_t empty_bias[Config::kConsumers][Config::kBiasStages];
  BlockInfo blocks[Config::kStages];  // that full_k announces
  TileInfo tile;                      // `head` is the first one, `blocks` are those of this thread block
  int sequence;
};

template <typename Config>
struct BiasGradientShared : SharedMemory<BiasGradientControl<Config>, Config::kTileBytes> {
  using Memory = SharedMemory<BiasGradientControl<Config>, Config::kTileBytes>;
  using Memory::At, Memory::base, Memory::control, Memory::Memory;
  static_assert(sizeof(BiasGradientControl<Config>) <= Config::kControlBytes);

  // A consumer's 64 rows, [dim / 64][64][64] swizzled.
  __device__ __forceinline__ std::uint32_t Queries(int group, int stage) const {
    return base + stage * Config::kQueryBytes + group * (64 * Config::kDimQk * 2);
  }
  __device__ __forceinline__ std::uint32_t Dout(int group, int stage) const {
    return base + stage * Config::kQueryBytes + Config::kTileRows * Config::kDimQk * 2 +
           group * (64 * Config::kDimV * 2);
  }
  __device__ __forceinline__ std::uint32_t Keys(int stage) const {
    return base + Config::kQueryStages * Config::kQueryBytes + stage * Config::kKeyBytes;
  }
  __device__ __forceinline__ std::uint32_t Values(int stage) const {
    return Keys(stage) + Config::kBlock * Config::kDimQk * 2;
  }
  __device__ __forceinline__ std::uint32_t Bias(int group, int stage) const {
    return base + Config::kQueryStages * Config::kQueryBytes + Config::kStages * Config::kKeyBytes +
           (group * Config::kBiasStages + stage) * kBiasBoxBytes;
  }
  // A consumer's block of the gradient: [2][64][32] floats, swizzled.
  __device__ __forceinline__ std::uint32_t Gradient(int group) const {
    return Bias(Config::kConsumers, 0) + group * Config::kGradientBytes;
  }

  __device__ __forceinline__ std::uint32_t FullQ(int i) const { return At(control->full_q + i); }
  __device__ __forceinline__ std::uint32_t EmptyQ(int i) const { return At(control->empty_q + i); }
  __device__ __forceinline__ std::uint32_t FullK(int i) const { return At(control->full_k + i); }
  __device__ __forceinline__ std::uint32_t EmptyK(int i) const { return At(control->empty_k + i); }
  __device__ __forceinline__ std::uint32_t FullBias(int group, int i) const {
    return At(control->full_bias[group] + i);
  }
  __device__ __forceinline__ std::uint32_t EmptyBias(int group, int i) const {
    return At(control->empty_bias[group] + i);
  }

  // One thread calls this; a barrier of the whole block follows.
  __device__ __forceinline__ void InitBarriers() const {
    for (int i = 0; i < Config::kQueryStages; ++i) {
      ptx::InitBarrier(FullQ(i), 1);
      ptx::InitBarrier(EmptyQ(i), Config::kConsumers * 4);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::InitBarrier(FullK(i), 1);
      ptx::InitBarrier(EmptyK(i), Config::kConsumers * kWarpgroup);
    }
    for (int group = 0; group < Config::kConsumers; ++group)
      for (int i = 0; i < Config::kBiasStages; ++i) {
        ptx::InitBarrier(FullBias(group, i), 1);
        ptx::InitBarrier(EmptyBias(group, i), kWarpgroup);
      }
    ptx::FenceBarrierInit();
  }
};

}  // namespace cppool::kernels::cuda::sm90
