// The backward kernel's shared memory, and the rings through which the producer hands buffers to the consumers.
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm90/backward_config.h"
#include "kernels/attention/families/sm90/backward_parameters.h"
#include "kernels/attention/families/sm90/shared_memory.cuh"

namespace cppool::kernels::cuda::sm90 {

// A tile of keys of one key/value head.
struct KeyTileInfo {
  int kv_head;  // -1: there are no more tiles
  int steps;    // pairs of a query head and a block of queries
  int token, member;
  int position, length;
  int low, high;
};

// A block of queries of one head.
struct StepInfo {
  int token, member;
  int position, length;
  int head;
  int turn;   // index of its first count in `turns`
  int order;  // how many tiles add to dq before this one
};

// What a consumer has made of dq, or head -1: nothing any more.
struct DqInfo {
  int token, member, head;
  int turn, order;  // of this consumer
};

template <int kTileStages, int kStages, int kRows>
struct BackwardControl {
  std::uint64_t full_tile[kTileStages], empty_tile[kTileStages];
  std::uint64_t full_q[kStages], empty_q[kStages];
  std::uint64_t full_dout[kStages], empty_dout[kStages];
  std::uint64_t full_dq[2], empty_dq[2];
  KeyTileInfo tiles[kTileStages];
  StepInfo steps[kStages];  // as the next two, announced by full_dout
  DqInfo dq[2];
  alignas(16) float lse[kStages][kRows];  // in powers of 2; inf for rows that see nothing
  float delta[kStages][kRows];
};

template <typename Config>
using BackwardControlOf = BackwardControl<Config::kTileStages, Config::kStages, Config::kRows>;

template <typename Config>
struct BackwardShared : SharedMemory<BackwardControlOf<Config>, Config::kTileBytes> {
  using Memory = SharedMemory<BackwardControlOf<Config>, Config::kTileBytes>;
  using Memory::At, Memory::base, Memory::control, Memory::Memory;
  static_assert(sizeof(BackwardControlOf<Config>) <= Config::kControlBytes);

  __device__ __forceinline__ std::uint32_t Keys(int stage) const {
    return base + stage * (Config::kKeyBytes + Config::kValueBytes);
  }
  __device__ __forceinline__ std::uint32_t Values(int stage) const { return Keys(stage) + Config::kKeyBytes; }
  __device__ __forceinline__ std::uint32_t Queries(int stage) const {
    return base + Config::kTileStages * (Config::kKeyBytes + Config::kValueBytes) +
           stage * (Config::kQueryBytes + Config::kDoutBytes);
  }
  __device__ __forceinline__ std::uint32_t Dout(int stage) const {
    return Queries(stage) + Config::kQueryBytes;
  }
  __device__ __forceinline__ std::uint32_t Ds(int buffer) const {
    return Queries(Config::kStages) + buffer * Config::kDsBytes;
  }

  // A consumer's half of the dims: [., 32][kRows][32] floats, swizzled.
  __device__ __forceinline__ std::uint32_t Dq(int group) const {
    return Ds(Config::kStages) + group * (Config::kDqBytes / 2);
  }

  __device__ __forceinline__ std::uint32_t FullTile(int i) const { return At(control->full_tile + i); }
  __device__ __forceinline__ std::uint32_t EmptyTile(int i) const { return At(control->empty_tile + i); }
  __device__ __forceinline__ std::uint32_t FullQ(int i) const { return At(control->full_q + i); }
  __device__ __forceinline__ std::uint32_t EmptyQ(int i) const { return At(control->empty_q + i); }
  __device__ __forceinline__ std::uint32_t FullDout(int i) const { return At(control->full_dout + i); }
  __device__ __forceinline__ std::uint32_t EmptyDout(int i) const { return At(control->empty_dout + i); }

  __device__ __forceinline__ std::uint32_t FullDq(int i) const { return At(control->full_dq + i); }
  __device__ __forceinline__ std::uint32_t EmptyDq(int i) const { return At(control->empty_dq + i); }

  // By one thread; a barrier of the whole block follows. Consumers release by all threads what they all have read.
  __device__ __forceinline__ void InitBarriers() const {
    for (int i = 0; i < Config::kTileStages; ++i) {
      ptx::InitBarrier(FullTile(i), 1);
      ptx::InitBarrier(EmptyTile(i), 2 * kWarpgroup);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::InitBarrier(FullQ(i), 1);
      ptx::InitBarrier(EmptyQ(i), 8);
      ptx::InitBarrier(FullDout(i), 1);
      ptx::InitBarrier(EmptyDout(i), 2 * kWarpgroup);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::InitBarrier(FullDq(i), kWarpgroup);
      ptx::InitBarrier(EmptyDq(i), 1);
    }
    ptx::FenceBarrierInit();
  }
};

}  // namespace cppool::kernels::cuda::sm90
