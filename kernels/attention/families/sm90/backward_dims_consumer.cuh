// A consumer warpgroup of the backward kernel for head dims 192/128 and 256 with a bias
// (backward_dims_step.cuh). dq is handed over in two boxes, one after the other.
//
// Under the exponentials of a step dout v^T is under way; while dq's first box is handed over, dk and the
// next step's logits, while the second one is, the next step's dout v^T.
#pragma once

#include "kernels/attention/families/sm90/backward_dims_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardDimsConsumer : BackwardDimsStep<T, Config> {
  using Step = BackwardDimsStep<T, Config>;
  using Step::kRows, Step::kTileKeys, Step::kColumns, Step::kDkDims, Step::kDvDims, Step::kP, Step::kDs;
  using Step::shared_, Step::group_, Step::tiles_, Step::rings_;

 public:
  __device__ __forceinline__ BackwardDimsConsumer(const BackwardParameters& p,
                                                  const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  __device__ __forceinline__ void Run() {
    this->LeaveOperands();
    this->RunTiles(
        [this](int steps, float(&dk)[kDkDims / 2], float(&dv)[kDvDims / 2]) { RunSteps(steps, dk, dv); });
    this->TakeOperands();  // so that no arrival is left over
  }

  using Step::RunEmptyTiles;

 private:
  static constexpr int kDqDims = Config::kDqDims;
  static_assert(kDqDims == 64);

  __device__ __forceinline__ void RunSteps(int steps, float (&dk)[kDkDims / 2], float (&dv)[kDvDims / 2]) {
    float logits[kColumns / 2], dp[kColumns / 2];
    bool visible = this->BeginSteps(logits, dp);
    for (int step = 0; step < steps; ++step) {
      const StepInfo& now = this->StepOf(rings_);
      if (!visible && now.length < kRows) this->ClearQueries(now.length);
      if constexpr (Config::kBias) this->AddBias(logits, now);
      if (!visible) this->MaskTransposed(logits, now);
      this->Probabilities(logits);
      this->TakeOperands();
      std::uint32_t packed[kColumns / 4];
      PackOperand<POf<T, Config>>(logits, packed);
      this->StoreByKeys(kP, packed);
      WaitForProducts<0>();
      Settle(dp);
      if (!visible) this->HideDp(logits, dp);
      this->MakeDs(logits, dp, packed);
      this->StoreDs(packed, shared_.Ds(kDs), group_ * kColumns);
      ptx::FenceShared();
      ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);

      auto next = rings_;
      next.Advance();
      const bool more = step + 1 < steps;
      float dq[kDqDims / 2];
      BeginProducts();
      this->StartDv(dv);
      StartDq(dq, 0);
      this->StartDk(dk);
      if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
      // After a tile's last step these are for nothing: a branch would serialise the products.
      BeginProducts();
      this->StartLogits(logits, next.q().stage);
      WaitForProducts<3>();
      Settle(dv);
      ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
      WaitForProducts<2>();
      Settle(dq);
      if (DqParts<Config>::Owns(group_, 0)) this->HandOverDq(dq);
      BeginProducts();
      StartDq(dq, 1);
      if (more) ptx::Wait(shared_.FullDout(next.dout().stage), next.dout().parity);
      BeginProducts();
      this->StartDp(dp, next.dout().stage);
      visible = this->AllSeen(this->StepOf(next));
      WaitForProducts<1>();
      Settle(logits);
      Settle(dk);
      Settle(dq);
      this->LeaveOperands();
      this->HandOverDq(dq);
      ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
      rings_ = next;
    }
    WaitForProducts<0>();
    Settle(logits);
    Settle(dp);
  }

  // dq = ds k, of the `part`th 64 of this warpgroup's dims.
  __device__ __forceinline__ void StartDq(float (&dq)[kDqDims / 2], int part) const {
    const std::uint32_t dims =
        (static_cast<std::uint32_t>(group_) * DqParts<Config>::kApart + static_cast<std::uint32_t>(part)) *
        (kTileKeys * kRowBytes);
    StartProductOverRows<T, kTileKeys, kDqDims, kRows>(
        dq, Operand::OverDim(shared_.Ds(kDs)),
        Operand::OverRows(shared_.Keys(tiles_.stage) + dims, kTileKeys));
    CommitProducts();
  }
};

}  // namespace cppool::kernels::cuda::sm90
