// A consumer warpgroup of the backward kernel for heads of up to 128: 64 keys of each tile.
//
// With p = exp(scale q k^T - lse): dv = p^T dout, ds = p (dout v^T - delta), dq = scale ds k, dk = scale ds^T q
// (FlashAttention-2, Dao 2023). Logits and dout v^T are made transposed, keys by queries, so that p^T and ds^T are left
// operands in registers for dv and dk (as in FlashAttention-3, Shah et al. 2024); ds goes through shared memory to both
// warpgroups for dq, of which each makes one half (backward_config.h), for a thread of its own (backward_dq.cuh) to add to
// memory.
//
// The products of a step run under the arithmetic of its neighbours: while dq is handed over, dk and the next step's
// logits are under way, and the next step's exponentials fall under its dout v^T.
#pragma once

#include "kernels/attention/families/sm90/backward_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardConsumer : BackwardStep<T, Config> {
  using Step = BackwardStep<T, Config>;
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kTileKeys;
  using Step::p_, Step::shared_, Step::group_, Step::warp_row_, Step::tiles_, Step::rings_, Step::tile;

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParameters& p,
                                              const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  __device__ __forceinline__ void Run() {
    while (true) {
      ptx::Wait(shared_.FullTile(tiles_.stage), tiles_.parity);
      if (tile().kv_head < 0) break;
      const int steps = tile().steps;
      if (tile().length < Config::kTileKeys) this->ClearKeys(tile().length);
      float dk[kDimQk / 2], dv[kDimV / 2];
#pragma unroll
      for (int i = 0; i < kDimQk / 2; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) dv[i] = 0;
      float logits[kRows / 2], dp[kRows / 2];
      std::uint32_t operand[kHalves][16];

      ptx::Wait(shared_.FullQ(rings_.q().stage), rings_.q().parity);
      BeginProducts();
      StartLogits(logits, rings_.q().stage);
      ptx::Wait(shared_.FullDout(rings_.dout().stage), rings_.dout().parity);
      BeginProducts();
      StartDp(dp, rings_.dout().stage);
      WaitForProducts<1>();
      Settle(logits);
      for (int step = 0; step < steps; ++step) {
        const StepInfo& now = this->StepOf(rings_);
        if (now.length < kRows) this->ClearQueries(now.length);
        if constexpr (Config::kBias) this->AddBias(logits, now);
        const bool visible = this->AllSeen(now);
        if (!visible) this->MaskTransposed(logits, now);
        this->Probabilities(logits);
        PackHalf<0>(logits, operand[0]);  // before the wait: under the product
        WaitForProducts<0>();
        Settle(dp);
        if (!visible) this->HideDp(logits, dp);
        std::uint32_t ds[kRows / 4];
        StartDv<0>(dv, operand[0]);
        this->template MakeDs<0, 8>(logits, dp, ds);
        if constexpr (kHalves == 2) {
          PackHalf<1>(logits, operand[1]);
          StartDv<1>(dv, operand[1]);
          this->template MakeDs<8, 8>(logits, dp, ds);
        }
        this->StoreDs(ds, shared_.Ds(ds_buffer_) + group_ * (kRows * kRowBytes), 0);
        ptx::FenceShared();
        ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);
        WaitForProducts<0>();  // dv
        Settle(dv);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) Settle(operand[half]);

        auto next = rings_;
        next.Advance();
        const bool more = step + 1 < steps;
        float dq[kDqDims / 2];
        BeginProducts();
        StartDq(dq);
        StartProduct<T, kRows, kDimQk>(dk, ds, Operand::OverRows(shared_.Queries(rings_.q().stage), kRows));
        CommitProducts();
        if (more) ptx::Wait(shared_.FullQ(next.q().stage), next.q().parity);
        // After a tile's last step these are for nothing: a branch would serialise the products.
        BeginProducts();
        StartLogits(logits, next.q().stage);
        WaitForProducts<2>();
        Settle(dq);
        this->HandOverDq(dq);
        ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
        if constexpr (kHalves == 2) {  // dp takes the registers of dk's operand
          WaitForProducts<1>();
          Settle(dk);
          Settle(ds);
        }
        if (more) ptx::Wait(shared_.FullDout(next.dout().stage), next.dout().parity);
        BeginProducts();
        StartDp(dp, next.dout().stage);
        WaitForProducts<1>();
        Settle(logits);
        if constexpr (kHalves == 1) {
          Settle(dk);
          Settle(ds);
        }
        ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
        rings_ = next;
        ds_buffer_ ^= 1;
      }
      WaitForProducts<0>();
      Settle(logits);
      Settle(dp);
      const KeyTileInfo info = tile();
      ptx::Arrive(shared_.EmptyTile(tiles_.stage));
      tiles_.Advance();
      const typename Step::KeyRows rows = this->RowsOf(info.token, info.member, info.length, info.kv_head);
      this->template Write<kDimQk, kDimQk, 0>(rows, dk, 0, p_.scale, p_.dk_sum, static_cast<T*>(p_.dk));
      this->template Write<kDimV, kDimV, 0>(rows, dv, 0, 1, p_.dv_sum, static_cast<T*>(p_.dv));
    }
    this->EndDq();
  }

  // Tiles that nobody sees.
  __device__ __forceinline__ void RunEmptyTiles() { this->WriteEmptyTiles(); }

 private:
  static constexpr int kDqDims = Config::kDqDims;
  // Blocks of 128 queries are packed by halves, which fewer registers hold.
  static constexpr int kHalves = kRows / 64;
  static constexpr bool kDqByRows = kRows > Config::kDqRows;

  // logits = k q^T, of this warpgroup's keys.
  __device__ __forceinline__ void StartLogits(float (&logits)[kRows / 2], int stage) const {
    StartTransposed<T, kDimQk, kRows, kTileKeys>(
        logits, Operand::OverDim(shared_.Keys(tiles_.stage) + group_ * (64 * kRowBytes)),
        Operand::OverDim(shared_.Queries(stage)));
    CommitProducts();
  }
  // dp = v dout^T
  __device__ __forceinline__ void StartDp(float (&dp)[kRows / 2], int stage) const {
    StartTransposed<T, kDimV, kRows, kTileKeys>(
        dp, Operand::OverDim(shared_.Values(tiles_.stage) + group_ * (64 * kRowBytes)),
        Operand::OverDim(shared_.Dout(stage)));
    CommitProducts();
  }
  // Probabilities of a half's 64 queries as an operand.
  template <int kHalf>
  static __device__ __forceinline__ void PackHalf(const float (&p)[kRows / 2], std::uint32_t (&operand)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = ptx::Pack<T>(p[kHalf * 32 + i * 2], p[kHalf * 32 + i * 2 + 1]);
    Settle(operand);
  }
  // dv += p^T dout, of a half's queries.
  template <int kHalf>
  __device__ __forceinline__ void StartDv(float (&dv)[kDimV / 2], const std::uint32_t (&operand)[16]) const {
    BeginProducts();
    StartProduct<T, 64, kDimV>(
        dv, operand, Operand::OverRows(shared_.Dout(rings_.dout().stage) + kHalf * (64 * kRowBytes), kRows));
    CommitProducts();
  }
  // dq = ds k, of this warpgroup's rows or dims.
  __device__ __forceinline__ void StartDq(float (&dq)[kDqDims / 2]) const {
    const int rows = kDqByRows ? group_ * (64 * kRowBytes) : 0;
    const int dims = kDqByRows ? 0 : group_ * (kDqDims / 64 * kTileKeys * kRowBytes);
    StartProductOverRows<T, kTileKeys, kDqDims, kRows>(
        dq, Operand::OverDim(shared_.Ds(ds_buffer_) + rows),
        Operand::OverRows(shared_.Keys(tiles_.stage) + dims, kTileKeys));
    CommitProducts();
  }

  int ds_buffer_ = 0;
};

}  // namespace cppool::kernels::cuda::sm90
