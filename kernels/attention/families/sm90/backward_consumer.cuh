// A consumer warpgroup of the backward kernel for head dims 64, 128 and 128/64: 64 keys of each tile and all
// 64 or 128 queries of a block.
//
// With p = exp(scale q k^T - lse): dv = p^T dout, ds = p (dout v^T - delta), dq = scale ds k, dk = scale ds^T
// q (FlashAttention-2, Dao 2023). Logits and dout v^T are made transposed, keys by queries, so that p^T and
// ds^T are left operands in registers for dv and dk (as in FlashAttention-3, Shah et al. 2024); ds goes
// through shared memory to both warpgroups for dq, of which each makes one half (backward_config.h), for a
// thread of its own (backward_dq.cuh) to add to memory.
//
// The products of a step run under the arithmetic of its neighbours: ds is made under dv; while dq is handed
// over, dk and, with 128 queries, the next step's logits are under way; the next step's exponentials fall
// under its dout v^T. With 64 queries lse and delta are read under a product; with 128 there are no registers
// for it, p is packed in halves, and the other half's exponentials, which would take longer than dout v^T,
// fall under the first half's dv.
#pragma once

#include "kernels/attention/families/sm90/backward_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardConsumer : BackwardStep<T, Config> {
  using Step = BackwardStep<T, Config>;
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kTileKeys;
  using Step::shared_, Step::group_, Step::tiles_, Step::rings_;
  using typename Step::OfColumns;

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
  static constexpr int kParts = kRows / 64;
  static constexpr bool kWide = kParts == 2;
  static_assert(kRows == 64 || kRows == 128);
  static constexpr int kDqDims = Config::kDqDims;
  static constexpr bool kDqByRows = kRows > Config::kDqRows;

  __device__ __forceinline__ void RunSteps(int steps, float (&dk)[kDimQk / 2], float (&dv)[kDimV / 2]) {
    float logits[kRows / 2], dp[kRows / 2];
    OfColumns lse, delta;
    AwaitQueries(rings_);
    BeginProducts();
    StartLogits(logits, rings_.q().stage);
    AwaitDout(rings_);
    BeginProducts();
    StartDp(dp, rings_.dout().stage);
    bool visible = AwaitLogits(logits, lse);
    for (int step = 0; step < steps; ++step) {
      const StepInfo& now = this->StepOf(rings_);
      if (!visible && now.length < kRows) this->ClearQueries(now.length);
      if constexpr (Config::kBias) this->AddBias(logits, now);
      if (!visible) this->MaskTransposed(logits, now);
      if constexpr (kWide) this->LoadColumns(this->Lse(), lse);
      this->template Probabilities<8>(logits, lse);
      std::uint32_t p[kParts][16], ds[kRows / 4];
      PackPart<0>(logits, p);  // before the wait: under the product
      if constexpr (!kWide) this->LoadColumns(this->Delta(), delta);
      WaitForProducts<0>();
      Settle(dp);
      if (!visible) this->template HideDp<8>(logits, dp);
      StartDv(dv, p[0], 0);
      if constexpr (kWide) {
        this->template LoadColumns<0, 8>(this->Delta(), delta);
        this->template OtherProbabilities<8>(logits);
      }
      this->template MakeDs<0, 8>(logits, dp, delta, ds);
      if constexpr (kWide) {
        PackPart<1>(logits, p);
        StartDv(dv, p[1], 1);
        this->template LoadColumns<8, 8>(this->Delta(), delta);
        this->template MakeDs<8, 8>(logits, dp, delta, ds);
      }
      this->StoreDs(ds, this->OwnDs(ds_buffer_), 0);
      ptx::FenceShared();
      ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);
      float dq[kDqDims / 2];
      if constexpr (kWide) EndDv<0>(dv, p);  // dq takes p's registers
      BeginProducts();
      StartDq(dq);
      if constexpr (!kWide) EndDv<1>(dv, p);
      BeginProducts();
      StartProduct<T, kRows, kDimQk>(dk, ds, Operand::OverRows(shared_.Queries(rings_.q().stage), kRows));
      CommitProducts();

      auto next = rings_;
      next.Advance();
      const bool more = step + 1 < steps;
      // After a tile's last step these are for nothing: a branch would serialise the products.
      const auto start_logits = [&] {
        if (more) AwaitQueries(next);
        BeginProducts();
        StartLogits(logits, next.q().stage);
      };
      if constexpr (kWide) start_logits();
      WaitForProducts<kWide ? 2 : 1>();
      Settle(dq);
      this->HandOverDq(dq);
      if constexpr (!kWide) start_logits();
      WaitForProducts<1>();  // dp takes the registers of dk's operand
      Settle(dk);
      Settle(ds);
      ptx::Arrive(shared_.EmptyQ(rings_.q().stage));
      if (more) AwaitDout(next);
      BeginProducts();
      StartDp(dp, next.dout().stage);
      rings_ = next;
      ds_buffer_ ^= 1;
      visible = AwaitLogits(logits, lse);
    }
    WaitForProducts<0>();
    Settle(dp);
  }

  __device__ __forceinline__ void AwaitQueries(const StepRingsOf<Config>& rings) const {
    ptx::Wait(shared_.FullQ(rings.q().stage), rings.q().parity);
  }
  __device__ __forceinline__ void AwaitDout(const StepRingsOf<Config>& rings) const {
    ptx::Wait(shared_.FullDout(rings.dout().stage), rings.dout().parity);
  }
  // Until dp alone is under way. Returns whether all pairs of the step are visible.
  __device__ __forceinline__ bool AwaitLogits(float (&logits)[kRows / 2], OfColumns& lse) const {
    const bool visible = this->AllSeen(this->StepOf(rings_));  // what it reads comes under the products
    if constexpr (!kWide) this->LoadColumns(this->Lse(), lse);
    WaitForProducts<1>();
    Settle(logits);
    return visible;
  }

  // Until at most kPending products are under way, of which dv is none.
  template <int kPending>
  __device__ __forceinline__ void EndDv(float (&dv)[kDimV / 2], std::uint32_t (&p)[kParts][16]) const {
    WaitForProducts<kPending>();
    Settle(dv);
    for (auto& part : p) Settle(part);
    ptx::Arrive(shared_.EmptyDout(rings_.dout().stage));
  }

  // Probabilities of the `kPart`th 64 queries as an operand: an array of their own, which is read while the
  // other half is packed.
  template <int kPart>
  static __device__ __forceinline__ void PackPart(const float (&p)[kRows / 2],
                                                  std::uint32_t (&operands)[kParts][16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      operands[kPart][i] = ptx::Pack<POf<T, Config>>(p[kPart * 32 + i * 2], p[kPart * 32 + i * 2 + 1]);
    }
    Settle(operands[kPart]);
  }

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
  // dv += p^T dout, of the `part`th 64 queries.
  __device__ __forceinline__ void StartDv(float (&dv)[kDimV / 2], const std::uint32_t (&p)[16],
                                          int part) const {
    BeginProducts();
    StartProduct<T, 64, kDimV>(
        dv, p, Operand::OverRows(shared_.Dout(rings_.dout().stage) + part * (64 * kRowBytes), kRows));
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
