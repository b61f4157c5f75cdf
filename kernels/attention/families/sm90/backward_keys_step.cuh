// What both kinds of consumer warpgroups that divide the keys do (backward_consumer.cuh,
// backward_wide_consumer.cuh): the products of a step of 64 keys of a tile and all queries of a block.
//
// With p = exp(scale q k^T - lse): dv = p^T dout, ds = p (dout v^T - delta), dq = scale ds k, dk = scale ds^T
// q (FlashAttention-2, Dao 2023). Logits and dout v^T are made transposed, keys by queries, so that p^T is a
// left operand in registers for dv (as in FlashAttention-3, Shah et al. 2024); ds goes through shared memory
// to both warpgroups for dq, of which each makes one half (backward_config.h), for a thread of its own
// (backward_dq.cuh) to add to memory.
#pragma once

#include "kernels/attention/families/sm90/backward_step.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename T, typename Config>
class BackwardKeysStep : protected BackwardStep<T, Config> {
  using Step = BackwardStep<T, Config>;

 protected:
  using Step::kDimQk, Step::kDimV, Step::kRows, Step::kTileKeys;
  using Step::shared_, Step::group_, Step::tiles_, Step::rings_;

  __device__ __forceinline__ BackwardKeysStep(const BackwardParameters& p,
                                              const BackwardShared<Config>& shared)
      : Step(p, shared) {}

  static constexpr int kDqDims = Config::kDqDims;
  static constexpr bool kDqByRows = kRows > Config::kDqRows;

  // See BackwardStep.
  __device__ __forceinline__ bool BeginSteps(float (&logits)[kRows / 2], float (&dp)[kRows / 2]) const {
    return Step::BeginSteps(
        logits, [&](int stage) { StartLogits(logits, stage); }, [&](int stage) { StartDp(dp, stage); });
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
