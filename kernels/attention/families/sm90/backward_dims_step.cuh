// What all kinds of consumer warpgroups that divide the dims do (backward_dims_consumer.cuh and
// backward_pair_consumer.cuh for heads so large that dk and dv of 64 keys do not fit a warpgroup's registers,
// and backward_blocks_consumer.cuh): both have the same 64 keys, and the products of backward_consumer.cuh
// are divided like this.
//
// - Logits and dout v^T, keys by queries: a half of the block's queries each.
// - p^T, keys by queries, and ds, queries by keys, go through shared memory to both.
// - dk, dv and dq: a part of the dims each (backward_config.h).
#pragma once

#include "kernels/attention/families/sm90/backward_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardDimsStep : protected BackwardStep<T, Config> {
  using Step = BackwardStep<T, Config>;

 protected:
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kTileKeys, Step::kColumns, Step::kDkDims, Step::kDvDims;
  using Step::shared_, Step::group_, Step::warp_row_, Step::tiles_, Step::rings_;

  static_assert(kTileKeys == 64 && kRows == 64);
  // [64][64] each. The third one: of the other block of a cluster, or ds^T with casts in blocks.
  enum Buffer { kP, kDs, kOtherDs, kDsByKeys = kOtherDs };

  __device__ __forceinline__ BackwardDimsStep(const BackwardParameters& p,
                                              const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  // The operands in shared memory may be written when the products of both warpgroups have read those of the
  // step before.
  __device__ __forceinline__ void TakeOperands() const {
    ptx::SyncNamed(kFreeBarrier + ptx::Opaque(group_), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void LeaveOperands() const {
    ptx::ArriveNamed(kFreeBarrier + (ptx::Opaque(group_) ^ 1), 2 * kWarpgroup);
  }

  // See BackwardStep.
  __device__ __forceinline__ bool BeginSteps(float (&logits)[kColumns / 2], float (&dp)[kColumns / 2]) const {
    return Step::BeginSteps(
        logits, [&](int stage) { StartLogits(logits, stage); }, [&](int stage) { StartDp(dp, stage); });
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
        static_cast<std::uint32_t>(group_) * (DqParts<Config>::kApartDims / 64 * kRows * kRowBytes);
    StartProductOverBothRows<T, kRows, kDkDims>(
        dk, Operand::OverRows(shared_.Ds(kDs), kRows),
        Operand::OverRows(shared_.Queries(rings_.q().stage) + dims, kRows));
    CommitProducts();
  }

  // p^T or ds^T of this warpgroup's queries to shared memory, swizzled. This warp: 16 keys.
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
};

}  // namespace cppool::kernels::cuda::sm90
