// The gradient of a bias: ds = p (dout v^T - delta), see backward.cuh, added to an fp32 tensor that is
// broadcast over sequences, heads or queries. A thread block processes one tile of keys and one query head,
// or all heads one after another if they share the bias. No two concurrent blocks add to the same element, so
// every sum has a fixed order without atomics; if sequences share the bias, they are launched one after
// another.
//
// Tiling: 4 warps of 16 keys (32 for head dim 64), 32 or 64 queries at a time, logits keys by queries as for
// dk and dv. Shared memory: k and v, and one block of q, dout, lse and delta, 97 KB at most. The gridDim.y
// thread blocks of a tile divide its blocks of queries round-robin.
#include "kernels/attention/families/sm80/backward.cuh"
#include "kernels/attention/families/sm80/bias.cuh"
#include "kernels/attention/families/sm80/fp8.cuh"
#include "kernels/attention/families/sm80/kernel.h"

namespace cppool::kernels::cuda {
namespace {

// Adds ds (keys by queries) to the gradient's elements of one sequence and head.
template <int kM, int kN>
__device__ __forceinline__ void AddGradient(Accumulator<kM, kN>& ds, float* gradient,
                                            std::int64_t query_stride, Stretch keys, Stretch queries) {
  const int lane = threadIdx.x % kWarpSize, row = lane / 4, column = lane % 4 * 2;
  float* const first = gradient + (queries.position + column) * query_stride + keys.position + row;
  // Calls visit(sum, element) for each element inside the tile.
  const auto for_each = [&](auto visit) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = m * 16 + i / 2 * 8, query = n * 8 + i % 2;
          if (row + key < keys.length && column + query < queries.length)
            visit(ds.at[m][n][i], first + query * query_stride + key);
        }
  };
  // All loads are issued before the first store, so that their latencies overlap.
  for_each([](float& sum, const float* element) { sum += *element; });
  for_each([](float sum, float* element) { *element = sum; });
}

template <typename T, int kDimQk, int kDimV, bool kFp8>
__global__ void __launch_bounds__(BackwardKeyTiling<kDimQk, kDimV>::kThreads,
                                  BackwardKeyTiling<kDimQk, kDimV>::kBlocksPerMultiprocessor)
    BackwardBiasKernel(const __grid_constant__ BiasGradientParameters parameters) {
  using Config = BackwardKeyTiling<kDimQk, kDimV>;
  constexpr int kThreads = Config::kThreads, kBlock = Config::kBlock, kM = Config::kRowsPerWarp / 16,
                kN = kBlock / 8;
  const BackwardParameters& p = parameters.backward;
  const BiasGradient& gradient = parameters.gradient;
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kQueriesAt = Config::kTileRows * (kRowBytes<kDimQk> + kRowBytes<kDimV>);
  constexpr int kRowStatesAt = kQueriesAt + kBlock * (kRowBytes<kDimQk> + kRowBytes<kDimV>);
  const std::uint32_t k_tile = ptx::SharedAddress(shared);
  const std::uint32_t v_tile = k_tile + Config::kTileRows * kRowBytes<kDimQk>;
  const std::uint32_t q_tile = k_tile + kQueriesAt;
  const std::uint32_t dout_tile = q_tile + kBlock * kRowBytes<kDimQk>;
  float2* const row_states = reinterpret_cast<float2*>(shared + kRowStatesAt);  // lse in base 2, delta

  const bool sum_heads = gradient.head_stride == 0, sum_queries = gradient.query_stride == 0;
  const Tile& tile = SharedTile(p.work, sum_heads ? blockIdx.x : blockIdx.x / p.map.heads);
  const int first_head = sum_heads ? 0 : static_cast<int>(blockIdx.x) % p.map.heads;
  const int end_head = sum_heads ? p.map.heads : first_head + 1;
  const int lane = threadIdx.x % kWarpSize, warp_row = threadIdx.x / kWarpSize * Config::kRowsPerWarp;
  const Stretch keys{tile.position + warp_row, min(Config::kRowsPerWarp, tile.length - warp_row)};
  const auto k_rows = Fragments<kDimQk>::Rows(k_tile + warp_row * kRowBytes<kDimQk>);
  const auto v_rows = Fragments<kDimV>::Rows(v_tile + warp_row * kRowBytes<kDimV>);
  const auto q_columns = Fragments<kDimQk>::Columns(q_tile);
  const auto dout_columns = Fragments<kDimV>::Columns(dout_tile);

  for (int head = first_head; head < end_head; ++head) {
    const std::int64_t kv_pitch = p.map.kv_heads, pitch = p.map.heads;
    const std::int64_t kv_first = tile.row * kv_pitch + (p.map.head0 + head) / p.map.group - p.map.kv_head0;
    CopyTile<kDimQk, Config::kTileRows, kThreads>(k_tile, static_cast<const T*>(p.k) + kv_first * kDimQk,
                                                  p.work.self_step * kv_pitch * kRowBytes<kDimQk>,
                                                  tile.length);
    CopyTile<kDimV, Config::kTileRows, kThreads>(v_tile, static_cast<const T*>(p.v) + kv_first * kDimV,
                                                 p.work.self_step * kv_pitch * kRowBytes<kDimV>, tile.length);
    ptx::CommitCopies();
    float* const of_head = gradient.sum + tile.sequence * gradient.batch_stride + head * gradient.head_stride;
    float sum[kM][2] = {};  // of this thread's columns, by key
    unsigned turn = 0;
    for (BlockCursor<kBlock> cursor(p.work, tile); cursor.valid(); cursor.Advance(), ++turn) {
      if (turn % gridDim.y != blockIdx.y) continue;
      const Stretch queries{cursor.position(), cursor.length()};
      const std::int64_t first = cursor.row() * pitch + head, step = p.work.other_step * pitch;
      __syncthreads();  // all warps have finished with the previous queries
      CopyTile<kDimQk, kBlock, kThreads>(q_tile, static_cast<const T*>(p.q) + first * kDimQk,
                                         step * kRowBytes<kDimQk>, queries.length);
      CopyTile<kDimV, kBlock, kThreads>(dout_tile, static_cast<const T*>(p.dout) + first * kDimV,
                                        step * kRowBytes<kDimV>, queries.length);
      ptx::CommitCopies();
      if (threadIdx.x < kBlock) {
        const int i = threadIdx.x;
        row_states[i] = i < queries.length
                            ? make_float2(LseLog2(p.lse[first + i * step]), p.delta[first + i * step])
                            : make_float2(INFINITY, 0);
      }
      ptx::WaitForCopies();
      __syncthreads();

      const Visibility visibility =
          Classify(tile.band, queries.position, queries.length, keys.position, keys.length);
      if (visibility == Visibility::kNone) continue;
      Accumulator<kM, kN> probability, ds;
      probability.Clear();
      ds.Clear();
      MultiplyTransposed<T>(probability, k_rows, q_columns);
      if constexpr (kFp8) Scale(probability, ScaleOf(p.scales.q) * ScaleOf(p.scales.k));
      AddBias<T, Side::kKey>(probability, p.bias, tile, head, keys, queries);
      MultiplyTransposed<T>(ds, v_rows, dout_columns);
      if constexpr (kFp8) Scale(ds, ScaleOf(p.scales.dout) * ScaleOf(p.scales.v));
      const float2* const states = row_states + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 state = states[n * 8 + i % 2];
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            float& of_pair = probability.at[m][n][i];
            of_pair = ptx::Exp2(fmaf(of_pair, p.scale_log2, -state.x));
            ds.at[m][n][i] -= state.y;
          }
        }
      if (visibility == Visibility::kSome) MaskByKey(probability, tile.band, keys.position, queries.position);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            ds.at[m][n][i] *= probability.at[m][n][i];
            sum[m][i / 2] += ds.at[m][n][i];
          }
      if (!sum_queries) AddGradient(ds, of_head, gradient.query_stride, keys, queries);
    }
    if (sum_queries) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float of_key = sum[m][half];
          of_key += __shfl_xor_sync(~0u, of_key, 1);
          of_key += __shfl_xor_sync(~0u, of_key, 2);
          const int row = m * 16 + half * 8 + lane / 4;
          if (lane % 4 == 0 && row < keys.length) of_head[keys.position + row] += of_key;
        }
    }
    ptx::WaitForCopies();
    __syncthreads();  // all warps have finished with this head
  }
}

template <int kDimQk, int kDimV>
constexpr int SharedBytes() {
  using T = BackwardKeyTiling<kDimQk, kDimV>;
  return 2 * (T::kTileRows + T::kBlock) * (kDimQk + kDimV) + T::kBlock * 8;
}

}  // namespace

template <bool kFp8>
Kernel<BiasGradientParameters> BackwardBiasKernelOf(const KernelShape& shape) {
  return ForInstance<Kernel<BiasGradientParameters>>(shape, [&]<typename T, int kDimQk, int kDimV>() {
    Kernel<BiasGradientParameters> kernel;
    if constexpr (kHasInstance < kFp8 ? Variant::kFp8 : Variant::kExtended, T >) {
      kernel = InstanceOf<BackwardKeyTiling<kDimQk, kDimV>, SharedBytes<kDimQk, kDimV>()>(
          &BackwardBiasKernel<T, kDimQk, kDimV, kFp8>);
    }
    return kernel;
  });
}

template Kernel<BiasGradientParameters> BackwardBiasKernelOf<false>(const KernelShape& shape);
template Kernel<BiasGradientParameters> BackwardBiasKernelOf<true>(const KernelShape& shape);

}  // namespace cppool::kernels::cuda
