// A consumer warpgroup of the backward kernel for head dims 192/128: 64 keys of each tile, as in
// backward_consumer.cuh, but a block's queries one half after the other: dk and dv take 160 registers, which
// leaves no room for logits and dout v^T of all.
//
// ds of both halves and of both warpgroups is multiplied by the keys at once. Of dq's 192 dims each warpgroup
// makes 96: 64 of a box to itself, then one half of the box in the middle, each while the other registers
// hold nothing else.
//
// A half's exponentials fall under its dout v^T, its ds is made under dv; dq's first part is handed over
// under dk, its second part under the next block's logits.
#pragma once

#include "kernels/attention/families/sm90/backward_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardHalvesConsumer : BackwardStep<T, Config> {
  using Step = BackwardStep<T, Config>;
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kTileKeys, Step::kColumns;
  using Step::shared_, Step::group_, Step::tiles_, Step::rings_;

 public:
  __device__ __forceinline__ BackwardHalvesConsumer(const BackwardParameters& p,
                                                    const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  __device__ __forceinline__ void Run() {
    LeaveDs();
    this->RunTiles(
        [this](int steps, float(&dk)[kDimQk / 2], float(&dv)[kDimV / 2]) { RunSteps(steps, dk, dv); });
    TakeDs();  // so that no arrival is left over
  }

  using Step::RunEmptyTiles;

 private:
  static constexpr int kOwnDims = 64, kMiddleDims = 32;
  static_assert(kOwnDims + kMiddleDims == Config::kDqDims && kColumns == 32 && !Config::kBias);

  __device__ __forceinline__ void RunSteps(int steps, float (&dk)[kDimQk / 2], float (&dv)[kDimV / 2]) {
    float logits[kColumns / 2], dp[kColumns / 2];
    std::uint32_t p[kColumns / 4], ds[kColumns / 4];

    ptx::Wait(shared_.FullQ(rings_.q().stage), rings_.q().parity);
    BeginProducts();
    StartLogits(logits, rings_.q().stage, 0);
    WaitForProducts<0>();
    Settle(logits);
    for (int step = 0; step < steps; ++step) {
      const StepInfo& now = this->StepOf(rings_);
      ptx::Wait(shared_.FullDout(rings_.dout().stage), rings_.dout().parity);
      if (now.length < kRows) this->ClearQueries(now.length);
      BeginProducts();
      StartDp(dp, rings_.dout().stage, 0);
      const bool visible = this->AllSeen(now);

      if (!visible) this->MaskTransposed(logits, now, 0);
      this->Probabilities(logits, 0);
      PackOperand<POf<T, Config>>(logits, p);
      Settle(p);
      BeginProducts();
      StartDv(dv, p, 0);
      WaitForProducts<1>();
      Settle(dp);
      if (!visible) this->HideDp(logits, dp);
      this->MakeDs(logits, dp, ds, 0);
      Settle(ds);
      BeginProducts();
      StartLogits(logits, rings_.q().stage, 1);
      TakeDs();
      this->StoreDs(ds, this->OwnDs(0), 0);
      StartDk(dk, ds, 0);
      StartDp(dp, rings_.dout().stage, 1);
      WaitForProducts<1>();
      Settle(dk);
      Settle(ds);
      Settle(dv);
      Settle(p);
      Settle(logits);

      if (!visible) this->MaskTransposed(logits, now, 1);
      this->Probabilities(logits, 1);
      PackOperand<POf<T, Config>>(logits, p);
      Settle(p);
      BeginProducts();
      StartDv(dv, p, 1);
      WaitForProducts<1>();
      Settle(dp);
      if (!visible) this->HideDp(logits, dp);
      this->MakeDs(logits, dp, ds, 1);
      Settle(ds);
      this->StoreDs(ds, this->OwnDs(0), kColumns);
      ptx::FenceShared();
      ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);

      auto next = rings_;
      next.Advance();
      const bool more = step + 1 < steps;
      float own_dq[kOwnDims / 2];
      BeginProducts();
      StartDq<kOwnDims>(own_dq, OwnKeys());
      StartDk(dk, ds, 1);
      WaitForProducts<1>();
      Settle(dv);
      Settle(p);
      Settle(own_dq);
      ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
      this->TakeDq();
      this->StoreDq(own_dq, group_);
      float middle_dq[kMiddleDims / 2];
      BeginProducts();
      StartDq<kMiddleDims>(middle_dq, MiddleKeys());
      if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
      // After a tile's last step this is for nothing: a branch would serialise the products.
      BeginProducts();
      StartLogits(logits, next.q().stage, 0);
      WaitForProducts<1>();
      Settle(dk);
      Settle(ds);
      Settle(middle_dq);
      LeaveDs();
      this->StoreDq(middle_dq, (group_ ^ 1) * 2);
      this->AnnounceDq();
      ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
      WaitForProducts<0>();
      Settle(logits);
      rings_ = next;
    }
  }

  // ds in shared memory may be written when both warpgroups' products have read that of the step before.
  __device__ __forceinline__ void TakeDs() const {
    ptx::SyncNamed(kFreeBarrier + ptx::Opaque(group_), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void LeaveDs() const {
    ptx::ArriveNamed(kFreeBarrier + (ptx::Opaque(group_) ^ 1), 2 * kWarpgroup);
  }

  // logits = k q^T, of this warpgroup's keys and one half of the queries.
  __device__ __forceinline__ void StartLogits(float (&logits)[kColumns / 2], int stage, int half) const {
    StartTransposed<T, kDimQk, kColumns, kTileKeys, kRows>(
        logits, Operand::OverDim(shared_.Keys(tiles_.stage) + group_ * (64 * kRowBytes)),
        Operand::OverDim(shared_.Queries(stage) + half * (kColumns * kRowBytes)));
    CommitProducts();
  }
  // dp = v dout^T
  __device__ __forceinline__ void StartDp(float (&dp)[kColumns / 2], int stage, int half) const {
    StartTransposed<T, kDimV, kColumns, kTileKeys, kRows>(
        dp, Operand::OverDim(ptx::Opaque(shared_.Values(tiles_.stage) + group_ * (64 * kRowBytes))),
        Operand::OverDim(shared_.Dout(stage) + half * (kColumns * kRowBytes)));
    CommitProducts();
  }
  // dv += p^T dout
  __device__ __forceinline__ void StartDv(float (&dv)[kDimV / 2], const std::uint32_t (&p)[kColumns / 4],
                                          int half) const {
    StartProduct<T, kColumns, kDimV>(
        dv, p, Operand::OverRows(shared_.Dout(rings_.dout().stage) + half * (kColumns * kRowBytes), kRows));
    CommitProducts();
  }
  // dk += ds^T q
  __device__ __forceinline__ void StartDk(float (&dk)[kDimQk / 2], const std::uint32_t (&ds)[kColumns / 4],
                                          int half) const {
    StartProduct<T, kColumns, kDimQk>(
        dk, ds, Operand::OverRows(shared_.Queries(rings_.q().stage) + half * (kColumns * kRowBytes), kRows));
    CommitProducts();
  }
  // dq = ds k, of kDims dims, whose part of the keys is at `keys`.
  template <int kDims>
  __device__ __forceinline__ void StartDq(float (&dq)[kDims / 2], std::uint32_t keys) const {
    StartProductOverRows<T, kTileKeys, kDims, kRows>(dq, Operand::OverDim(ptx::Opaque(shared_.Ds(0))),
                                                     Operand::OverRows(ptx::Opaque(keys), kTileKeys));
    CommitProducts();
  }
  // The first box of 64 dims, or the last one.
  __device__ __forceinline__ std::uint32_t OwnKeys() const {
    return shared_.Keys(tiles_.stage) + group_ * (2 * kTileKeys * kRowBytes);
  }
  // One half of the second box: its rows are swizzled by the bits of their addresses above these.
  __device__ __forceinline__ std::uint32_t MiddleKeys() const {
    return shared_.Keys(tiles_.stage) + kTileKeys * kRowBytes + group_ * (kMiddleDims * 2);
  }
};

}  // namespace cppool::kernels::cuda::sm90
