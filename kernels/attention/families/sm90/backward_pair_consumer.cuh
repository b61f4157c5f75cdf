// A consumer warpgroup of the backward kernel for head dim 256, in clusters of two thread blocks: a block has
// 64 keys of a tile of 128, and divides the products of one step between its warpgroups as
// backward_dims_step.cuh says, but for dq: of that each block makes one half of the dims, of all 128 keys, so
// that half as much is added to memory for a pair of a key and a query. To this end each block sends its ds
// to the other (FlashAttention-4's backward pass for head dim 256).
//
// Exponentials fall under dout v^T, ds is made under dv. dq comes late, so that ds travels under dk; it is
// handed over in two boxes, one under the next step's logits, one after its exponentials, so that these wait
// for no box to be read. No product is under way at the end of the loop, see backward_consumer.cuh.
#pragma once

#include "kernels/attention/families/sm90/backward_dims_step.cuh"
#include "kernels/attention/families/sm90/cluster.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardPairConsumer : BackwardDimsStep<T, Config> {
  using Step = BackwardDimsStep<T, Config>;
  using Step::kDimQk, Step::kRows, Step::kTileKeys, Step::kColumns, Step::kDkDims, Step::kDvDims;
  using Step::shared_, Step::group_, Step::tiles_, Step::rings_, Step::tile;
  using typename Step::Buffer, Step::kP, Step::kDs, Step::kOtherDs;

 public:
  __device__ __forceinline__ BackwardPairConsumer(const BackwardParameters& p,
                                                  const BackwardShared<Config>& shared)
      : Step(p, shared), rank_(ptx::ClusterRank()) {}

  __device__ __forceinline__ void Run() {
    this->LeaveOperands();
    this->RunTiles(
        [this](int steps, float(&dk)[kDkDims / 2], float(&dv)[kDvDims / 2]) { RunSteps(steps, dk, dv); });
    this->TakeOperands();  // so that no arrival is left over
  }

  using Step::RunEmptyTiles;

 private:
  // Of dq a warpgroup makes kOwnDqDims in all, and hands over kDqDims in a box.
  static constexpr int kOwnDqDims = kDimQk / 4, kDqDims = Config::kDqDims;
  static_assert(kOwnDqDims == 64 && kDqDims == 32 && !Config::kBias);

  __device__ __forceinline__ void RunSteps(int steps, float (&dk)[kDkDims / 2], float (&dv)[kDvDims / 2]) {
    if (tile().other_length < kTileKeys) ClearOtherKeys(tile().other_length);
    float logits[kColumns / 2], dp[kColumns / 2], dq[kOwnDqDims / 2];
    bool visible = this->BeginSteps(logits, dp);
    MakeP(logits, visible);
    ShareP();
    WaitForProducts<0>();
    Settle(dp);
    for (int step = 0; step < steps; ++step) {
      const StepInfo& now = this->StepOf(rings_);
      auto next = rings_;
      next.Advance();
      const bool more = step + 1 < steps;
      if (!visible && now.length < kRows) this->ClearQueries(now.length);
      BeginProducts();
      this->StartDv(dv);
      if (!visible) this->HideDp(logits, dp);
      std::uint32_t ds[kColumns / 4];
      this->MakeDs(logits, dp, ds);
      ptx::Wait(shared_.EmptyOtherDs(), ds_parity_ ^ 1);
      this->StoreDs(ds, shared_.Ds(kDs), group_ * kColumns);
      ptx::FenceShared();
      ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);
      SendDs();
      BeginProducts();
      this->StartDk(dk);
      WaitForProducts<1>();
      Settle(dv);
      ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
      BeginProducts();
      StartDq<false>(dq, kDs, shared_.Keys(tiles_.stage) + (rank_ * 2 + group_) * (kTileKeys * kRowBytes));
      ptx::Wait(shared_.FullOtherDs(), ds_parity_);
      BeginProducts();
      StartDq<true>(dq, kOtherDs, shared_.OtherKeys() + group_ * (kTileKeys * kRowBytes));
      CommitProducts();
      if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
      // After a tile's last step these logits, their exponentials and dout v^T are for nothing, whatever they
      // read: a branch would serialise the products.
      BeginProducts();
      this->StartLogits(logits, next.q().stage);
      WaitForProducts<1>();
      Settle(dk);
      Settle(dq);
      ReleaseOtherDs();
      this->LeaveOperands();
      HandOver<0>(dq);
      ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
      if (more) ptx::Wait(shared_.FullDout(next.dout().stage), next.dout().parity);
      BeginProducts();
      this->StartDp(dp, next.dout().stage);
      visible = this->AllSeen(this->StepOf(next));
      WaitForProducts<1>();
      Settle(logits);
      rings_ = next;
      ds_parity_ ^= 1;
      MakeP(logits, visible);
      HandOver<1>(dq);
      ShareP();
      WaitForProducts<0>();
      Settle(dp);
    }
    this->LeaveOperands();
  }

  // p^T of the step that rings_ names, if there is one, to shared memory.
  __device__ __forceinline__ void MakeP(float (&logits)[kColumns / 2], bool visible) const {
    if (!visible) this->MaskTransposed(logits, this->StepOf(rings_));
    this->Probabilities(logits);
    std::uint32_t packed[kColumns / 4];
    PackOperand<POf<T, Config>>(logits, packed);
    this->TakeOperands();
    this->StoreByKeys(kP, packed);
  }
  __device__ __forceinline__ void ShareP() const {
    ptx::FenceShared();
    ptx::SyncNamed(kPBarrier, 2 * kWarpgroup);
  }
  // One thread copies ds to the other block of the cluster, when both warpgroups have written it. When that
  // block says that it has read the copy, this block's ds may be overwritten, too.
  __device__ __forceinline__ void SendDs() const {
    if (threadIdx.x == kWarpgroup) {
      ptx::ArriveExpecting(shared_.FullOtherDs(), Config::kDsBytes);
      ptx::CopyIn(ptx::In(shared_.Ds(kOtherDs), rank_ ^ 1), shared_.Ds(kDs), Config::kDsBytes,
                  ptx::In(shared_.FullOtherDs(), rank_ ^ 1));
    }
    __syncwarp();
  }
  // Hands over a box of this warpgroup's dq.
  template <int kBox>
  __device__ __forceinline__ void HandOver(const float (&dq)[kOwnDqDims / 2]) {
    this->TakeDq();
    this->template StoreDq<kBox * kDqDims / 2, kOwnDqDims / 2, kDqDims / 2>(dq, 0);
    this->AnnounceDq();
  }
  // This warp's products have read the other's ds.
  __device__ __forceinline__ void ReleaseOtherDs() const {
    if (Step::Lane() == 0) ptx::ArriveIn(ptx::In(shared_.EmptyOtherDs(), rank_ ^ 1));
    __syncwarp();
  }
  __device__ __forceinline__ void ClearOtherKeys(int rows) const {
    Step::template ClearRows<kDimQk / 2, kTileKeys>(shared_.OtherKeys(), rows);
    ptx::FenceShared();
    ptx::SyncNamed(kBackwardGroupBarrier + ptx::Opaque(group_), kWarpgroup);
  }

  // dq = ds k, of 64 dims of the keys of one of the blocks, or dq += ds k.
  template <bool kAdd>
  __device__ __forceinline__ void StartDq(float (&dq)[kOwnDqDims / 2], Buffer ds, std::uint32_t keys) const {
    StartProductOverRows<T, kTileKeys, kOwnDqDims, kRows, kAdd>(
        dq, Operand::OverDim(shared_.Ds(ds)), Operand::OverRows(ptx::Opaque(keys), kTileKeys));
  }

  const int rank_;  // of the block in its cluster
  std::uint32_t ds_parity_ = 0;
};

}  // namespace cppool::kernels::cuda::sm90
