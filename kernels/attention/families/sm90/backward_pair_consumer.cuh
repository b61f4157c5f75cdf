// A consumer warpgroup of the backward kernel for head dim 256, in clusters of two thread blocks: a block has
// 64 keys of a tile of 128, and divides the products of one step between its warpgroups as
// backward_dims_consumer.cuh does, but for dq: of that each block makes one half of the dims, of all 128
// keys, so that half as much is added to memory for a pair of a key and a query. To this end each block sends
// its ds to the other (FlashAttention-4's backward pass for head dim 256).
//
// dq comes last, so that ds travels under dv and dk; it is handed over in two boxes, one under the next
// step's logits, one after its exponentials, so that these wait for no box to be read.
#pragma once

#include "kernels/attention/families/sm90/backward_step.cuh"
#include "kernels/attention/families/sm90/cluster.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardPairConsumer : BackwardStep<T, Config> {
  using Step = BackwardStep<T, Config>;
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kTileKeys, Step::kColumns;
  using Step::p_, Step::shared_, Step::group_, Step::warp_row_, Step::tiles_, Step::rings_, Step::tile;
  using typename Step::KeyRows;

 public:
  __device__ __forceinline__ BackwardPairConsumer(const BackwardParameters& p,
                                                  const BackwardShared<Config>& shared)
      : Step(p, shared), rank_(ptx::ClusterRank()) {}

  __device__ __forceinline__ void Run() {
    LeaveOperands();
    while (true) {
      ptx::Wait(shared_.FullTile(tiles_.stage), tiles_.parity);
      if (tile().kv_head < 0) break;
      const int steps = tile().steps;
      if (tile().length < kTileKeys) this->ClearKeys(tile().length);
      if (tile().other_length < kTileKeys) ClearOtherKeys(tile().other_length);
      float dk[kDkDims / 2], dv[kDvDims / 2];
#pragma unroll
      for (int i = 0; i < kDkDims / 2; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < kDvDims / 2; ++i) dv[i] = 0;
      float logits[kColumns / 2], dp[kColumns / 2], dq[kOwnDqDims / 2];

      ptx::Wait(shared_.FullQ(rings_.q().stage), rings_.q().parity);
      BeginProducts();
      StartLogits(logits, rings_.q().stage);
      ptx::Wait(shared_.FullDout(rings_.dout().stage), rings_.dout().parity);
      BeginProducts();
      StartDp(dp, rings_.dout().stage);
      bool visible = this->AllSeen(this->StepOf(rings_));  // what it reads comes under the products
      WaitForProducts<1>();
      Settle(logits);
      for (int step = 0; step < steps; ++step) {
        const StepInfo& now = this->StepOf(rings_);
        if (!visible && now.length < kRows) this->ClearQueries(now.length);
        if (!visible) this->MaskTransposed(logits, now);
        this->Probabilities(logits);
        TakeOperands();
        std::uint32_t packed[kColumns / 4];
        PackOperand<POf<T, Config>>(logits, packed);
        StoreByKeys(kP, packed);
        if (step > 0) HandOverRest(dq);
        WaitForProducts<0>();
        Settle(dp);
        if (!visible) this->HideDp(logits, dp);
        this->MakeDs(logits, dp, packed);
        StoreByKeys(kDsByKeys, packed);
        ptx::Wait(shared_.EmptyOtherDs(), ds_parity_ ^ 1);
        this->StoreDs(packed, shared_.Ds(kDsByQueries), group_ * kColumns);
        ptx::FenceShared();
        ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);
        SendDs();

        auto next = rings_;
        next.Advance();
        const bool more = step + 1 < steps;
        BeginProducts();
        StartDv(dv);
        StartDk(dk);
        StartDq<false>(dq, kDsByQueries,
                       shared_.Keys(tiles_.stage) + (rank_ * 2 + group_) * (kTileKeys * kRowBytes));
        ptx::Wait(shared_.FullOtherDs(), ds_parity_);
        BeginProducts();
        StartDq<true>(dq, kOtherDs, shared_.OtherKeys() + group_ * (kTileKeys * kRowBytes));
        CommitProducts();
        if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
        // After a tile's last step these are for nothing: a branch would serialise the products.
        BeginProducts();
        StartLogits(logits, next.q().stage);
        WaitForProducts<3>();
        Settle(dv);
        ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
        WaitForProducts<1>();
        Settle(dk);
        Settle(dq);
        ReleaseOtherDs();
        LeaveOperands();
        this->TakeDq();
        this->template StoreDq<0, kOwnDqDims / 2, kDqDims / 2>(dq, 0);
        this->AnnounceDq();
        ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
        if (more) ptx::Wait(shared_.FullDout(next.dout().stage), next.dout().parity);
        BeginProducts();
        StartDp(dp, next.dout().stage);
        visible = this->AllSeen(this->StepOf(next));
        WaitForProducts<1>();
        Settle(logits);
        rings_ = next;
        ds_parity_ ^= 1;
      }
      HandOverRest(dq);
      WaitForProducts<0>();
      Settle(logits);
      Settle(dp);
      const KeyTileInfo info = tile();
      ptx::Arrive(shared_.EmptyTile(tiles_.stage));
      tiles_.Advance();
      Write(this->RowsOf(info.token, info.member, info.length, info.kv_head), dk, dv);
    }
    this->EndDq();
    TakeOperands();  // so that no arrival is left over
  }

  // Tiles that nobody sees.
  __device__ __forceinline__ void RunEmptyTiles() {
    if (!p_.first && !p_.last) return;
    float dk[kDkDims / 2], dv[kDvDims / 2];
#pragma unroll
    for (int i = 0; i < kDkDims / 2; ++i) dk[i] = 0;
#pragma unroll
    for (int i = 0; i < kDvDims / 2; ++i) dv[i] = 0;
    const int end = p_.work.tiles_count * p_.map.kv_heads;
    for (int item = p_.work.busy_tiles * p_.map.kv_heads + blockIdx.x / 2; item < end;
         item += gridDim.x / 2) {
      const KeyTile& tile = p_.work.tiles[item / p_.map.kv_heads];
      const int from = rank_ * kTileKeys;
      Write(this->RowsOf(tile.token + from, tile.member, tile.length - from, item % p_.map.kv_heads), dk, dv);
    }
  }

 private:
  // A warpgroup has so many dims: of dq kOwnDqDims in all and kDqDims in a box.
  static constexpr int kDkDims = kDimQk / 2, kDvDims = kDimV / 2, kOwnDqDims = kDimQk / 4,
                       kDqDims = Config::kDqDims;
  static_assert(kTileKeys == 64 && kRows == 64 && kOwnDqDims == 64 && kDqDims == 32 && !Config::kBias);
  enum Buffer { kP, kDsByKeys, kDsByQueries, kOtherDs };  // [64][64] each

  // One thread copies ds to the other block of the cluster, when both warpgroups have written it. When that
  // block says that it has read the copy, this block's ds may be overwritten, too.
  __device__ __forceinline__ void SendDs() const {
    if (threadIdx.x == kWarpgroup) {
      ptx::ArriveExpecting(shared_.FullOtherDs(), Config::kDsBytes);
      ptx::CopyIn(ptx::In(shared_.Ds(kOtherDs), rank_ ^ 1), shared_.Ds(kDsByQueries), Config::kDsBytes,
                  ptx::In(shared_.FullOtherDs(), rank_ ^ 1));
    }
    __syncwarp();
  }
  // Hands over the second box of the step before.
  __device__ __forceinline__ void HandOverRest(const float (&dq)[kOwnDqDims / 2]) {
    this->TakeDq();
    this->template StoreDq<kDqDims / 2, kOwnDqDims / 2, kDqDims / 2>(dq, 0);
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

  // The operands in shared memory may be written when the products of both warpgroups have read those of the
  // step before.
  __device__ __forceinline__ void TakeOperands() const {
    ptx::SyncNamed(kFreeBarrier + ptx::Opaque(group_), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void LeaveOperands() const {
    ptx::ArriveNamed(kFreeBarrier + (ptx::Opaque(group_) ^ 1), 2 * kWarpgroup);
  }

  // logits = k q^T, of this warpgroup's queries.
  __device__ __forceinline__ void StartLogits(float (&logits)[kColumns / 2], int stage) const {
    StartTransposed<T, kDimQk, kColumns, kTileKeys, kRows>(
        logits, Operand::OverDim(shared_.Keys(tiles_.stage)),
        Operand::OverDim(shared_.Queries(stage) + group_ * (kColumns * kRowBytes)));
    CommitProducts();
  }
  // dp = v dout^T
  __device__ __forceinline__ void StartDp(float (&dp)[kColumns / 2], int stage) const {
    StartTransposed<T, kDimV, kColumns, kTileKeys, kRows>(
        dp, Operand::OverDim(ptx::Opaque(shared_.Values(tiles_.stage))),
        Operand::OverDim(ptx::Opaque(shared_.Dout(stage) + group_ * (kColumns * kRowBytes))));
    CommitProducts();
  }
  // dv += p^T dout, of this warpgroup's dims.
  __device__ __forceinline__ void StartDv(float (&dv)[kDvDims / 2]) const {
    const std::uint32_t dims = static_cast<std::uint32_t>(group_) * (kDvDims / 64 * kRows * kRowBytes);
    StartProductOverRows<T, kRows, kDvDims, kTileKeys, true>(
        dv, Operand::OverDim(shared_.Ds(kP)),
        Operand::OverRows(shared_.Dout(rings_.dout().stage) + dims, kRows));
    CommitProducts();
  }
  // dk += ds^T q
  __device__ __forceinline__ void StartDk(float (&dk)[kDkDims / 2]) const {
    const std::uint32_t dims = static_cast<std::uint32_t>(group_) * (kDkDims / 64 * kRows * kRowBytes);
    StartProductOverRows<T, kRows, kDkDims, kTileKeys, true>(
        dk, Operand::OverDim(shared_.Ds(kDsByKeys)),
        Operand::OverRows(shared_.Queries(rings_.q().stage) + dims, kRows));
    CommitProducts();
  }
  // dq = ds k, of 64 dims of the keys of one of the blocks, or dq += ds k.
  template <bool kAdd>
  __device__ __forceinline__ void StartDq(float (&dq)[kOwnDqDims / 2], Buffer ds, std::uint32_t keys) const {
    StartProductOverRows<T, kTileKeys, kOwnDqDims, kRows, kAdd>(
        dq, Operand::OverDim(shared_.Ds(ds)), Operand::OverRows(ptx::Opaque(keys), kTileKeys));
  }

  // An operand of this warpgroup's queries to shared memory as keys by queries, swizzled. This warp: 16 keys.
  __device__ __forceinline__ void StoreByKeys(Buffer buffer, const std::uint32_t (&x)[kColumns / 4]) const {
    const int lane = Step::Lane();
    // The first 16 queries' first chunk of a row.
    const std::uint32_t line =
        ptx::Opaque(shared_.Ds(buffer) + (warp_row_ + lane % 16) * kRowBytes +
                    static_cast<std::uint32_t>((group_ * (kColumns / 8) + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n)
      ptx::StoreMatrix(line ^ (n * 32), x[n * 4], x[n * 4 + 1], x[n * 4 + 2], x[n * 4 + 3]);
  }

  __device__ __forceinline__ void Write(const KeyRows& rows, const float (&dk)[kDkDims / 2],
                                        const float (&dv)[kDvDims / 2]) const {
    const int group = ptx::Opaque(group_);  // so that nothing made of it stays in registers all along
    Step::template Write<kDimQk, kDkDims, 0>(rows, dk, group * kDkDims, this->DkScale(), p_.dk_sum,
                                             static_cast<T*>(p_.dk));
    Step::template Write<kDimV, kDvDims, 0>(rows, dv, group * kDvDims, this->DvScale(), p_.dv_sum,
                                            static_cast<T*>(p_.dv));
  }

  const int rank_;  // of the block in its cluster
  std::uint32_t ds_parity_ = 0;
};

}  // namespace cppool::kernels::cuda::sm90
