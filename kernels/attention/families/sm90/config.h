// Tile sizes, stages and shared-memory budgets of the forward kernel, by head dims (query/key and value).
//
// What decides them: each consumer warpgroup holds 64 query rows: dim_v / 2 registers a thread for the
// output, kBlock / 2 for logits and kBlock / 4 for their exponentials, of 232 (two consumers) or 160 (three).
// A wgmma with n < 128 binds on shared memory. Two stages of queries let the next tile's queries arrive under
// the present one; where they do not fit, the queries' buffer is refilled after the last product that reads
// it.
#pragma once

namespace cppool::kernels::cuda::sm90 {
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kSharedAlignment = 1024;  // of tiles, as TMA's swizzle asks
inline constexpr int kWarpgroup = 128;
inline constexpr int kBiasBoxBytes = 64 * 64 * 2;  // of 64 queries and 64 keys

// Registers a thread at launch, a multiple of 8, of a thread block that has a multiprocessor's 65536 to
// itself.
constexpr int LaunchRegisters(int threads) { return 65536 / threads / 8 * 8; }

// Whether consumer warpgroups can raise their registers a thread to `consumer` when a producer warpgroup has
// lowered its own to `producer`. They wait forever for more than the thread block was launched with.
constexpr bool RegistersSuffice(int consumers, int producer, int consumer) {
  const int warpgroups = consumers + 1;
  return producer + consumers * consumer <= warpgroups * LaunchRegisters(warpgroups * kWarpgroup);
}

template <int kDimQkValue, int kDimVValue, int kConsumersValue, int kBlockValue, int kStagesValue,
          int kQueryStagesValue, bool kTakeTurnsValue, int kBiasStagesValue = 0>
struct Tiling {
  static constexpr int kDimQk = kDimQkValue, kDimV = kDimVValue;
  static constexpr int kConsumers = kConsumersValue;  // warpgroups of 64 query rows
  static constexpr int kTileRows = kConsumers * 64;
  static constexpr int kBlock = kBlockValue;              // keys at a time
  static constexpr int kStages = kStagesValue;            // buffers for blocks of keys and of values
  static constexpr int kQueryStages = kQueryStagesValue;  // buffers for tiles of queries
  static constexpr bool kTakeTurns = kTakeTurnsValue;     // consumers issue their products in turn
  static constexpr int kBiasStages = kBiasStagesValue;    // buffers of each consumer for blocks of a bias
  static constexpr bool kBias = kBiasStages > 0;
  static constexpr bool kFp8 = false;     // see InFp8
  static constexpr bool kNative = false;  // see NativeTiling
  // A tile's first product starts under the end of the tile before, else after it.
  static constexpr bool kEarlyStart = kQueryStages == 2;
  static constexpr bool kStageOutput = kQueryStages == 2;  // the output leaves through the queries' buffer

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  static constexpr int kQueryGroupBytes = 64 * kDimQk * 2;  // of one consumer
  static constexpr int kQueryBytes = kConsumers * kQueryGroupBytes;
  static constexpr int kQueryCopyBytes = kQueryBytes;  // what of it is copied
  static constexpr int kKeyBytes = kBlock * kDimQk * 2;
  static constexpr int kValueBytes = kBlock * kDimV * 2;
  static constexpr int kBiasBytes = 64 * kBlock * 2;  // of one consumer
  static constexpr int kTileBytes = kQueryStages * kQueryBytes + kStages * (kKeyBytes + kValueBytes) +
                                    kConsumers * kBiasStages * kBiasBytes;
  static constexpr int kControlBytes = 512;  // barriers, the descriptions of tiles and blocks
  static constexpr int kSharedBytes = kTileBytes + kControlBytes + kSharedAlignment;

  static_assert(RegistersSuffice(kConsumers, kProducerRegisters, kConsumerRegisters));
  static_assert(kDimQk % 64 == 0 && kDimV % 64 == 0 && kDimV <= kDimQk && kBlock % 16 == 0 && kBlock <= 256);
  static_assert(!kBias || kBlock % 64 == 0);
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// Chosen by measurement on H200s: fewer and larger blocks of keys cost less energy, which binds there, until
// the part of a causal mask's diagonal blocks that is computed for nothing outweighs it.
template <int kDimQk, int kDimV>
struct ForwardTiling;
template <>
struct ForwardTiling<64, 64> : Tiling<64, 64, 3, 128, 4, 2, true> {};
template <>
struct ForwardTiling<128, 128> : Tiling<128, 128, 2, 128, 2, 2, true> {};
template <>
struct ForwardTiling<128, 64> : Tiling<128, 64, 3, 128, 2, 2, true> {};
template <>
struct ForwardTiling<192, 128> : Tiling<192, 128, 2, 128, 2, 1, true> {};
template <>
struct ForwardTiling<256, 256> : Tiling<256, 256, 2, 80, 2, 1, true> {};

// With a bias, whose blocks take the place of other buffers.
template <int kDimQk, int kDimV>
struct BiasedForwardTiling;
template <>
struct BiasedForwardTiling<64, 64> : Tiling<64, 64, 2, 128, 4, 2, true, 2> {};
template <>
struct BiasedForwardTiling<128, 128> : Tiling<128, 128, 2, 128, 2, 2, true, 1> {};
template <>
struct BiasedForwardTiling<128, 64> : Tiling<128, 64, 2, 128, 2, 2, true, 2> {};
template <>
struct BiasedForwardTiling<192, 128> : Tiling<192, 128, 2, 64, 2, 2, true, 2> {};
template <>
struct BiasedForwardTiling<256, 256> : Tiling<256, 256, 2, 64, 2, 1, true, 2> {};

// Products of E4M3 payloads. The sums of an 8-bit product lose what their mantissas have no bits for: each
// block's is added to the output in fp32, which takes dim_v / 2 registers more. The queries' buffer also
// holds the output, which is wider.
template <int kDimQkValue, int kDimVValue, int kStagesValue, bool kTakeTurnsValue, int kPartsFirstValue>
struct NativeTiling : Tiling<kDimQkValue, kDimVValue, 2, 128, 2, 1, kTakeTurnsValue> {
  using Base = Tiling<kDimQkValue, kDimVValue, 2, 128, 2, 1, kTakeTurnsValue>;
  // Halves of a block whose exponentials are made before the previous block's product has ended.
  static constexpr int kPartsFirst = kPartsFirstValue;
  using Base::kBlock, Base::kConsumers, Base::kTileRows, Base::kDimQk, Base::kDimV;
  static constexpr bool kFp8 = true, kNative = true;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kStages = kStagesValue, kQueryStages = 2;
  static constexpr bool kEarlyStart = true, kStageOutput = true;
  static constexpr int kLine = kDimQk % 128 == 0 ? 128 : 64;  // of queries and keys, see wgmma.cuh
  static constexpr int kQueryGroupBytes = 64 * (kDimQk > 2 * kDimV ? kDimQk : 2 * kDimV);
  static constexpr int kQueryBytes = kConsumers * kQueryGroupBytes;
  static constexpr int kQueryCopyBytes = kTileRows * kDimQk;
  static constexpr int kKeyBytes = kBlock * kDimQk;
  static constexpr int kValueBytes = kBlock * kDimV;
  static constexpr int kTileBytes = kQueryStages * kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  static constexpr int kSharedBytes = kTileBytes + Base::kControlBytes + kSharedAlignment;
  static_assert(RegistersSuffice(kConsumers, kProducerRegisters, kConsumerRegisters));
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// Chosen by measurement on an H100.
template <int kDimQk, int kDimV>
struct NativeForwardTiling;
template <>
struct NativeForwardTiling<64, 64> : NativeTiling<64, 64, 4, false, 2> {};
template <>
struct NativeForwardTiling<128, 128> : NativeTiling<128, 128, 4, true, 0> {};
template <>
struct NativeForwardTiling<128, 64> : NativeTiling<128, 64, 4, true, 2> {};
template <>
struct NativeForwardTiling<192, 128> : NativeTiling<192, 128, 3, true, 0> {};

// The same where the output and a product of all its dims are more registers than there are: the product is
// made in parts of kPartDims dims (parts_consumer.cuh).
template <int kDimQkValue, int kDimVValue, int kStagesValue, int kPartDimsValue>
struct PartsTiling : Tiling<kDimQkValue, kDimVValue, 2, 128, 1, 1, true> {
  using Base = Tiling<kDimQkValue, kDimVValue, 2, 128, 1, 1, true>;
  using Base::kBlock, Base::kConsumers, Base::kTileRows, Base::kDimQk, Base::kDimV, Base::kQueryStages;
  static constexpr bool kFp8 = true, kNative = true;
  static constexpr int kPartDims = kPartDimsValue;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kStages = kStagesValue;
  static constexpr int kLine = 128;
  static constexpr int kQueryGroupBytes = 64 * kDimQk;
  static constexpr int kQueryBytes = kConsumers * kQueryGroupBytes, kQueryCopyBytes = kQueryBytes;
  static constexpr int kKeyBytes = kBlock * kDimQk, kValueBytes = kBlock * kDimV;
  static constexpr int kTileBytes = kQueryStages * kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  static constexpr int kSharedBytes = kTileBytes + Base::kControlBytes + kSharedAlignment;
  static_assert(kDimQk % kLine == 0 && kDimV % kPartDims == 0);
  static_assert(RegistersSuffice(kConsumers, kProducerRegisters, kConsumerRegisters));
  static_assert(kSharedBytes <= kMaxSharedBytes);
};
template <>
struct NativeForwardTiling<256, 256> : PartsTiling<256, 256, 3, 128> {};

}  // namespace cppool::kernels::cuda::sm90
