// A consumer warpgroup of the backward kernel for casts in blocks (mxfp8): products are divided as in
// backward_dims_step.cuh, but dq, dk and dv read other operands than logits and dout v^T: those that were
// quantized along the tokens. They come into the same rings, after those along the dims.
//
// ds is rounded twice, as multiples of powers of two: of 32 queries for dk, which is a row of this
// warpgroup's accumulator, and of 32 keys for dq, which are rows of two warps. So tiles of keys and blocks of
// queries begin at multiples of 32 positions, or are within 32.
#pragma once

#include "kernels/attention/families/sm90/backward_dims_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardBlocksConsumer : BackwardDimsStep<T, Config> {
  using Step = BackwardDimsStep<T, Config>;
  using Step::kP, Step::kDs, Step::kDsByKeys;
  using Step::kRows, Step::kTileKeys, Step::kColumns, Step::kDkDims, Step::kDvDims;
  using Step::shared_, Step::group_, Step::warp_row_, Step::rings_;
  using Parts = DqParts<Config>;
  static constexpr int kDqDims = Config::kDqDims;
  static_assert(kColumns == 32);

 public:
  __device__ __forceinline__ BackwardBlocksConsumer(const BackwardParameters& p,
                                                    const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  __device__ __forceinline__ void Run() {
    this->LeaveOperands();
    this->RunTiles([this](int steps, float(&dk)[kDkDims / 2], float(&dv)[kDvDims / 2]) {
      for (int step = 0; step < steps; ++step) RunStep(dk, dv);
    });
    this->TakeOperands();  // so that no arrival is left over
  }

  using Step::RunEmptyTiles;

 private:
  __device__ __forceinline__ void RunStep(float (&dk)[kDkDims / 2], float (&dv)[kDvDims / 2]) {
    float logits[kColumns / 2], ds[kColumns / 2];  // ds: dout v^T at first
    const auto first = rings_.q(), second = rings_.second();
    ptx::Wait(shared_.FullQ(first.stage), first.parity);
    BeginProducts();
    this->StartLogits(logits, first.stage);
    ptx::Wait(shared_.FullDout(first.stage), first.parity);
    BeginProducts();
    this->StartDp(ds, first.stage);
    const StepInfo& now = this->StepOf(rings_);
    const bool visible = this->AllSeen(now);
    WaitForProducts<1>();
    Settle(logits);
    if constexpr (Config::kBias) this->AddBias(logits, now);
    ptx::Arrive(shared_.EmptyQ(first.stage));  // not before: the slope of ALiBi is the buffer's
    if (!visible) this->MaskTransposed(logits, now);
    this->Probabilities(logits);
    this->TakeOperands();
    std::uint32_t packed[kColumns / 4];
    PackOperand<POf<T, Config>>(logits, packed);
    this->StoreByKeys(kP, packed);
    WaitForProducts<0>();
    Settle(ds);
    if (!visible) this->HideDp(logits, ds);
    MakeDs(logits, ds);
    ptx::Arrive(shared_.EmptyDout(first.stage));  // lse and delta are the buffer's, too
    RoundByQueries(ds, packed);
    this->StoreByKeys(kDsByKeys, packed);
    RoundByKeys(ds, packed);
    this->StoreDs(packed, shared_.Ds(kDs), group_ * kColumns);
    ptx::FenceShared();
    ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);

    ptx::Wait(shared_.FullQ(second.stage), second.parity);
    ptx::Wait(shared_.FullDout(second.stage), second.parity);
    if (now.length < kRows) this->ClearQueries(now.length, second.stage, second.stage);
    float dq[kDqDims / 2];
    BeginProducts();
    StartDv(dv, second.stage);
    StartDq(dq, 0);
    StartDk(dk, second.stage);
    WaitForProducts<1>();
    Settle(dv);
    Settle(dq);
    ptx::Arrive(shared_.EmptyDout(second.stage));
    if constexpr (Parts::kMade == 2) {
      if (Parts::Owns(group_, 0)) this->HandOverDq(dq);
      BeginProducts();
      StartDq(dq, 1);
    }
    WaitForProducts<0>();
    Settle(dk);
    Settle(dq);
    this->LeaveOperands();
    this->HandOverDq(dq);
    // Not before: the thread that adds dq has then read the description of the step before.
    ptx::Arrive(shared_.EmptyQ(second.stage));
    rings_.Advance();
  }

  // ds = p (dp - delta), from dp
  __device__ __forceinline__ void MakeDs(const float (&p)[kColumns / 2], float (&ds)[kColumns / 2]) const {
    const float* const delta =
        shared_.control->delta[rings_.dout().stage] + this->FirstQuery() + Step::Lane() % 4 * 2;
    const float unit = shared_.control->units.dp;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float2 less = *reinterpret_cast<const float2*>(delta + n * 8);
#pragma unroll
      for (int at = n * 4; at < n * 4 + 4; at += 2) {
        ds[at] = p[at] * fmaf(ds[at], unit, -less.x);
        ds[at + 1] = p[at + 1] * fmaf(ds[at + 1], unit, -less.y);
      }
    }
  }

  // A magnitude as an integer, where NaN is the largest.
  static __device__ __forceinline__ unsigned SizeOf(float x) { return __float_as_uint(x) & 0x7fffffffu; }

  __device__ __forceinline__ void RoundByQueries(const float (&ds)[kColumns / 2],
                                                 std::uint32_t (&packed)[kColumns / 4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned most = 0;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        most = max(most, max(SizeOf(ds[n * 4 + half * 2]), SizeOf(ds[n * 4 + half * 2 + 1])));
      most = max(most, __shfl_xor_sync(~0u, most, 1));
      most = max(most, __shfl_xor_sync(~0u, most, 2));
      const float2 scale = ptx::UpAndDown(most);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        packed[n * 2 + half] =
            ptx::PackInBlocks(ds[n * 4 + half * 2], ds[n * 4 + half * 2 + 1], make_float2(scale.x, scale.x),
                              make_float2(scale.y, scale.y));
    }
  }

  __device__ __forceinline__ void RoundByKeys(const float (&ds)[kColumns / 2],
                                              std::uint32_t (&packed)[kColumns / 4]) const {
    const int lane = Step::Lane(), warp = warp_row_ / 16, column = lane % 4 * 2;
    auto& largest = shared_.control->largest[group_];
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      uint2 most;
      most.x = max(SizeOf(ds[n * 4]), SizeOf(ds[n * 4 + 2]));
      most.y = max(SizeOf(ds[n * 4 + 1]), SizeOf(ds[n * 4 + 3]));
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        most.x = max(most.x, __shfl_xor_sync(~0u, most.x, apart));
        most.y = max(most.y, __shfl_xor_sync(~0u, most.y, apart));
      }
      if (lane < 4) *reinterpret_cast<uint2*>(&largest[warp][n * 8 + column]) = most;
    }
    ptx::SyncNamed(kBackwardGroupBarrier + ptx::Opaque(group_), kWarpgroup);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const uint2 own = *reinterpret_cast<const uint2*>(&largest[warp][n * 8 + column]);
      const uint2 other = *reinterpret_cast<const uint2*>(&largest[warp ^ 1][n * 8 + column]);
      const float2 x = ptx::UpAndDown(max(own.x, other.x)), y = ptx::UpAndDown(max(own.y, other.y));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        packed[n * 2 + half] = ptx::PackInBlocks(ds[n * 4 + half * 2], ds[n * 4 + half * 2 + 1],
                                                 make_float2(x.x, y.x), make_float2(x.y, y.y));
    }
  }

  // Where the operand's dims from `dim` on are in a tile [dims / 64][rows][64].
  static __device__ __forceinline__ std::uint32_t FromDim(std::uint32_t tile, int rows, int dim) {
    return tile + static_cast<std::uint32_t>(dim / 64 * rows * kRowBytes + dim % 64 * 2);
  }
  // dv += p^T dout, of this warpgroup's dims.
  __device__ __forceinline__ void StartDv(float (&dv)[kDvDims / 2], int stage) const {
    StartProductOverRows<T, kRows, kDvDims, kTileKeys, true>(
        dv, Operand::OverDim(shared_.Ds(kP)),
        Operand::OverRows(FromDim(shared_.Dout(stage), kRows, group_ * kDvDims), kRows));
    CommitProducts();
  }
  // dk += ds^T q
  __device__ __forceinline__ void StartDk(float (&dk)[kDkDims / 2], int stage) const {
    StartProductOverRows<T, kRows, kDkDims, kTileKeys, true>(
        dk, Operand::OverDim(shared_.Ds(kDsByKeys)),
        Operand::OverRows(FromDim(shared_.Queries(stage), kRows, group_ * Parts::kApartDims), kRows));
    CommitProducts();
  }
  // dq = ds k, of the `part`th box of this warpgroup's dims.
  __device__ __forceinline__ void StartDq(float (&dq)[kDqDims / 2], int part) const {
    StartProductOverRows<T, kTileKeys, kDqDims, kRows>(
        dq, Operand::OverDim(shared_.Ds(kDs)),
        Operand::OverRows(FromDim(shared_.OtherKeys(), kTileKeys, (group_ * Parts::kApart + part) * kDqDims),
                          kTileKeys));
    CommitProducts();
  }
};

}  // namespace cppool::kernels::cuda::sm90
