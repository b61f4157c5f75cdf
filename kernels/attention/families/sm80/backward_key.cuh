// dk = scale ds^T q and dv = p^T dout, for one tile of keys and one key/value head per thread block, summed
// over the query heads of its group, one after another. The formulas are in backward.cuh.
//
// Tiling: 4 warps of 16 keys (32 for head dim 64), 32 or 64 queries at a time. Shared memory: k and v, and
// one or two stages of q, dout, lse and delta, 98 KB at most (config.h). Logits are computed transposed (keys
// by queries), so that p^T and ds^T stay in registers.
#pragma once

#include "kernels/attention/families/sm80/backward.cuh"
#include "kernels/attention/families/sm80/bias.cuh"
#include "kernels/attention/families/sm80/fp8.cuh"
#include "kernels/attention/families/sm80/kernel.h"

namespace cppool::kernels::cuda {

template <typename T, int kDimQk, int kDimV, bool kWithDk, bool kWithDv, Variant kVariant>
__global__ void __launch_bounds__(BackwardKeyTiling<kDimQk, kDimV>::kThreads,
                                  BackwardKeyTiling<kDimQk, kDimV>::kBlocksPerMultiprocessor)
    BackwardKeyKernel(const __grid_constant__ BackwardParameters p) {
  using Config = BackwardKeyTiling<kDimQk, kDimV>;
  constexpr bool kExtended = kVariant != Variant::kPlain, kFp8 = kVariant == Variant::kFp8;
  constexpr int kThreads = Config::kThreads, kBlock = Config::kBlock, kM = Config::kRowsPerWarp / 16,
                kN = kBlock / 8;
  constexpr int kRowStatesAt = kBlock * (kRowBytes<kDimQk> + kRowBytes<kDimV>);  // lse, then delta
  constexpr int kStageBytes = kRowStatesAt + kBlock * 8;
  static_assert(kThreads >= 2 * kBlock);
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t k_tile = ptx::SharedAddress(shared);
  const std::uint32_t v_tile = k_tile + Config::kTileRows * kRowBytes<kDimQk>;
  const std::uint32_t q_tile = v_tile + Config::kTileRows * kRowBytes<kDimV>;
  const std::uint32_t dout_tile = q_tile + kBlock * kRowBytes<kDimQk>;
  const unsigned char* const row_states =
      shared + Config::kTileRows * (kRowBytes<kDimQk> + kRowBytes<kDimV>)+kRowStatesAt;

  const Tile& tile = SharedTile(p.work, blockIdx.x / p.map.kv_heads);
  const int kv_head = blockIdx.x % p.map.kv_heads;
  if (tile.range_begin == tile.range_end && !p.first && !p.last) return;
  const int first_head = max((p.map.kv_head0 + kv_head) * p.map.group - p.map.head0, 0);
  const int end_head = min((p.map.kv_head0 + kv_head + 1) * p.map.group - p.map.head0, p.map.heads);

  BlockCursor<kBlock, kFp8> cursor(p.work, tile, end_head - first_head, kFp8 && p.casts.ds_blocks);
  const auto copy_queries = [&](std::uint32_t stage) {
    const std::int64_t pitch = p.map.heads, first = cursor.row() * pitch + end_head - cursor.passes_left();
    const int length = cursor.length();
    CopyTile<kDimQk, kBlock, kThreads>(q_tile + stage, static_cast<const T*>(p.q) + first * kDimQk,
                                       p.work.other_step * pitch * kRowBytes<kDimQk>, length);
    CopyTile<kDimV, kBlock, kThreads>(dout_tile + stage, static_cast<const T*>(p.dout) + first * kDimV,
                                      p.work.other_step * pitch * kRowBytes<kDimV>, length);
    if (threadIdx.x < 2 * kBlock) {
      const int i = threadIdx.x % kBlock;
      const float* const from = (threadIdx.x < kBlock ? p.lse : p.delta) + first;
      ptx::CopyAsync4(q_tile + stage + kRowStatesAt + threadIdx.x * 4,
                      i < length ? from + i * (p.work.other_step * pitch) : from, i < length ? 4 : 0);
    }
    ptx::CommitCopies();
  };
  if (cursor.valid()) {
    const std::int64_t pitch = p.map.kv_heads, first = tile.row * pitch + kv_head;
    CopyTile<kDimQk, Config::kTileRows, kThreads>(k_tile, static_cast<const T*>(p.k) + first * kDimQk,
                                                  p.work.self_step * pitch * kRowBytes<kDimQk>, tile.length);
    CopyTile<kDimV, Config::kTileRows, kThreads>(v_tile, static_cast<const T*>(p.v) + first * kDimV,
                                                 p.work.self_step * pitch * kRowBytes<kDimV>, tile.length);
    copy_queries(0);
  }

  const int warp_row = threadIdx.x / kWarpSize * Config::kRowsPerWarp;
  Accumulator<kM, kWithDk ? kDimQk / 8 : 1> dk;
  Accumulator<kM, kWithDv ? kDimV / 8 : 1> dv;
  dk.Clear();
  dv.Clear();
  const auto k_rows = Fragments<kDimQk>::Rows(k_tile + warp_row * kRowBytes<kDimQk>);
  const auto v_rows = Fragments<kDimV>::Rows(v_tile + warp_row * kRowBytes<kDimV>);
  const auto q_columns = Fragments<kDimQk>::Columns(q_tile);
  const auto dout_columns = Fragments<kDimV>::Columns(dout_tile);
  const auto q_rows = Fragments<kDimQk>::Rows(q_tile);
  const auto dout_rows = Fragments<kDimV>::Rows(dout_tile);
  std::uint32_t stage = 0;  // in bytes
  while (cursor.valid()) {
    ptx::WaitForCopies();
    __syncthreads();  // q and dout have arrived, and all warps have finished with the previous stage
    const int query = cursor.position(), queries = cursor.length();
    const int key = tile.position + warp_row, keys = min(Config::kRowsPerWarp, tile.length - warp_row);
    Visibility visibility = Classify(tile.band, query, queries, key, keys);
    [[maybe_unused]] const std::int64_t row = cursor.row();
    [[maybe_unused]] const int head = end_head - cursor.passes_left();
    cursor.Advance();
    if constexpr (kFp8) {  // all warps take part in the copies of q_of_dk and dout_of_dv
      if (p.casts.ds_blocks && visibility == Visibility::kNone) visibility = Visibility::kSome;
    }
    [[maybe_unused]] const auto replace_operands = [&] {
      if (!p.casts.ds_blocks) return;
      __syncthreads();  // all warps have finished with q and dout
      const std::int64_t pitch = p.map.heads, first = row * pitch + head;
      if constexpr (kWithDk) {
        CopyTile<kDimQk, kBlock, kThreads>(q_tile + stage, static_cast<const T*>(p.q_of_dk) + first * kDimQk,
                                           p.work.other_step * pitch * kRowBytes<kDimQk>, queries);
      }
      if constexpr (kWithDv) {
        CopyTile<kDimV, kBlock, kThreads>(dout_tile + stage,
                                          static_cast<const T*>(p.dout_of_dv) + first * kDimV,
                                          p.work.other_step * pitch * kRowBytes<kDimV>, queries);
      }
      ptx::CommitCopies();
      ptx::WaitForCopies();
      __syncthreads();  // q_of_dk and dout_of_dv have arrived
    };
    if (Config::kStages > 1 && cursor.valid()) copy_queries(kStageBytes - stage);

    if (visibility != Visibility::kNone) {
      const float2* const lse = reinterpret_cast<const float2*>(row_states + stage) + threadIdx.x % 4;
      const float2* const delta = lse + kBlock / 2;
      Accumulator<kM, kN> probability;
      probability.Clear();
      MultiplyTransposed<T>(probability, k_rows, q_columns.Shifted(stage));
      if constexpr (kFp8) Scale(probability, ScaleOf(p.scales.q) * ScaleOf(p.scales.k));
      if constexpr (kExtended) {
        AddBias<T, Side::kKey>(probability, p.bias, tile, head, {key, keys}, {query, queries});
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 of_columns = lse[n * 4];
        const float offset[2] = {LseLog2(of_columns.x), LseLog2(of_columns.y)};
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            probability.at[m][n][i] = ptx::Exp2(fmaf(probability.at[m][n][i], p.scale_log2, -offset[i % 2]));
      }
      if (visibility == Visibility::kSome) MaskByKey(probability, tile.band, key, query);
      if constexpr (kWithDv && !kFp8)
        MultiplyRows<T>(dv, ToLeftOperand<T>(probability), dout_rows.Shifted(stage));
      if constexpr (kWithDk) {
        Accumulator<kM, kN> ds;
        ds.Clear();
        MultiplyTransposed<T>(ds, v_rows, dout_columns.Shifted(stage));
        if constexpr (kFp8) Scale(ds, ScaleOf(p.scales.dout) * ScaleOf(p.scales.v));
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float2 of_columns = delta[n * 4];
          const float offset[2] = {of_columns.x, of_columns.y};
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              ds.at[m][n][i] = probability.at[m][n][i] * (ds.at[m][n][i] - offset[i % 2]);
        }
        if constexpr (kFp8) {
          const auto of_p = CastP<T>(probability, p.casts.p_scale);
          const auto of_ds = CastDs<T>(ds, p.casts);
          replace_operands();
          if constexpr (kWithDv) MultiplyRows<T>(dv, of_p, dout_rows.Shifted(stage));
          MultiplyRows<T>(dk, of_ds, q_rows.Shifted(stage));
        } else {
          MultiplyRows<T>(dk, ToLeftOperand<T>(ds), q_rows.Shifted(stage));
        }
      } else if constexpr (kFp8) {
        replace_operands();
        MultiplyRows<T>(dv, CastP<T>(probability, p.casts.p_scale), dout_rows.Shifted(stage));
      }
    }

    if (Config::kStages > 1) {
      stage = kStageBytes - stage;
    } else if (cursor.valid()) {
      __syncthreads();  // all warps have finished with q and dout
      copy_queries(0);
    }
  }
  __syncthreads();
  const std::int64_t row = tile.row + static_cast<std::int64_t>(warp_row) * p.work.self_step;
  const std::int64_t at = row * p.map.kv_heads + kv_head,
                     pitch = static_cast<std::int64_t>(p.work.self_step) * p.map.kv_heads;
  const int rows = tile.length - warp_row;
  [[maybe_unused]] float of_dk = p.scale, of_dv = 1.0f;
  if constexpr (kFp8) {
    of_dk *= InverseOfDs(p.casts) * (p.casts.ds_blocks ? 1.0f : ScaleOf(p.scales.q));
    of_dv = (p.casts.ds_blocks ? 1.0f : ScaleOf(p.scales.dout)) / p.casts.p_scale;
  }
  if constexpr (kWithDk) {
    WriteGradient<T>(dk, of_dk, rows, at * kDimQk, pitch * kDimQk, p.dk_accumulator, p.dk, p.first, p.last);
  }
  if constexpr (kWithDv) {
    WriteGradient<T>(dv, of_dv, rows, at * kDimV, pitch * kDimV, p.dv_accumulator, p.dv, p.first, p.last);
  }
}

template <Variant kVariant>
std::array<Kernel<BackwardParameters>, 2> BackwardKeyKernelsOf(const KernelShape& shape) {
  using Kernels = std::array<Kernel<BackwardParameters>, 2>;
  return ForInstance<Kernels>(shape, [&]<typename T, int kDimQk, int kDimV>() {
    const auto instance = [](auto* kernel) {
      return InstanceOf<BackwardKeyTiling<kDimQk, kDimV>, BackwardKeySharedBytes<kDimQk, kDimV>()>(kernel);
    };
    if constexpr (!kHasInstance<kVariant, T>) {
      return Kernels{};
    } else if constexpr (kKeyAndValueApart<kDimQk, kDimV>) {
      return Kernels{instance(&BackwardKeyKernel<T, kDimQk, kDimV, true, false, kVariant>),
                     instance(&BackwardKeyKernel<T, kDimQk, kDimV, false, true, kVariant>)};
    } else {
      return Kernels{instance(&BackwardKeyKernel<T, kDimQk, kDimV, true, true, kVariant>), {}};
    }
  });
}

}  // namespace cppool::kernels::cuda
