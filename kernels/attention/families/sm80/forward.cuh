// Forward attention: out = softmax(scale q k^T, masked) v and lse, for one tile of queries and one head per
// thread block.
//
// Tiling: 4 warps of 32 query rows (16 for head dim 256); 64 keys at a time. k and v are single-buffered: v
// is copied during q k^T, the next k during the softmax and p v. Shared memory: q, k, v, 96 KB at most
// (config.h). q k^T, p and the output stay in registers.
//
// Online softmax (Milakov and Gimelshein 2018) in tiles (FlashAttention-2, Dao 2023), with exponentials in
// base 2. The running maximum is updated only when a row exceeds it by kSlack (in log2): exponentials stay
// below 2^kSlack, and most blocks need not rescale the output.
#pragma once

#include <cmath>

#include "kernels/attention/families/sm80/bias.cuh"
#include "kernels/attention/families/sm80/config.h"
#include "kernels/attention/families/sm80/fp8.cuh"
#include "kernels/attention/families/sm80/kernel.h"
#include "kernels/attention/families/sm80/parameters.h"
#include "kernels/attention/families/sm80/tile.cuh"
#include "kernels/attention/families/sm80/work.cuh"

namespace cppool::kernels::cuda {

// 0 for fp8: P is at most 1, and the cast has all of E4M3 for it.
template <bool kFp8>
inline constexpr float kSlack = kFp8 ? 0 : 8;

// The softmax state of the rows of a warp's accumulator that a thread holds: rows 16 m + lane / 4 and 16 m +
// lane / 4 + 8 for each 16-row tile m.
template <int kM>
struct SoftmaxState {
  float most[kM][2];  // running maximum of the unscaled logits; -inf before the first visible key
  float sum[kM][2];   // sum of the exponentials in this thread's columns
};

// Replaces logits by exponentials relative to the running maximum, and rescales the state and the output when
// the maximum is updated.
template <bool kFp8, int kM, int kN, int kOut>
__device__ __forceinline__ void Softmax(Accumulator<kM, kN>& logits, SoftmaxState<kM>& state,
                                        Accumulator<kM, kOut>& out, float scale_log2) {
  float most[kM][2];
  bool outgrown = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row = fmaxf(logits.at[m][0][half * 2], logits.at[m][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n)
        row = fmaxf(row, fmaxf(logits.at[m][n][half * 2], logits.at[m][n][half * 2 + 1]));
      row = fmaxf(row, __shfl_xor_sync(~0u, row, 1));
      row = fmaxf(row, __shfl_xor_sync(~0u, row, 2));
      most[m][half] = row;
      // For a row without a visible key so far, -inf - -inf is NaN, and the comparison is false.
      outgrown |= (row - state.most[m][half]) * scale_log2 > kSlack<kFp8>;
    }
  if (__any_sync(~0u, outgrown)) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float now = fmaxf(state.most[m][half], most[m][half]);
        const float factor = now == -INFINITY ? 1.0f : ptx::Exp2((state.most[m][half] - now) * scale_log2);
        state.most[m][half] = now;
        state.sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < kOut; ++n) {
          out.at[m][n][half * 2] *= factor;
          out.at[m][n][half * 2 + 1] *= factor;
        }
      }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = state.most[m][half] == -INFINITY ? 0.0f : state.most[m][half] * scale_log2;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          logits.at[m][n][i] = ptx::Exp2(fmaf(logits.at[m][n][i], scale_log2, -offset));
          sum += logits.at[m][n][i];
        }
      state.sum[m][half] += sum;
    }
}

// Initializes the state from the output and lse of the previous call.
template <int kDimV, int kM>
__device__ __forceinline__ void ReadState(const ForwardParameters& p, const Tile& tile, int warp_row,
                                          int head, SoftmaxState<kM>& state,
                                          Accumulator<kM, kDimV / 8>& out) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp_row + m * 16 + half * 8 + lane / 4;
      if (i >= tile.length) continue;
      const std::int64_t at =
          (tile.row + static_cast<std::int64_t>(i) * p.work.self_step) * p.map.heads + head;
      const float lse = p.lse[at];
      if (lse == -INFINITY) continue;
      state.most[m][half] = lse / p.scale;
      state.sum[m][half] = lane % 4 == 0 ? 1.0f : 0.0f;
      const float* from = p.accumulator + at * kDimV + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n) {
        const float2 two = *reinterpret_cast<const float2*>(from + n * 8);
        out.at[m][n][half * 2] = two.x;
        out.at[m][n][half * 2 + 1] = two.y;
      }
    }
}

// Merges (old_lse, an output of weight 1) with (lse, one of weight `factor`): lse becomes that of both.
// `lanes`: those that share the row, which have all read old_lse when this returns.
__device__ __forceinline__ void MergeWith(float old_lse, float& lse, float& factor, float& old_factor,
                                          unsigned lanes) {
  __syncwarp(lanes);
  const float top = lse > old_lse ? lse : old_lse;
  if (top == -INFINITY) return;
  const float merged = top + logf(expf(old_lse - top) + expf(lse - top));
  factor *= expf(lse - merged);
  old_factor = expf(old_lse - merged);
  lse = merged;
}

// For fp8 an earlier call's output is merged here instead of continued: P of this call is relative to its own
// maximum, so that its cast does not depend on other keys. `unit`: what the sums of payloads are multiplied
// with.
template <bool kFp8, typename T, int kDimV, int kM>
__device__ __forceinline__ void WriteOutput(const ForwardParameters& p, const Tile& tile, int warp_row,
                                            int head, const SoftmaxState<kM>& state,
                                            const Accumulator<kM, kDimV / 8>& out,
                                            [[maybe_unused]] float unit = 1) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int i = warp_row + m * 16 + half * 8 + lane / 4;
      if (i >= tile.length) continue;
      const std::int64_t at =
          (tile.row + static_cast<std::int64_t>(i) * p.work.self_step) * p.map.heads + head;
      const bool unseen = sum == 0;  // false for NaN, which must be written to the output
      float lse = unseen ? -INFINITY : state.most[m][half] * p.scale + logf(sum);
      [[maybe_unused]] float weight = unit, old_factor = 0;
      if constexpr (kFp8) {
        if (!p.first) MergeWith(p.lse[at], lse, weight, old_factor, 0xfu << (lane & ~3));
      }
      if (lane % 4 == 0) p.lse[at] = lse;
      float factor = unseen ? 0.0f : 1.0f / sum;
      if constexpr (kFp8) factor *= weight;
      if (p.last && p.softmax_offset) {
        const float whole = 1.0f + expf(p.softmax_offset[head] - lse);
        factor /= whole;
        if constexpr (kFp8) old_factor /= whole;
      }
      const std::int64_t column = at * kDimV + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n) {
        float x = out.at[m][n][half * 2] * factor, y = out.at[m][n][half * 2 + 1] * factor;
        if constexpr (kFp8) {
          if (old_factor != 0) {
            const float2 old = *reinterpret_cast<const float2*>(p.accumulator + column + n * 8);
            x = fmaf(old.x, old_factor, x);
            y = fmaf(old.y, old_factor, y);
          }
        }
        if (p.last) {
          *reinterpret_cast<std::uint32_t*>(static_cast<T*>(p.out) + column + n * 8) = ptx::Pack<T>(x, y);
        } else {
          *reinterpret_cast<float2*>(p.accumulator + column + n * 8) = make_float2(x, y);
        }
      }
    }
}

template <typename T, int kDimQk, int kDimV, Variant kVariant>
__global__ void __launch_bounds__(ForwardTiling<kDimQk, kDimV>::kThreads,
                                  ForwardTiling<kDimQk, kDimV>::kBlocksPerMultiprocessor)
    ForwardKernel(const __grid_constant__ ForwardParameters p) {
  using Config = ForwardTiling<kDimQk, kDimV>;
  constexpr bool kExtended = kVariant != Variant::kPlain, kFp8 = kVariant == Variant::kFp8;
  constexpr int kThreads = Config::kThreads, kBlock = Config::kBlock, kM = Config::kRowsPerWarp / 16;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t q_tile = ptx::SharedAddress(shared);
  const std::uint32_t k_tile = q_tile + Config::kTileRows * kRowBytes<kDimQk>;
  const std::uint32_t v_tile = k_tile + kBlock * kRowBytes<kDimQk>;

  __shared__ int head, kv_head;  // in shared memory to save registers
  if (threadIdx.x == 0) {
    head = blockIdx.x % p.map.heads;
    kv_head = (p.map.head0 + head) / p.map.group - p.map.kv_head0;
  }
  const Tile& tile = SharedTile(p.work, blockIdx.x / p.map.heads);
  if (tile.range_begin == tile.range_end && !p.first && !p.last) return;
  const auto copy_keys = [&](std::int64_t row, int length) {
    const std::int64_t pitch = p.map.kv_heads;
    CopyTile<kDimQk, kBlock, kThreads>(k_tile, static_cast<const T*>(p.k) + (row * pitch + kv_head) * kDimQk,
                                       p.work.other_step * pitch * kRowBytes<kDimQk>, length);
    ptx::CommitCopies();
  };
  const auto copy_values = [&](std::int64_t row, int length) {
    const std::int64_t pitch = p.map.kv_heads;
    CopyTile<kDimV, kBlock, kThreads>(v_tile, static_cast<const T*>(p.v) + (row * pitch + kv_head) * kDimV,
                                      p.work.other_step * pitch * kRowBytes<kDimV>, length);
    ptx::CommitCopies();
  };

  BlockCursor<kBlock> cursor(p.work, tile);
  if (cursor.valid()) {
    const std::int64_t pitch = p.map.heads;
    CopyTile<kDimQk, Config::kTileRows, kThreads>(
        q_tile, static_cast<const T*>(p.q) + (tile.row * pitch + head) * kDimQk,
        p.work.self_step * pitch * kRowBytes<kDimQk>, tile.length);
    copy_keys(cursor.row(), cursor.length());
  }

  const int warp_row = threadIdx.x / kWarpSize * Config::kRowsPerWarp;

  SoftmaxState<kM> state;
  Accumulator<kM, kDimV / 8> out;
  out.Clear();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    state.most[m][0] = state.most[m][1] = -INFINITY;
    state.sum[m][0] = state.sum[m][1] = 0;
  }
  if constexpr (!kFp8) {
    if (!p.first) ReadState<kDimV>(p, tile, warp_row, head, state, out);
  }
  [[maybe_unused]] float largest = -INFINITY;  // the largest visible unscaled logit

  const auto q_rows = Fragments<kDimQk>::Rows(q_tile + warp_row * kRowBytes<kDimQk>);
  const auto k_columns = Fragments<kDimQk>::Columns(k_tile);
  const auto v_rows = Fragments<kDimV>::Rows(v_tile);
  const auto visibility = [&] {
    return Classify(tile.band, tile.position + warp_row, min(Config::kRowsPerWarp, tile.length - warp_row),
                    cursor.position(), cursor.length());
  };
  while (cursor.valid()) {
    ptx::WaitForCopies();
    __syncthreads();  // k has arrived, and all warps have finished with v
    copy_values(cursor.row(), cursor.length());

    Accumulator<kM, kBlock / 8> logits;
    logits.Clear();
    const Visibility visible = visibility();
    if (visible != Visibility::kNone) {
      MultiplyTransposed<T>(logits, q_rows, k_columns);
      if constexpr (kFp8) Scale(logits, ScaleOf(p.scales.q) * ScaleOf(p.scales.k));
      if constexpr (kExtended) {
        AddBias<T, Side::kQuery>(logits, p.bias, tile, head,
                                 {tile.position + warp_row, tile.length - warp_row},
                                 {cursor.position(), cursor.length()});
      }
      if (visible == Visibility::kSome || cursor.length() < kBlock) {
        MaskByQuery(logits, -INFINITY, tile.band, tile.position + warp_row, cursor.position(),
                    cursor.length());
      }
      if constexpr (kExtended) {
        if (p.max_logit) RaiseLargest(largest, logits, tile.length - warp_row);
      }
    }

    ptx::WaitForCopies();
    __syncthreads();  // v has arrived, and all warps have finished with k
    cursor.Advance();
    if (cursor.valid()) copy_keys(cursor.row(), cursor.length());
    if (visible == Visibility::kNone) continue;
    Softmax<kFp8>(logits, state, out, p.scale_log2);
    if constexpr (kFp8) {
      MultiplyRows<T>(out, CastP<T>(logits, p.p_scale), v_rows);
    } else {
      MultiplyRows<T>(out, ToLeftOperand<T>(logits), v_rows);
    }
  }
  __syncthreads();
  if constexpr (kFp8) {
    WriteOutput<true, T, kDimV>(p, tile, warp_row, head, state, out, ScaleOf(p.scales.v) / p.p_scale);
  } else {
    WriteOutput<false, T, kDimV>(p, tile, warp_row, head, state, out);
  }
  if constexpr (kExtended) {
    if (p.max_logit) RaiseMaxLogit(p.max_logit, head, largest, p.scale);
  }
}

template <Variant kVariant>
Kernel<ForwardParameters> ForwardKernelOf(const KernelShape& shape) {
  return ForInstance<Kernel<ForwardParameters>>(shape, [&]<typename T, int kDimQk, int kDimV>() {
    Kernel<ForwardParameters> kernel;
    if constexpr (kHasInstance<kVariant, T>) {
      kernel = InstanceOf<ForwardTiling<kDimQk, kDimV>, ForwardSharedBytes<kDimQk, kDimV>()>(
          &ForwardKernel<T, kDimQk, kDimV, kVariant>);
    }
    return kernel;
  });
}

}  // namespace cppool::kernels::cuda
