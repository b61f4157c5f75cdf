// The backward kernel's shared memory, and the rings through which the producer hands buffers to the
// consumers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/families/sm90/backward_config.h"
#include "kernels/attention/families/sm90/backward_parameters.h"
#include "kernels/attention/families/sm90/fp8.cuh"
#include "kernels/attention/families/sm90/shared_memory.cuh"

namespace cppool::kernels::cuda::sm90 {

// A tile of keys of one key/value head.
struct KeyTileInfo {
  int kv_head;  // -1: there are no more tiles
  int steps;    // pairs of a query head and a block of queries
  int token, member;
  int position, length;
  int low, high;
  int other_length;  // of the other block's keys, in a pair
};

// A block of queries of one head.
struct StepInfo {
  int token, member;
  int position, length;
  int head;
  int turn;   // index of its first count in `turns`
  int order;  // how many tiles add to dq before this one
};

// How two warpgroups divide the dims of dk and dq, in boxes of kDqDims: each makes kMade boxes, the second
// one those from kApart on. Of dq a consumer hands over those that it owns.
template <typename Config>
struct DqParts {
  static constexpr int kBoxes = Config::kDimQk / Config::kDqDims, kMade = (kBoxes + 1) / 2;
  static constexpr int kApart = kBoxes - kMade;
  static constexpr int kDims = kMade * Config::kDqDims, kApartDims = kApart * Config::kDqDims;
  static __device__ __forceinline__ bool Owns(int group, int part) {
    return part >= group * (kMade - kApart);
  }
  static __device__ __forceinline__ int Count(int group) { return kMade - group * (kMade - kApart); }
};

template <int kTileStages, int kStages, int kDoutStages, int kRows>
struct BackwardControl {
  std::uint64_t full_tile[kTileStages], empty_tile[kTileStages];
  std::uint64_t full_q[kStages], empty_q[kStages];
  std::uint64_t full_dout[kDoutStages], empty_dout[kDoutStages];
  std::uint64_t full_dq[2], empty_dq[2];
  KeyTileInfo tiles[kTileStages];
  // Announced by full_q. Twice as many as buffers: the producer writes over one when the queries of kStages
  // steps later are released, and the consumers have waited for dq of this one before.
  StepInfo steps[2 * kStages];
  int dq_ends[2];  // whether no more of a consumer's dq comes
  // full_dout announces these.
  alignas(16) float lse[kDoutStages][kRows];  // in powers of 2; inf for rows that see nothing
  float delta[kDoutStages][kRows];
};

template <typename Config>
using PlainBackwardControl =
    BackwardControl<Config::kTileStages, Config::kStages, Config::kDoutStages, Config::kRows>;

// With a bias, whose buffers are empty when all threads of the consumers, which all read them, have released
// them.
template <typename Config>
struct BiasedBackwardControl : PlainBackwardControl<Config> {
  std::uint64_t full_bias[Config::kBiasStages], empty_bias[Config::kBiasStages];
  KeyTileBias tile_biases[Config::kTileStages];  // of `tiles`
  float slopes[Config::kStages];  // of ALiBi for blocks of queries, divided by the scale; 0 without
};

// What a cluster of two thread blocks has in addition.
template <typename Config>
struct PairedBackwardControl : PlainBackwardControl<Config> {
  // The other's ds has come; the other's consumers have read the ds that was sent; the item that the first
  // block has taken has come to the second one, and has been read there.
  std::uint64_t full_other_ds, empty_other_ds, full_item, empty_item;
  int item;
};

template <typename Config>
using BaseBackwardControlOf = std::conditional_t<
    Config::kPairs, PairedBackwardControl<Config>,
    std::conditional_t<Config::kBias, BiasedBackwardControl<Config>, PlainBackwardControl<Config>>>;

template <typename Config>
struct Fp8BackwardControl : BaseBackwardControlOf<Config> {
  BackwardUnitsOf<Config> units;
};

template <typename Config>
struct FindingBackwardControl : Fp8BackwardControl<Config> {
  unsigned amax_ds;  // the largest |dS| of this thread block, as a float
};

template <typename Config>
struct BlocksBackwardControl : Fp8BackwardControl<Config> {
  alignas(8) unsigned largest[2][4][32];  // |dS| of a consumer's warp's keys, for each query, as floats
};

template <typename Config>
using BackwardControlOf =
    std::conditional_t<Config::kInBlocks, BlocksBackwardControl<Config>,
                       std::conditional_t<Config::kFindsDs, FindingBackwardControl<Config>,
                                          std::conditional_t<Config::kFp8, Fp8BackwardControl<Config>,
                                                             BaseBackwardControlOf<Config>>>>;

template <typename Config>
struct BackwardShared : SharedMemory<BackwardControlOf<Config>, Config::kTileBytes> {
  using Memory = SharedMemory<BackwardControlOf<Config>, Config::kTileBytes>;
  using Memory::At, Memory::base, Memory::control, Memory::Memory;
  static_assert(sizeof(BackwardControlOf<Config>) <= Config::kControlBytes);

  __device__ __forceinline__ std::uint32_t Keys(int stage) const {
    return base + stage * (Config::kKeyBytes + Config::kValueBytes);
  }
  __device__ __forceinline__ std::uint32_t Values(int stage) const { return Keys(stage) + Config::kKeyBytes; }
  // A block of queries, then a block of output gradients, then the next: of those there may be fewer.
  __device__ __forceinline__ std::uint32_t Queries(int stage) const {
    return base + Config::kTileStages * (Config::kKeyBytes + Config::kValueBytes) +
           stage * (Config::kQueryBytes + Config::kDoutBytes);
  }
  __device__ __forceinline__ std::uint32_t Dout(int stage) const {
    return Queries(stage) + Config::kQueryBytes;
  }
  __device__ __forceinline__ std::uint32_t Ds(int buffer) const {
    return Queries(0) + Config::kStages * Config::kQueryBytes + Config::kDoutStages * Config::kDoutBytes +
           buffer * Config::kDsBytes;
  }
  // A consumer's box of dq: [kDqDims / 32][kDqRows][32] floats, swizzled.
  __device__ __forceinline__ std::uint32_t Dq(int group) const {
    return Ds(Config::kDsBuffers) + group * Config::kDqBytes;
  }
  // A block of a bias: [kTileKeys / 64][kRows][64] swizzled.
  __device__ __forceinline__ std::uint32_t Bias(int stage) const {
    return Dq(2) + stage * Config::kBiasBytes;
  }

  // The second or first half of the dims of the other block's keys: [kDimQk / 128][kTileKeys][64] swizzled.
  // With casts in blocks the keys for dq, as Keys.
  __device__ __forceinline__ std::uint32_t OtherKeys() const { return Bias(Config::kBiasStages); }

  __device__ __forceinline__ std::uint32_t FullTile(int i) const { return At(control->full_tile + i); }
  __device__ __forceinline__ std::uint32_t EmptyTile(int i) const { return At(control->empty_tile + i); }
  __device__ __forceinline__ std::uint32_t FullQ(int i) const { return At(control->full_q + i); }
  __device__ __forceinline__ std::uint32_t EmptyQ(int i) const { return At(control->empty_q + i); }
  __device__ __forceinline__ std::uint32_t FullDout(int i) const { return At(control->full_dout + i); }
  __device__ __forceinline__ std::uint32_t EmptyDout(int i) const { return At(control->empty_dout + i); }
  __device__ __forceinline__ std::uint32_t FullDq(int i) const { return At(control->full_dq + i); }
  __device__ __forceinline__ std::uint32_t EmptyDq(int i) const { return At(control->empty_dq + i); }
  __device__ __forceinline__ std::uint32_t FullBias(int i) const { return At(control->full_bias + i); }
  __device__ __forceinline__ std::uint32_t EmptyBias(int i) const { return At(control->empty_bias + i); }
  __device__ __forceinline__ std::uint32_t FullOtherDs() const { return At(&control->full_other_ds); }
  __device__ __forceinline__ std::uint32_t EmptyOtherDs() const { return At(&control->empty_other_ds); }
  __device__ __forceinline__ std::uint32_t FullItem() const { return At(&control->full_item); }
  __device__ __forceinline__ std::uint32_t EmptyItem() const { return At(&control->empty_item); }

  // By one thread; a barrier of the block, or of the cluster, follows. Consumers release by all threads what
  // they all have read.
  __device__ __forceinline__ void Init() const {
    for (int i = 0; i < Config::kTileStages; ++i) {
      ptx::InitBarrier(FullTile(i), 1);
      ptx::InitBarrier(EmptyTile(i), 2 * kWarpgroup);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::InitBarrier(FullQ(i), 1);
      ptx::InitBarrier(EmptyQ(i), 2 * kWarpgroup);
    }
    for (int i = 0; i < Config::kDoutStages; ++i) {
      ptx::InitBarrier(FullDout(i), 32);  // each lane of the producer for its rows of lse and delta
      ptx::InitBarrier(EmptyDout(i), 2 * kWarpgroup);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::InitBarrier(FullDq(i), kWarpgroup);
      ptx::InitBarrier(EmptyDq(i), 1);
      control->dq_ends[i] = 0;
    }
    if constexpr (Config::kBias) {
      for (int i = 0; i < Config::kBiasStages; ++i) {
        ptx::InitBarrier(FullBias(i), 1);
        ptx::InitBarrier(EmptyBias(i), 2 * kWarpgroup);
      }
    }
    if constexpr (Config::kFindsDs) control->amax_ds = 0;
    if constexpr (Config::kPairs) {
      ptx::InitBarrier(FullOtherDs(), 1);
      ptx::InitBarrier(EmptyOtherDs(), 2 * kWarpgroup / 32);  // a lane of each of the other's warps
      ptx::InitBarrier(FullItem(), 1);
      ptx::InitBarrier(EmptyItem(), 1);
    }
    ptx::FenceBarrierInit();
  }
};

// Places in the rings of queries, of output gradients and of a bias, which move together.
template <int kStages, int kDoutStages>
class StepRings {
 public:
  __device__ __forceinline__ const Ring<kStages>& q() const { return q_; }
  __device__ __forceinline__ Ring<kDoutStages> dout() const { return Beside<kDoutStages>(); }
  // Returns the place in kCount buffers that are filled in every step.
  template <int kCount>
  __device__ __forceinline__ Ring<kCount> Beside() const {
    static_assert(kFollows<kCount> || kCount == kDoutStages);
    if constexpr (kCount == kStages) {
      return q_;
    } else if constexpr (kFollows<kCount>) {
      return {0, static_cast<std::uint32_t>(q_.stage)};
    } else {
      return dout_;
    }
  }
  // Returns the step's index in BackwardControl::steps.
  __device__ __forceinline__ int step() const { return static_cast<int>(q_.parity) * kStages + q_.stage; }
  __device__ __forceinline__ void Advance() {
    q_.Advance();
    if constexpr (!kFollows<kDoutStages>) dout_.Advance();
  }

 private:
  // Whether the place in a ring of kCount buffers follows from that of the queries, and takes no register.
  template <int kCount>
  static constexpr bool kFollows = kCount == kStages || (kCount == 1 && kStages == 2);

  Ring<kStages> q_;
  Ring<kDoutStages> dout_;  // used where it does not follow
};

// The same with casts in blocks, where a step fills buffers twice: with what logits and dP read, then with
// what the other products do.
template <int kStages>
class TwofoldRings {
 public:
  __device__ __forceinline__ Ring<kStages> q() const { return {0, kStages == 2 ? steps_ % 2 : 0}; }
  __device__ __forceinline__ Ring<kStages> dout() const { return q(); }
  __device__ __forceinline__ Ring<kStages> second() const {
    return {kStages - 1, kStages == 2 ? steps_ % 2 : 1};
  }
  template <int kCount>
  __device__ __forceinline__ Ring<kCount> Beside() const {
    static_assert(kCount == 1);
    return {0, steps_ % 2};
  }
  __device__ __forceinline__ int step() const { return static_cast<int>(steps_ % (2 * kStages)); }
  __device__ __forceinline__ void Advance() { ++steps_; }

 private:
  std::uint32_t steps_ = 0;
};

template <typename Config>
using StepRingsOf = std::conditional_t<Config::kInBlocks, TwofoldRings<Config::kStages>,
                                       StepRings<Config::kStages, Config::kDoutStages>>;

}  // namespace cppool::kernels::cuda::sm90
