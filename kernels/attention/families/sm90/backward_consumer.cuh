// A consumer warpgroup of the backward kernel for head dims 128 and 128/64: 64 keys of each tile, blocks of
// 64 queries (backward_keys_step.cuh).
//
// Products follow each other in this order: dv, the next step's logits, dq, dk, the next step's dout v^T. ds
// is made under dv, the barrier for it falls under the logits, exponentials fall under dq and dk, the handing
// over of dq under dk. dk takes ds^T from shared memory: in registers it would leave too few for the logits
// that are under way. No product is under way at the end of the loop: the next wait would not be for all of
// them, and the assembler would put products one after another.
#pragma once

#include "kernels/attention/families/sm90/backward_keys_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardConsumer : BackwardKeysStep<T, Config> {
  using Step = BackwardKeysStep<T, Config>;
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kDqDims;
  using Step::shared_, Step::rings_, Step::ds_buffer_;
  static_assert(kRows == 64);

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParameters& p,
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
    std::uint32_t p[kRows / 4];
    bool visible = this->BeginSteps(logits, dp);
    MakeProbabilities(logits, visible, true);
    PackOperand<POf<T, Config>>(logits, p);
    Settle(p);
    WaitForProducts<0>();
    Settle(dp);
    for (int step = 0; step < steps; ++step) {
      const StepInfo& now = this->StepOf(rings_);
      auto next = rings_;
      next.Advance();
      const bool more = step + 1 < steps;
      if (!visible && now.length < kRows) this->ClearQueries(now.length);
      this->StartDv(dv, p, 0);
      if (!visible) this->HideDp(logits, dp);
      std::uint32_t ds[kRows / 4];
      this->template MakeDs<>(logits, dp, ds);
      this->StoreDs(ds, this->OwnDs(ds_buffer_), 0);
      ptx::FenceShared();
      if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
      // After a tile's last step these logits, their exponentials and dout v^T are for nothing, whatever they
      // read: a branch would serialise the products.
      BeginProducts();
      this->StartLogits(logits, next.q().stage);
      ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);
      WaitForProducts<1>();
      Settle(dv);
      Settle(p);
      ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
      float dq[kDqDims / 2];
      BeginProducts();
      this->StartDq(dq);
      StartDk(dk);
      if (more) ptx::Wait(shared_.FullDout(next.dout().stage), next.dout().parity);
      rings_ = next;
      visible = this->AllSeen(this->StepOf(rings_));
      WaitForProducts<2>();
      Settle(logits);
      MakeProbabilities(logits, visible, more);
      WaitForProducts<1>();
      Settle(dq);
      this->HandOverDq(dq);
      BeginProducts();
      this->StartDp(dp, rings_.dout().stage);
      WaitForProducts<1>();
      Settle(dk);
      ptx::Arrive(shared_.EmptyQ(rings_.q().Previous().stage));
      PackOperand<POf<T, Config>>(logits, p);
      Settle(p);
      WaitForProducts<0>();
      Settle(dp);
      ds_buffer_ ^= 1;
    }
  }

  // Works on the step that rings_ names, if there is one.
  __device__ __forceinline__ void MakeProbabilities(float (&logits)[kRows / 2], bool visible, bool exists) {
    const StepInfo& block = this->StepOf(rings_);
    if constexpr (Config::kBias) {
      if (exists) this->AddBias(logits, block);
    }
    if (!visible) this->MaskTransposed(logits, block);
    this->Probabilities(logits);
  }

  // dk += ds^T q
  __device__ __forceinline__ void StartDk(float (&dk)[kDimQk / 2]) const {
    StartProductOverBothRows<T, kRows, kDimQk>(dk, Operand::OverRows(this->OwnDs(ds_buffer_), kRows),
                                               Operand::OverRows(shared_.Queries(rings_.q().stage), kRows));
    CommitProducts();
  }
};

}  // namespace cppool::kernels::cuda::sm90
