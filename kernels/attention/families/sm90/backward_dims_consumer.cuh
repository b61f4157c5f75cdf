// A consumer warpgroup of the backward kernel for heads so large that dk and dv of 64 keys do not fit a
// warpgroup's registers: both have the same 64 keys, and the products of backward_keys_step.cuh are divided
// like this.
//
// - Logits and dout v^T, keys by queries: a half of the block's queries each.
// - p^T, ds^T and ds go through shared memory to both.
// - dk, dv and dq: a part of the dims each (backward_config.h); dq in two boxes, one after the other.
//
// Under the exponentials of a step dout v^T is under way; while dq's first box is handed over, dk and the
// next step's logits, while the second one is, the next step's dout v^T.
#pragma once

#include "kernels/attention/families/sm90/backward_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardDimsConsumer : protected BackwardStep<T, Config> {
  using Step = BackwardStep<T, Config>;
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kTileKeys, Step::kColumns;
  using Step::p_, Step::shared_, Step::group_, Step::warp_row_, Step::tiles_, Step::rings_, Step::tile;
  using typename Step::KeyRows;

 public:
  __device__ __forceinline__ BackwardDimsConsumer(const BackwardParameters& p,
                                                  const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  __device__ __forceinline__ void Run() {
    static_assert(kDqDims == 64);
    LeaveOperands();
    while (true) {
      ptx::Wait(shared_.FullTile(tiles_.stage), tiles_.parity);
      if (tile().kv_head < 0) break;
      const int steps = tile().steps;
      if (tile().length < kTileKeys) this->ClearKeys(tile().length);
      float dk[kDkDims / 2], dv[kDvDims / 2];
#pragma unroll
      for (int i = 0; i < kDkDims / 2; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < kDvDims / 2; ++i) dv[i] = 0;
      float logits[kColumns / 2], dp[kColumns / 2];

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
        if constexpr (Config::kBias) this->AddBias(logits, now);
        if (!visible) this->MaskTransposed(logits, now);
        this->Probabilities(logits);
        TakeOperands();
        std::uint32_t packed[kColumns / 4];
        PackOperand<POf<T, Config>>(logits, packed);
        StoreByKeys(kP, packed);
        WaitForProducts<0>();
        Settle(dp);
        if (!visible) this->HideDp(logits, dp);
        this->MakeDs(logits, dp, packed);
        StoreByKeys(kDsByKeys, packed);
        this->StoreDs(packed, shared_.Ds(kDsByQueries), group_ * kColumns);
        ptx::FenceShared();
        ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);

        auto next = rings_;
        next.Advance();
        const bool more = step + 1 < steps;
        float dq[kDqDims / 2];
        BeginProducts();
        StartDv(dv);
        StartDq(dq, 0);
        StartDk(dk);
        if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
        // After a tile's last step these are for nothing: a branch would serialise the products.
        BeginProducts();
        StartLogits(logits, next.q().stage);
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
        StartDp(dp, next.dout().stage);
        visible = this->AllSeen(this->StepOf(next));
        WaitForProducts<1>();
        Settle(logits);
        Settle(dk);
        Settle(dq);
        LeaveOperands();
        this->HandOverDq(dq);
        ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
        rings_ = next;
      }
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
    for (int item = p_.work.busy_tiles * p_.map.kv_heads + blockIdx.x; item < end; item += gridDim.x) {
      const KeyTile& tile = p_.work.tiles[item / p_.map.kv_heads];
      Write(this->RowsOf(tile.token, tile.member, tile.length, item % p_.map.kv_heads), dk, dv);
    }
  }

 protected:
  // A warpgroup has so many dims. Those of dk and dq begin at DqParts::kApart boxes of 64 for the second one.
  static constexpr int kDkDims = 128, kDvDims = kDimV / 2, kDqDims = Config::kDqDims;
  static_assert(kTileKeys == 64 && kRows == 64);
  enum Buffer { kP, kDsByKeys, kDsByQueries };  // [64][64] each

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
    const std::uint32_t dims =
        static_cast<std::uint32_t>(group_) * (DqParts<Config>::kApart * kRows * kRowBytes);
    StartProductOverRows<T, kRows, kDkDims, kTileKeys, true>(
        dk, Operand::OverDim(shared_.Ds(kDsByKeys)),
        Operand::OverRows(shared_.Queries(rings_.q().stage) + dims, kRows));
    CommitProducts();
  }
  // dq = ds k, of the `part`th 64 of this warpgroup's dims.
  __device__ __forceinline__ void StartDq(float (&dq)[kDqDims / 2], int part) const {
    const std::uint32_t dims =
        (static_cast<std::uint32_t>(group_) * DqParts<Config>::kApart + static_cast<std::uint32_t>(part)) *
        (kTileKeys * kRowBytes);
    StartProductOverRows<T, kTileKeys, kDqDims, kRows>(
        dq, Operand::OverDim(shared_.Ds(kDsByQueries)),
        Operand::OverRows(shared_.Keys(tiles_.stage) + dims, kTileKeys));
    CommitProducts();
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
    const int dim = group * (DqParts<Config>::kApart * 64);
    if (DqParts<Config>::Owns(group, 0))
      Step::template Write<kDimQk, 64, 0>(rows, dk, dim, this->DkScale(), p_.dk_sum, static_cast<T*>(p_.dk));
    Step::template Write<kDimQk, 64, 32>(rows, dk, dim + 64, this->DkScale(), p_.dk_sum,
                                         static_cast<T*>(p_.dk));
    Step::template Write<kDimV, kDvDims, 0>(rows, dv, group * kDvDims, this->DvScale(), p_.dv_sum,
                                            static_cast<T*>(p_.dv));
  }
};

}  // namespace cppool::kernels::cuda::sm90
