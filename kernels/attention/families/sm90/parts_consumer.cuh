// A consumer warpgroup of the forward kernel with products of payloads for head dim 256: 64 query rows of
// each tile, whose output takes 128 registers a thread.
//
// There is no room for a product of all dims beside the output. A block's product with the values is made in
// parts of kPartDims dims, one after another in the registers that the logits had, and each is added to the
// output in fp32. A turn is a block's parts and the next block's logits: one warpgroup's softmax falls under
// the other's turn. All of a block is in one loop body: with a tile's first block apart the assembler gave
// logits and parts registers of their own, and put the output into local memory.
#pragma once

#include "kernels/attention/families/sm90/consumer.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class PartsConsumer : Consumer<T, Config> {
  using Base = Consumer<T, Config>;
  using Base::kDimV, Base::kBlock, Base::kOperand;
  using Base::shared_, Base::group_, Base::keys_, Base::index_, Base::tile;
  using typename Base::P;
  static_assert(Config::kNative && Config::kTakeTurns);
  // A tile's info and its queries' buffer then have the same parity.
  static_assert(Config::kQueryStages == 1);

 public:
  __device__ __forceinline__ PartsConsumer(const ForwardParameters& p, const Shared<Config>& shared)
      : Base(p, shared) {}

  __device__ __forceinline__ void Run() {
    ptx::Wait(shared_.FullQ(0), 0);
    if (tile().head < 0) return;
    if (group_ == Config::kConsumers - 1) this->PassTurn();
    float out[kDimV / 2];
    SoftmaxState state;
    while (tile().head >= 0) {
      state.Clear();
      state.Ignore(this->Rows().valid);
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) out[i] = 0;
      this->TakeTurn();
      for (int left = tile().blocks; left > 0; --left) {
        float logits[kBlock / 2];
        std::uint32_t exponentials[kOperand];
        ptx::Wait(shared_.FullK(keys_.stage), keys_.parity);
        BeginProducts();
        this->StartLogits(logits, 0);
        this->PassTurn();
        const bool visible = this->NextVisible();
        WaitForProducts<0>();
        Settle(logits);
        const auto taken = this->TakeBlock(logits, visible, left == 1);
        const Rescale rescale = FollowMost<Config>(logits, state, this->ScaleLog2());
        ExponentiateParts<0, kParts<kBlock>>(logits, state, this->ScaleLog2(), this->Lift(), taken.seen);
        PackOperand<P>(logits, exponentials);
        Settle(exponentials);
        this->WaitForValues(taken.keys);
        this->TakeTurn();
        AddProduct(exponentials, rescale, out);
        this->Release(shared_.EmptyV(keys_.Previous().stage));
      }
      this->PassTurn();
      this->WriteTile(state, out);
      index_ ^= 1;
      ptx::Wait(shared_.FullQ(0), index_);
    }
    if (group_ == 0) this->TakeTurn();  // that nobody else takes
  }

  using Base::RunEmptyTiles;

 private:
  // out = out * rescale + exponentials values
  __device__ __forceinline__ void AddProduct(std::uint32_t (&exponentials)[kOperand], const Rescale& rescale,
                                             float (&out)[kDimV / 2]) const {
    constexpr int kDims = Config::kPartDims;
#pragma unroll
    for (int first = 0; first < kDimV; first += kDims) {
      float part[kDims / 2];
      const std::uint32_t values = shared_.Values(keys_.Previous().stage) + first * kRowBytes;
      BeginProducts();
      StartProductE4M3<kBlock, kDims>(part, exponentials, Operand::OverLines<kRowBytes>(values));
      CommitProducts();
      WaitForProducts<0>();
      Settle(part);
#pragma unroll
      for (int i = 0; i < kDims / 2; ++i) {
        float& sum = out[first / 2 + i];
        sum = fmaf(sum, rescale.factor[i / 2 % 2], part[i]);
      }
    }
    Settle(exponentials);
  }
};

}  // namespace cppool::kernels::cuda::sm90
