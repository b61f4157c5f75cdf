// A consumer warpgroup of the forward kernel: 64 query rows of each tile.
//
// The maximum of one block's logits is found under the product of the previous block's exponentials with its
// values. (The assembler puts the exponentials after that product; a branch that kept them before it gained
// nothing.) With kEarlyStart a tile's first product runs under the output of the tile before. With kTakeTurns
// the warpgroups issue their products in turn, the same number each, so that one's softmax falls under
// another's products.
//
// Watch the assembled loop: a ring's stage that the compiler cannot see to be the same in all threads costs
// moves to uniform registers between the products, and a tenth of the rate.
#pragma once

#include <type_traits>
#include <variant>

#include "kernels/attention/families/sm90/bias.cuh"
#include "kernels/attention/families/sm90/epilogue.cuh"
#include "kernels/attention/families/sm90/mask.cuh"
#include "kernels/attention/families/sm90/shared.cuh"
#include "kernels/attention/families/sm90/softmax.cuh"
#include "kernels/attention/families/sm90/wgmma.cuh"

namespace cppool::kernels::cuda::sm90 {

// Named barriers: one per consumer for its turn, then one per consumer among its own warps.
inline constexpr int kTurnBarrier = 1, kGroupBarrier = 4;

template <typename T, typename Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const ForwardParameters& p, const Shared<Config>& shared)
      : p_(p),
        shared_(shared),
        group_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)),
        warp_row_(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {}

  __device__ __forceinline__ void Run() {
    ptx::Wait(shared_.FullQ(0), 0);
    if (tile().head < 0) return;
    if (Config::kTakeTurns && group_ == Config::kConsumers - 1) PassTurn();
    float logits[kBlock / 2];
    float out[kDimV / 2];
    std::uint32_t exponentials[kOperand];
    [[maybe_unused]] Promoted promoted;
    SoftmaxState state;
    StartTile(logits);
    while (true) {
      state.Clear();
      state.Ignore(Rows().valid);
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) out[i] = 0;
      if constexpr (Config::kNative) promoted.Clear();
      if (!Config::kFp8 && !p_.first) ReadState<kDimV>(p_, Rows(), state, out);
      const int blocks = tile().blocks;

      bool visible = NextVisible();
      WaitForProducts<0>();
      Settle(logits);
      Taken taken = TakeBlock(logits, visible, blocks == 1);
      const Rescale begun = FollowMost<Config>(logits, state, ScaleLog2());
      if constexpr (!Config::kNative) begun.Apply(out);
      Exponentiate<P>(logits, state, ScaleLog2(), Config::kFp8 ? Lift() : 0.0f, taken.seen, exponentials);
      if constexpr (Config::kStageOutput) ReleaseLastTile();
      for (int block = 1; block < blocks; ++block) {
        WaitForValues(taken.keys);  // before the next keys: they come in this order
        ptx::Wait(shared_.FullK(keys_.stage), keys_.parity);
        TakeTurn();
        BeginProducts();
        StartLogits(logits, query_.stage);
        StartOutput(out, exponentials);
        PassTurn();
        visible = NextVisible();
        WaitForProducts<1>();
        Settle(logits);
        taken = TakeBlock(logits, visible, block + 1 == blocks);
        const Rescale rescale = FollowMost<Config>(logits, state, ScaleLog2());
        if constexpr (Config::kNative)
          ExponentiateParts<0, Config::kPartsFirst>(logits, state, ScaleLog2(), Lift(), taken.seen);
        WaitForProducts<0>();
        Settle(out);
        Settle(exponentials);
        Release(shared_.EmptyV(keys_.Previous().Previous().stage));
        if constexpr (Config::kNative) {
          promoted.Add(out, rescale);
          ExponentiateParts<Config::kPartsFirst, kParts<kBlock>>(logits, state, ScaleLog2(), Lift(),
                                                                 taken.seen);
          PackOperand<P>(logits, exponentials);
        } else {
          rescale.Apply(out);
          Exponentiate<P>(logits, state, ScaleLog2(), Config::kFp8 ? Lift() : 0.0f, taken.seen, exponentials);
        }
      }

      bool more = false;
      WaitForValues(taken.keys);
      if constexpr (Config::kEarlyStart) {
        Ring<kQueryStages> next = query_;
        next.Advance();
        ptx::Wait(shared_.FullQ(next.stage), next.parity);
        more = shared_.control->tiles[index_ ^ 1].head >= 0;
        if (more) ptx::Wait(shared_.FullK(keys_.stage), keys_.parity);
        TakeTurn();
        BeginProducts();
        StartOutput(out, exponentials);
        // After the last tile for nothing: a branch would serialise the products.
        StartLogits(logits, next.stage);
        PassTurn();
        WaitForProducts<1>();
      } else {
        TakeTurn();
        BeginProducts();
        StartOutput(out, exponentials);
        PassTurn();
        WaitForProducts<0>();
      }
      Settle(out);
      Settle(exponentials);
      Release(shared_.EmptyV(keys_.Previous().stage));
      if constexpr (Config::kNative) promoted.AddTo(out);
      WriteTile(state, out);

      query_.Advance();
      index_ ^= 1;
      if constexpr (!Config::kEarlyStart) {
        ptx::Wait(shared_.FullQ(query_.stage), query_.parity);
        more = tile().head >= 0;
        if (more) StartTile(logits);
      }
      if (!more) break;
    }
    WaitForProducts<0>();
    if (threadIdx.x % 32 == 0) ptx::WaitForStoresToRead();
    if (Config::kTakeTurns && group_ == 0) TakeTurn();  // that nobody else takes
  }

  // Tiles that see no keys.
  __device__ __forceinline__ void RunEmptyTiles() {
    if (!p_.first && !p_.last) return;
    const int end = p_.work.tiles_count * p_.map.heads;
    for (int item = p_.work.busy_tiles * p_.map.heads + blockIdx.x; item < end; item += gridDim.x) {
      const Tile& tile = p_.work.tiles[item / p_.map.heads];
      const int first = group_ * 64 + warp_row_;
      const WarpRows rows{static_cast<int>(tile.row) / p_.work.query_step + first,
                          static_cast<int>(tile.row) % p_.work.query_step,
                          min(max(tile.length - first, 0), 16), item % p_.map.heads};
      SoftmaxState state;
      state.Clear();
      float out[kDimV / 2];
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) out[i] = 0;
      if (!p_.first) ReadState<kDimV>(p_, rows, state, out);
      Normalise<kDimV>(p_, rows, state, out);
      WriteRows<T, kDimV>(p_, rows, out);
    }
  }

 protected:
  static constexpr int kDimQk = Config::kDimQk, kDimV = Config::kDimV, kBlock = Config::kBlock;
  static constexpr int kQueryStages = Config::kQueryStages;
  using P = std::conditional_t<Config::kNative, E4M3, POf<T, Config>>;  // of exponentials as operands
  static constexpr int kOperand = kOperandRegisters<P, kBlock / 2>;

  // Native products: the output so far in fp32, to be multiplied with `factor`.
  struct Promoted {
    float sum[kDimV / 2];
    float factor[2];

    __device__ __forceinline__ void Clear() {
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) sum[i] = 0;
      factor[0] = factor[1] = 1;
    }
    // Adds a block's product, whose exponentials are relative to the maximum before `next`.
    __device__ __forceinline__ void Add(const float (&product)[kDimV / 2], const Rescale& next) {
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) sum[i] = fmaf(sum[i], factor[i / 2 % 2], product[i]);
      factor[0] = next.factor[0], factor[1] = next.factor[1];
    }
    // Makes the last block's product the whole output.
    __device__ __forceinline__ void AddTo(float (&product)[kDimV / 2]) const {
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) product[i] = fmaf(sum[i], factor[i / 2 % 2], product[i]);
    }
  };

  __device__ __forceinline__ float Scale() const {
    if constexpr (Config::kFp8) return shared_.control->units.scale;
    return p_.scale;
  }
  __device__ __forceinline__ float ScaleLog2() const {
    if constexpr (Config::kFp8) return shared_.control->units.scale_log2;
    return p_.scale_log2;
  }
  // For fp8 alone: called elsewhere, even for 0, it changes the instructions of other kernels.
  __device__ __forceinline__ float Lift() const {
    if constexpr (Config::kFp8) return shared_.control->units.lift;
    return 0;
  }

  __device__ __forceinline__ const TileInfo& tile() const { return shared_.control->tiles[index_]; }

  __device__ __forceinline__ void TakeTurn() const {
    if constexpr (Config::kTakeTurns) ptx::SyncNamed(kTurnBarrier + group_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void PassTurn() const {
    if constexpr (Config::kTakeTurns) {
      const int next = group_ + 1 == Config::kConsumers ? 0 : group_ + 1;
      ptx::ArriveNamed(kTurnBarrier + next, 2 * kWarpgroup);
    }
  }
  static __device__ __forceinline__ void Release(std::uint32_t empty) {
    if (threadIdx.x % 32 == 0) ptx::Arrive(empty);
  }

  __device__ __forceinline__ void StartLogits(float (&logits)[kBlock / 2], int query_stage) const {
    const std::uint32_t queries = shared_.Queries(query_stage) + group_ * Config::kQueryGroupBytes;
    if constexpr (Config::kNative) {
      constexpr int kLine = Config::kLine;
      StartTransposedE4M3<kDimQk, kBlock, kLine>(logits, Operand::OverLines<kLine>(queries),
                                                 Operand::OverLines<kLine>(shared_.Keys(keys_.stage)));
    } else {
      StartTransposed<T, kDimQk, kBlock>(logits, Operand::OverDim(queries),
                                         Operand::OverDim(shared_.Keys(keys_.stage)));
    }
    CommitProducts();
  }

  __device__ __forceinline__ void StartOutput(float (&out)[kDimV / 2],
                                              const std::uint32_t (&exponentials)[kOperand]) const {
    const std::uint32_t values = shared_.Values(keys_.Previous().stage);
    if constexpr (Config::kNative) {
      StartProductE4M3<kBlock, kDimV>(out, exponentials, Operand::OverLines<128>(values));
    } else {
      StartProduct<T, kBlock, kDimV>(out, exponentials, Operand::OverRows(values, kBlock));
    }
    CommitProducts();
  }

  __device__ __forceinline__ WarpRows Rows() const { return RowsOf(tile(), group_ * 64 + warp_row_); }

  // Starts a tile's first product.
  __device__ __forceinline__ void StartTile(float (&logits)[kBlock / 2]) {
    ptx::Wait(shared_.FullK(keys_.stage), keys_.parity);
    TakeTurn();
    BeginProducts();
    StartLogits(logits, query_.stage);
    PassTurn();
  }

  __device__ __forceinline__ void WriteTile(const SoftmaxState& state, float (&out)[kDimV / 2]) {
    const WarpRows rows = Rows();
    if constexpr (Config::kFp8) {
      NormaliseFp8<kDimV>(p_, rows, state, shared_.control->units, out);
    } else {
      Normalise<kDimV>(p_, rows, state, out);
    }
    if (p_.max_logit) RaiseMaxLogit(p_, rows, kMostIsLargest<Config> ? state.most : state.largest, Scale());
    if (Config::kStageOutput && p_.last) {
      // All warps have done with the queries.
      ptx::SyncNamed(kGroupBarrier + group_, kWarpgroup);
      WriteRowsStaged<T, kDimV>(
          p_, rows, out,
          shared_.Queries(query_.stage) + group_ * Config::kQueryGroupBytes + warp_row_ * (kDimV * 2));
    } else {
      WriteRows<T, kDimV>(p_, rows, out);
    }
  }

  // Returns the block at keys_. The thread that releases it reads it, so that the producer's next write comes
  // after.
  __device__ __forceinline__ BlockInfo Block() const {
    BlockInfo block{0, 0};
    if (threadIdx.x % 32 == 0) block = shared_.control->blocks[keys_.stage];
    return {__shfl_sync(~0u, block.position, 0), __shfl_sync(~0u, block.length, 0)};
  }

  // Whether no pair of the block under way is hidden.
  __device__ __forceinline__ bool NextVisible() const {
    const TileInfo& now = tile();
    const BlockInfo block = Block();
    return AllVisible<kBlock>(now.low, now.high, now.position + group_ * 64, block.position, block.length);
  }

  // What a bias is multiplied with.
  __device__ __forceinline__ float InverseScale() const {
    if constexpr (Config::kFp8) return shared_.control->units.inverse_scale;
    return p_.bias.inverse_scale;
  }

  // Adds the bias of the block at keys_.
  __device__ __forceinline__ void AddBias(float (&logits)[kBlock / 2]) {
    const BiasParameters& bias = p_.bias;
    if (bias.rows > 0) {
      ptx::Wait(shared_.FullBias(group_, bias_.stage), bias_.parity);
      AddBiasTile<T, kBlock>(logits, shared_.Bias(group_, bias_.stage), bias.rows > 1, InverseScale());
      ptx::ReleaseToCopies(shared_.EmptyBias(group_, bias_.stage));
      bias_.Advance();
    }
    if (bias.alibi_slopes) {
      const TileInfo& now = tile();
      const int row = group_ * 64 + warp_row_ + static_cast<int>(threadIdx.x) % 32 / 4;
      const BiasInfo& of_tile = shared_.control->biases[index_];
      AddAlibi<kBlock>(logits, of_tile.slope, Block().position - (now.position + row) - of_tile.diagonal);
    }
  }

  struct Taken {
    int keys;       // of the block
    unsigned seen;  // parts of the block of which the warpgroup sees a key
  };

  // After the product: adds the bias, masks its logits and releases its keys, after a tile's last block the
  // queries too if they have one buffer.
  __device__ __forceinline__ Taken TakeBlock(float (&logits)[kBlock / 2], bool visible, bool last) {
    if constexpr (Config::kBias) AddBias(logits);
    Taken taken{kBlock, kAllParts<kBlock>};
    if (!visible) {
      const TileInfo& now = tile();
      const BlockInfo block = Block();
      const int query = now.position + group_ * 64;
      taken = {block.length, SeenParts<kBlock>(now.low, now.high, query, min(now.length - group_ * 64, 64),
                                               block.position, block.length)};
      Mask<kBlock>(logits, now.low, now.high, query + warp_row_ + static_cast<int>(threadIdx.x) % 32 / 4,
                   block.position, block.length);
    }
    Release(shared_.EmptyK(keys_.stage));
    keys_.Advance();
    if (kQueryStages == 1 && last) ptx::Arrive(shared_.EmptyQ(0));
    return taken;
  }

  // Waits for a block's values. Rows from `keys` on are not its own and may hold NaN, which a weight of 0
  // does not hide: they become 0. Each warpgroup does so for itself.
  __device__ __forceinline__ void WaitForValues(int keys) const {
    const Ring<Config::kStages> values = keys_.Previous();
    ptx::Wait(shared_.FullV(values.stage), values.parity);
    if (Config::kNative || keys == kBlock) return;  // a transposed payload has 0 there
    const std::uint32_t tile = shared_.Values(values.stage);
    for (int i = threadIdx.x % kWarpgroup; i < (kBlock - keys) * 8; i += kWarpgroup) {
#pragma unroll
      for (int d = 0; d < kDimV / 64; ++d)
        ptx::StoreShared16(tile + (d * kBlock + keys) * kRowBytes + i * 16, make_uint4(0, 0, 0, 0));
    }
    ptx::FenceShared();
    ptx::SyncNamed(kGroupBarrier + group_, kWarpgroup);
  }

  // The previous tile's output has left the queries' buffer. All threads say so, since all have read its
  // TileInfo.
  __device__ __forceinline__ void ReleaseLastTile() {
    if (tiles_done_) {
      if (threadIdx.x % 32 == 0) ptx::WaitForStoresToRead();
      ptx::Arrive(shared_.EmptyQ(query_.stage ^ 1));
    }
    tiles_done_ = true;
  }

  const ForwardParameters& p_;
  const Shared<Config>& shared_;
  const int group_;
  const int warp_row_;  // the warp's first row of the warpgroup's 64
  int index_ = 0;       // of the tile's info
  bool tiles_done_ = false;
  Ring<kQueryStages> query_;
  Ring<Config::kStages> keys_;  // of the block whose product with the queries is next
  // Nothing without a bias: an unused ring changes what the compiler makes of some kernels.
  [[no_unique_address]] std::conditional_t<Config::kBias, Ring<Config::kBiasStages>, std::monostate> bias_;
};

}  // namespace cppool::kernels::cuda::sm90
