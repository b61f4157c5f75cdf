// dq = scale ds k, for one tile of queries and one head per thread block. The formulas are in backward.cuh.
//
// Tiling: 4 warps of 32 query rows (16 for the large head dims), 32 keys at a time. Shared memory: lse,
// delta, q and dout, and one or two stages of k and v, 97 KB at most (config.h). The logits, ds and dq stay
// in registers.
#pragma once

#include "kernels/attention/families/sm80/backward.cuh"
#include "kernels/attention/families/sm80/bias.cuh"
#include "kernels/attention/families/sm80/fp8.cuh"
#include "kernels/attention/families/sm80/kernel.h"

namespace cppool::kernels::cuda {

template <typename T, int kDimQk, int kDimV, Variant kVariant>
__global__ void __launch_bounds__(BackwardQueryTiling<kDimQk, kDimV>::kThreads,
                                  BackwardQueryTiling<kDimQk, kDimV>::kBlocksPerMultiprocessor)
    BackwardQueryKernel(const __grid_constant__ BackwardParameters p) {
  using Config = BackwardQueryTiling<kDimQk, kDimV>;
  constexpr bool kExtended = kVariant != Variant::kPlain, kFp8 = kVariant == Variant::kFp8;
  constexpr int kThreads = Config::kThreads, kBlock = Config::kBlock, kM = Config::kRowsPerWarp / 16,
                kN = kBlock / 8;
  constexpr int kStageBytes = kBlock * (kRowBytes<kDimQk> + kRowBytes<kDimV>);
  extern __shared__ __align__(128) unsigned char shared[];
  float2* const row_states = reinterpret_cast<float2*>(shared);  // lse in base 2, delta
  const std::uint32_t q_tile = ptx::SharedAddress(shared) + Config::kTileRows * 8;
  const std::uint32_t dout_tile = q_tile + Config::kTileRows * kRowBytes<kDimQk>;
  const std::uint32_t k_tile = dout_tile + Config::kTileRows * kRowBytes<kDimV>;
  const std::uint32_t v_tile = k_tile + kBlock * kRowBytes<kDimQk>;

  const Tile& tile = SharedTile(p.work, blockIdx.x / p.map.heads);
  const int head = blockIdx.x % p.map.heads;
  if (tile.range_begin == tile.range_end && !p.first && !p.last) return;
  const int kv_head = (p.map.head0 + head) / p.map.group - p.map.kv_head0;
  const T* const k = static_cast<const T*>(p.k) + static_cast<std::int64_t>(kv_head) * kDimQk;
  const T* const v = static_cast<const T*>(p.v) + static_cast<std::int64_t>(kv_head) * kDimV;
  const auto copy_keys = [&](std::int64_t row, int length, std::uint32_t stage) {
    const std::int64_t pitch = p.map.kv_heads;
    CopyTile<kDimQk, kBlock, kThreads>(k_tile + stage, k + row * pitch * kDimQk,
                                       p.work.other_step * pitch * kRowBytes<kDimQk>, length);
    CopyTile<kDimV, kBlock, kThreads>(v_tile + stage, v + row * pitch * kDimV,
                                      p.work.other_step * pitch * kRowBytes<kDimV>, length);
    ptx::CommitCopies();
  };

  BlockCursor<kBlock, kFp8> cursor(p.work, tile, 1, kFp8 && p.casts.ds_blocks);
  if (cursor.valid()) {
    const std::int64_t pitch = p.map.heads, first = tile.row * pitch + head;
    CopyTile<kDimQk, Config::kTileRows, kThreads>(q_tile, static_cast<const T*>(p.q) + first * kDimQk,
                                                  p.work.self_step * pitch * kRowBytes<kDimQk>, tile.length);
    CopyTile<kDimV, Config::kTileRows, kThreads>(dout_tile, static_cast<const T*>(p.dout) + first * kDimV,
                                                 p.work.self_step * pitch * kRowBytes<kDimV>, tile.length);
    copy_keys(cursor.row(), cursor.length(), 0);
  }

  const int warp_row = threadIdx.x / kWarpSize * Config::kRowsPerWarp;
  if (threadIdx.x < Config::kTileRows) {
    const bool there = threadIdx.x < tile.length;
    const std::int64_t at =
        (tile.row + static_cast<std::int64_t>(threadIdx.x) * p.work.self_step) * p.map.heads + head;
    row_states[threadIdx.x] = there ? make_float2(LseLog2(p.lse[at]), p.delta[at]) : make_float2(INFINITY, 0);
  }

  Accumulator<kM, kDimQk / 8> dq;
  dq.Clear();
  const auto q_rows = Fragments<kDimQk>::Rows(q_tile + warp_row * kRowBytes<kDimQk>);
  const auto dout_rows = Fragments<kDimV>::Rows(dout_tile + warp_row * kRowBytes<kDimV>);
  const auto k_columns = Fragments<kDimQk>::Columns(k_tile);
  const auto v_columns = Fragments<kDimV>::Columns(v_tile);
  const auto k_rows = Fragments<kDimQk>::Rows(k_tile);
  std::uint32_t stage = 0;  // in bytes
  while (cursor.valid()) {
    ptx::WaitForCopies();
    __syncthreads();  // k and v have arrived, and all warps have finished with the previous stage
    const int key = cursor.position(), keys = cursor.length();
    const int query = tile.position + warp_row, queries = min(Config::kRowsPerWarp, tile.length - warp_row);
    Visibility visibility = Classify(tile.band, query, queries, key, keys);
    [[maybe_unused]] const std::int64_t row = cursor.row();
    cursor.Advance();
    if constexpr (kFp8) {  // all warps take part in the copy of k_of_dq
      if (p.casts.ds_blocks && visibility == Visibility::kNone) visibility = Visibility::kSome;
    }
    if (Config::kStages > 1 && cursor.valid()) copy_keys(cursor.row(), cursor.length(), kStageBytes - stage);

    if (visibility != Visibility::kNone) {
      const float2* const states = row_states + warp_row + threadIdx.x % kWarpSize / 4;
      Accumulator<kM, kN> probability, ds;
      probability.Clear();
      ds.Clear();
      MultiplyTransposed<T>(probability, q_rows, k_columns.Shifted(stage));
      if constexpr (kFp8) {
        Scale(probability, ScaleOf(p.scales.q) * ScaleOf(p.scales.k));
        if (p.casts.ds_blocks) {
          __syncthreads();  // all warps have finished with k
          const std::int64_t pitch = p.map.kv_heads;
          CopyTile<kDimQk, kBlock, kThreads>(
              k_tile + stage, static_cast<const T*>(p.k_of_dq) + (row * pitch + kv_head) * kDimQk,
              p.work.other_step * pitch * kRowBytes<kDimQk>, keys);
          ptx::CommitCopies();
        }
      }
      if constexpr (kExtended) {
        AddBias<T, Side::kQuery>(probability, p.bias, tile, head, {query, queries}, {key, keys});
      }
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float lse = states[m * 16 + i / 2 * 8].x;
#pragma unroll
          for (int n = 0; n < kN; ++n)
            probability.at[m][n][i] = ptx::Exp2(fmaf(probability.at[m][n][i], p.scale_log2, -lse));
        }
      if (visibility == Visibility::kSome || keys < kBlock)
        MaskByQuery(probability, 0, tile.band, query, key, keys);
      MultiplyTransposed<T>(ds, dout_rows, v_columns.Shifted(stage));
      if constexpr (kFp8) Scale(ds, ScaleOf(p.scales.dout) * ScaleOf(p.scales.v));
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float delta = states[m * 16 + i / 2 * 8].y;
#pragma unroll
          for (int n = 0; n < kN; ++n) ds.at[m][n][i] = probability.at[m][n][i] * (ds.at[m][n][i] - delta);
        }
      if constexpr (kFp8) {
        if (p.casts.amax_ds) RaiseAmax(p.casts.amax_ds, ds);
        const auto payloads = CastDs<T>(ds, p.casts);
        if (p.casts.ds_blocks) {
          ptx::WaitForCopies();
          __syncthreads();  // k_of_dq has arrived
        }
        MultiplyRows<T>(dq, payloads, k_rows.Shifted(stage));
      } else {
        MultiplyRows<T>(dq, ToLeftOperand<T>(ds), k_rows.Shifted(stage));
      }
    }

    if (Config::kStages > 1) {
      stage = kStageBytes - stage;
    } else if (cursor.valid()) {
      __syncthreads();  // all warps have finished with k and v
      copy_keys(cursor.row(), cursor.length(), 0);
    }
  }
  __syncthreads();
  const std::int64_t row = tile.row + static_cast<std::int64_t>(warp_row) * p.work.self_step;
  float factor = p.scale;
  if constexpr (kFp8) factor *= InverseOfDs(p.casts) * (p.casts.ds_blocks ? 1.0f : ScaleOf(p.scales.k));
  WriteGradient<T>(dq, factor, tile.length - warp_row, (row * p.map.heads + head) * kDimQk,
                   static_cast<std::int64_t>(p.work.self_step) * p.map.heads * kDimQk, p.dq_accumulator, p.dq,
                   p.first, p.last);
}

template <Variant kVariant>
Kernel<BackwardParameters> BackwardQueryKernelOf(const KernelShape& shape) {
  return ForInstance<Kernel<BackwardParameters>>(shape, [&]<typename T, int kDimQk, int kDimV>() {
    Kernel<BackwardParameters> kernel;
    if constexpr (kHasInstance<kVariant, T>) {
      kernel = InstanceOf<BackwardQueryTiling<kDimQk, kDimV>, BackwardQuerySharedBytes<kDimQk, kDimV>()>(
          &BackwardQueryKernel<T, kDimQk, kDimV, kVariant>);
    }
    return kernel;
  });
}

}  // namespace cppool::kernels::cuda
