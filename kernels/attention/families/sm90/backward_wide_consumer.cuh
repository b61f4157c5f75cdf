// A consumer warpgroup of the backward kernel for head dim 64: 64 keys of each tile, blocks of 128 queries
// (backward_keys_step.cuh). p is packed in halves, which takes fewer registers.
//
// The products of a step run under the arithmetic of its neighbours: while dq is handed over, dk and the next
// step's logits are under way, and the next step's exponentials fall under its dout v^T. dk takes ds^T from
// registers. The order of backward_consumer.cuh is 3 % slower here: dk would, like dq, be a product of 64
// columns with both operands from shared memory.
#pragma once

#include "kernels/attention/families/sm90/backward_keys_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardWideConsumer : BackwardKeysStep<T, Config> {
  using Step = BackwardKeysStep<T, Config>;
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kDqDims;
  using Step::shared_, Step::rings_, Step::ds_buffer_;
  static_assert(kRows == 128);

 public:
  __device__ __forceinline__ BackwardWideConsumer(const BackwardParameters& p,
                                                  const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  __device__ __forceinline__ void Run() {
    this->RunTiles(
        [this](int steps, float(&dk)[kDimQk / 2], float(&dv)[kDimV / 2]) { RunSteps(steps, dk, dv); });
  }

  using Step::RunEmptyTiles;

 private:
  __device__ __forceinline__ void RunSteps(int steps, float (&dk)[kDimQk / 2], float (&dv)[kDimV / 2]) {
    float logits[kRows / 2], dp[kRows / 2];
    std::uint32_t p[2][16];
    bool visible = this->BeginSteps(logits, dp);
    for (int step = 0; step < steps; ++step) {
      const StepInfo& now = this->StepOf(rings_);
      if (!visible && now.length < kRows) this->ClearQueries(now.length);
      if constexpr (Config::kBias) this->AddBias(logits, now);
      if (!visible) this->MaskTransposed(logits, now);
      this->Probabilities(logits);
      PackHalf<0>(logits, p[0]);  // before the wait: under the product
      WaitForProducts<0>();
      Settle(dp);
      if (!visible) this->HideDp(logits, dp);
      std::uint32_t ds[kRows / 4];
      this->StartDv(dv, p[0], 0);
      this->template MakeDs<0, 8>(logits, dp, ds);
      PackHalf<1>(logits, p[1]);
      this->StartDv(dv, p[1], 1);
      this->template MakeDs<8, 8>(logits, dp, ds);
      this->StoreDs(ds, this->OwnDs(ds_buffer_), 0);
      ptx::FenceShared();
      ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);
      WaitForProducts<0>();  // dv
      Settle(dv);
      Settle(p[0]);
      Settle(p[1]);

      auto next = rings_;
      next.Advance();
      const bool more = step + 1 < steps;
      float dq[kDqDims / 2];
      BeginProducts();
      this->StartDq(dq);
      StartProduct<T, kRows, kDimQk>(dk, ds, Operand::OverRows(shared_.Queries(rings_.q().stage), kRows));
      CommitProducts();
      if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
      // After a tile's last step these are for nothing: a branch would serialise the products.
      BeginProducts();
      this->StartLogits(logits, next.q().stage);
      WaitForProducts<2>();
      Settle(dq);
      this->HandOverDq(dq);
      ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
      WaitForProducts<1>();  // dp takes the registers of dk's operand
      Settle(dk);
      Settle(ds);
      if (more) ptx::Wait(shared_.FullDout(next.dout().stage), next.dout().parity);
      BeginProducts();
      this->StartDp(dp, next.dout().stage);
      visible = this->AllSeen(this->StepOf(next));
      WaitForProducts<1>();
      Settle(logits);
      ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
      rings_ = next;
      ds_buffer_ ^= 1;
    }
    WaitForProducts<0>();
    Settle(logits);
    Settle(dp);
  }

  // Probabilities of the `kHalf`th 64 queries as an operand: an array of their own, which is read while the
  // other half is packed.
  template <int kHalf>
  static __device__ __forceinline__ void PackHalf(const float (&p)[kRows / 2], std::uint32_t (&operand)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      operand[i] = ptx::Pack<POf<T, Config>>(p[kHalf * 32 + i * 2], p[kHalf * 32 + i * 2 + 1]);
    }
    Settle(operand);
  }
};

}  // namespace cppool::kernels::cuda::sm90
