// dk and dv as in backward_key.cuh, for head dims whose accumulators leave a warp only 16 keys: reading
// shared memory then binds, so two warps share 32 keys instead. Each makes p^T and ds^T of half the queries,
// they exchange them through shared memory, and each sums up half the columns of dk and dv.
//
// Tiling: 2 pairs of warps of 32 keys each, 64 queries at a time. Shared memory: k, v, two stages of q, lse
// and delta, one of dout, p^T and ds^T, 98 KB at most (config.h). The next q travels under the whole block,
// the next dout under ds^T q.
#pragma once

#include "attention/backward_key.cuh"

namespace cppool::kernels::cuda {

template <typename T, int kDimQk, int kDimV>
__global__ void __launch_bounds__(PairedTiling::kThreads, PairedTiling::kBlocksPerMultiprocessor)
    BackwardKeyPairedKernel(const __grid_constant__ BackwardParameters p) {
  using Config = PairedTiling;
  constexpr int kThreads = Config::kThreads, kBlock = Config::kBlock, kKeys = 2 * Config::kRowsPerWarp;
  constexpr int kQueries = kBlock / 2, kM = kKeys / 16, kN = kQueries / 8;
  constexpr int kStageBytes = kBlock * (kRowBytes<kDimQk> + 8);  // q, lse, delta
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t k_tile = ptx::SharedAddress(shared);
  const std::uint32_t v_tile = k_tile + Config::kTileRows * kRowBytes<kDimQk>;
  const std::uint32_t dout_tile = v_tile + Config::kTileRows * kRowBytes<kDimV>;
  const std::uint32_t p_tile = dout_tile + kBlock * kRowBytes<kDimV>;  // [keys, queries]
  const std::uint32_t ds_tile = p_tile + Config::kTileRows * kRowBytes<kBlock>;
  const std::uint32_t q_tile = ds_tile + Config::kTileRows * kRowBytes<kBlock>;
  constexpr int kRowStatesAt = kBlock * kRowBytes<kDimQk>;

  // Rather than in registers.
  __shared__ Tile tile;
  __shared__ int kv_head, end_head, passes;
  if (threadIdx.x == 0) {
    tile = p.work.tiles[blockIdx.x / p.map.kv_heads];
    kv_head = blockIdx.x % p.map.kv_heads;
    const int first = (p.map.kv_head0 + kv_head) * p.map.group - p.map.head0;
    end_head = min(first + p.map.group, p.map.heads);
    passes = end_head - max(first, 0);
  }
  __syncthreads();
  if (tile.range_begin == tile.range_end && !p.first && !p.last) return;

  BlockCursor<kBlock> cursor(p.work, tile, passes);
  const auto copy_q = [&](std::uint32_t stage) {
    const std::int64_t pitch = p.map.heads, first = cursor.row() * pitch + end_head - cursor.passes_left();
    const int length = cursor.length();
    CopyTile<kDimQk, kBlock, kThreads>(q_tile + stage, static_cast<const T*>(p.q) + first * kDimQk,
                                       p.work.other_step * pitch * kRowBytes<kDimQk>, length);
    const int i = threadIdx.x % kBlock;
    const float* const from = (threadIdx.x < kBlock ? p.lse : p.delta) + first;
    ptx::CopyAsync4(q_tile + stage + kRowStatesAt + threadIdx.x * 4,
                    i < length ? from + i * (p.work.other_step * pitch) : from, i < length ? 4 : 0);
  };
  static_assert(kThreads == 2 * kBlock);
  const auto copy_dout = [&] {
    const std::int64_t pitch = p.map.heads, first = cursor.row() * pitch + end_head - cursor.passes_left();
    CopyTile<kDimV, kBlock, kThreads>(dout_tile, static_cast<const T*>(p.dout) + first * kDimV,
                                      p.work.other_step * pitch * kRowBytes<kDimV>, cursor.length());
  };
  if (cursor.valid()) {
    const std::int64_t pitch = p.map.kv_heads, first = tile.row * pitch + kv_head;
    CopyTile<kDimQk, Config::kTileRows, kThreads>(k_tile, static_cast<const T*>(p.k) + first * kDimQk,
                                                  p.work.self_step * pitch * kRowBytes<kDimQk>, tile.length);
    CopyTile<kDimV, Config::kTileRows, kThreads>(v_tile, static_cast<const T*>(p.v) + first * kDimV,
                                                 p.work.self_step * pitch * kRowBytes<kDimV>, tile.length);
    copy_q(0);
    copy_dout();
    ptx::CommitCopies();
  }

  const int pair = threadIdx.x / (2 * kWarpSize), member = threadIdx.x / kWarpSize % 2;
  const int pair_row = pair * kKeys;
  Accumulator<kM, kDimQk / 16> dk;
  Accumulator<kM, kDimV / 16> dv;
  dk.Clear();
  dv.Clear();
  std::uint32_t stage = 0;  // in bytes
  while (cursor.valid()) {
    ptx::WaitForCopies();
    __syncthreads();  // q and dout are there, and all have done with the block before
    const int query = cursor.position(), queries = cursor.length();
    const int key = tile.position + pair_row, keys = min(kKeys, tile.length - pair_row);
    const Visibility visibility = Classify(tile.band, query, queries, key, keys);
    cursor.Advance();
    const bool more = cursor.valid();
    if (more) {
      copy_q(kStageBytes - stage);
      ptx::CommitCopies();
    }

    const std::uint32_t q_now = q_tile + stage;
    if (visibility != Visibility::kNone) {
      const unsigned char* const states = shared + (q_now - k_tile) + kRowStatesAt;
      const float2* const lse =
          reinterpret_cast<const float2*>(states) + member * kQueries / 2 + threadIdx.x % 4;
      const float2* const delta = lse + kBlock / 2;
      Accumulator<kM, kN> probability, ds;
      probability.Clear();
      ds.Clear();
      MultiplyTransposed<T>(probability, Fragments<kDimQk>::Rows(k_tile + pair_row * kRowBytes<kDimQk>),
                            Fragments<kDimQk>::Columns(q_now + member * kQueries * kRowBytes<kDimQk>));
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
      if (visibility == Visibility::kSome) {
        MaskByKey(probability, tile.band, tile.position + pair_row, query + member * kQueries);
      }
      StoreTile<T, kBlock>(p_tile, pair_row, member * kQueries / 16, probability);
      MultiplyTransposed<T>(ds, Fragments<kDimV>::Rows(v_tile + pair_row * kRowBytes<kDimV>),
                            Fragments<kDimV>::Columns(dout_tile + member * kQueries * kRowBytes<kDimV>));
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
      StoreTile<T, kBlock>(ds_tile, pair_row, member * kQueries / 16, ds);
    }
    __syncthreads();  // p^T and ds^T of both warps are there
    if (visibility != Visibility::kNone) {
      MultiplyRows<T, kBlock / 16>(dv, Fragments<kBlock>::Rows(p_tile + pair_row * kRowBytes<kBlock>),
                                   Fragments<kDimV>::Rows(dout_tile).FromColumn(member * kDimV / 2));
    }
    if (more) {
      __syncthreads();  // all have done with dout
      copy_dout();
      ptx::CommitCopies();
    }
    if (visibility != Visibility::kNone) {
      MultiplyRows<T, kBlock / 16>(dk, Fragments<kBlock>::Rows(ds_tile + pair_row * kRowBytes<kBlock>),
                                   Fragments<kDimQk>::Rows(q_now).FromColumn(member * kDimQk / 2));
    }
    stage = kStageBytes - stage;
  }
  __syncthreads();
  const std::int64_t row = tile.row + static_cast<std::int64_t>(pair_row) * p.work.self_step;
  const std::int64_t at = row * p.map.kv_heads + kv_head,
                     pitch = static_cast<std::int64_t>(p.work.self_step) * p.map.kv_heads;
  const int rows = tile.length - pair_row;
  WriteGradient<T>(dk, p.scale, rows, at * kDimQk + member * kDimQk / 2, pitch * kDimQk, p.dk_accumulator,
                   p.dk, p.first, p.last);
  WriteGradient<T>(dv, 1.0f, rows, at * kDimV + member * kDimV / 2, pitch * kDimV, p.dv_accumulator, p.dv,
                   p.first, p.last);
}

}  // namespace cppool::kernels::cuda
