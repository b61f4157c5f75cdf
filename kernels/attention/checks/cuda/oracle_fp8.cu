// What the oracle does for fp8 beside the rest: the casts of plain attention in fp8, and what the casts of a
// right one may move each result by. The same as in host/oracle.cpp, but that a cast's underflow along the
// queries counts by the largest dS of a chunk.
#include <algorithm>
#include <cstdint>

#include "kernels/attention/checks/cuda/oracle_chunk.cuh"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

// The smallest power of two with which a block of this amax fits into E4M3; 1 for an amax of 0.
__device__ double PowerOf(double amax) {
  if (amax == 0) return 1;
  int exponent = 0;
  const double fraction = frexp(amax, &exponent);  // 448 = 0.875 * 2^9
  return ldexp(1.0, exponent - 9 + (fraction > 0.875 ? 1 : 0));
}

__device__ double CastInBlock(double value, double power) { return Cast(Dtype::kE4M3, value, 1 / power); }

// Blocks of kMxBlock queries: a thread for each key, blockIdx.y for the block, z for the head.
__global__ void __launch_bounds__(kRowThreads) CastAlongQueriesKernel(Chunk chunk) {
  const std::int64_t row = std::int64_t{blockIdx.y} * kMxBlock;
  const KeyRange tiles = chunk.Keys(row);
  const std::int64_t key = tiles.begin + std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  if (key >= tiles.end) return;
  const int count = static_cast<int>(min(std::int64_t{kMxBlock}, chunk.rows - row));
  const std::int64_t at = (blockIdx.z * chunk.rows + row) * chunk.pitch + key;
  double most = 0;
  for (int i = 0; i < count; ++i) most = fmax(most, fabs(chunk.ds[at + i * chunk.pitch]));
  const double power = PowerOf(most);
  for (int i = 0; i < count; ++i)
    chunk.other[at + i * chunk.pitch] = CastInBlock(chunk.ds[at + i * chunk.pitch], power);
}

// Row x of head y: P as dv gets it, dS as dq does. Blocks of keys: a warp holds one.
__global__ void __launch_bounds__(kRowThreads) CastGradientsKernel(Chunk chunk) {
  static_assert(kMxBlock == 32);
  const KeyRange tiles = chunk.Keys(blockIdx.x);
  const std::int64_t at = (blockIdx.y * chunk.rows + blockIdx.x) * chunk.pitch;
  const OracleFp8& fp8 = chunk.fp8;
  for (std::int64_t first = tiles.begin; first < tiles.end; first += kRowThreads) {
    const std::int64_t j = first + threadIdx.x;
    const bool there = j < tiles.end;
    double ds = there ? chunk.ds[at + j] : 0;
    if (fp8.ds_blocks) {
      double most = fabs(ds);
      for (int apart = 16; apart > 0; apart /= 2) most = fmax(most, __shfl_xor_sync(~0u, most, apart));
      ds = CastInBlock(ds, PowerOf(most));
    } else if (fp8.ds_scale != 0) {
      ds = Cast(Dtype::kE5M2, ds, fp8.ds_scale);
    }
    if (!there) continue;
    chunk.ds[at + j] = ds;
    chunk.p[at + j] = Cast(Dtype::kE4M3, chunk.p[at + j], fp8.p_scale);
  }
}

__device__ double ValueOf(const TensorRef& tensor, std::int64_t index) {
  switch (tensor.dtype) {
    case Dtype::kFp16:
      return ToDouble(static_cast<const __half*>(tensor.data)[index]);
    case Dtype::kBf16:
      return ToDouble(static_cast<const __nv_bfloat16*>(tensor.data)[index]);
    case Dtype::kE4M3:
      return ToDouble(static_cast<const E4M3*>(tensor.data)[index]);
    case Dtype::kE5M2:
      return ToDouble(static_cast<const E5M2*>(tensor.data)[index]);
    case Dtype::kFp32:
    case Dtype::kFp64:  // refused before the launch
      break;
  }
  return NAN;
}

// Returns the norm of a vector of `dim` elements; the threads of a warp share the work.
__device__ double WarpNorm(const TensorRef& tensor, std::int64_t vector, int dim) {
  double sum = 0;
  for (int d = threadIdx.x % 32; d < dim; d += 32) {
    const double value = ValueOf(tensor, vector * dim + d);
    sum += value * value;
  }
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sqrt(sum) * ScaleOf(tensor);
}

// Each key has a warp.
__global__ void __launch_bounds__(kRowThreads) NormsKernel(Chunk chunk) {
  const std::int64_t key = std::int64_t{blockIdx.x} * (kRowThreads / 32) + threadIdx.x / 32;
  if (key >= chunk.args.seqlen_kv) return;
  const double norm = WarpNorm(chunk.args.v, chunk.KeyVector(key), chunk.args.dim_v);
  if (threadIdx.x % 32 == 0) chunk.v_norms[key] = norm;
}

// Raises largest_ds for the keys of a tile of rows: a thread for each key, blockIdx.y for the tile, z for the
// head.
__global__ void __launch_bounds__(kRowThreads) LargestDsKernel(Chunk chunk) {
  const std::int64_t row = std::int64_t{blockIdx.y} * kOracleTile;
  const KeyRange tiles = chunk.Keys(row);
  const std::int64_t key = tiles.begin + std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  if (key >= tiles.end) return;
  double most = 0;
  for (std::int64_t i = row; i < min(row + kOracleTile, chunk.rows); ++i)
    most = fmax(most, fabs(chunk.ds[(blockIdx.z * chunk.rows + i) * chunk.pitch + key]));
  RaiseTo(&chunk.largest_ds[key], most);
}

// A thread block computes row x of head y.
__global__ void __launch_bounds__(kRowThreads) BoundsKernel(Chunk chunk, Bounded gradient) {
  const OracleFp8& fp8 = chunk.fp8;
  const std::int64_t row = blockIdx.x;
  const KeyRange tiles = chunk.Keys(row), keys = chunk.mask.Keys(chunk.row + row);
  const std::int64_t at = (blockIdx.y * chunk.rows + row) * chunk.pitch;
  const std::int64_t vector = chunk.QueryVector(row, static_cast<int>(blockIdx.y));
  const double dout_norm = WarpNorm(chunk.args.dout, vector, chunk.args.dim_v);
  const double delta = fp8.delta ? fabs(static_cast<double>(fp8.delta[vector])) : 0;
  double largest = 0;
  for (std::int64_t j = keys.begin + threadIdx.x; j < keys.end; j += kRowThreads)
    largest = fmax(largest, fabs(chunk.ds[at + j]));
  largest = ReduceRow(largest, Max{});
  constexpr double kOfBlock = kE4M3Smallest * 2 / kE4M3Max;  // times the block's largest
  const double relative = fp8.ds_blocks ? kE4M3Relative : kE5M2Relative;
  const double smallest = fp8.ds_blocks ? kOfBlock * largest : kE5M2Smallest / fp8.ds_scale;
  for (std::int64_t j = tiles.begin + threadIdx.x; j < tiles.end; j += kRowThreads) {
    double bound = 0;
    if (j >= keys.begin && j < keys.end) {
      const double p = chunk.p[at + j];
      if (gradient == Bounded::kDv) {
        bound = (kE4M3Relative + kFp32Slack) * p + kE4M3Smallest / fp8.p_scale;
      } else {
        bound = relative * fabs(chunk.ds[at + j]) + kFp32Slack * p * (dout_norm * chunk.v_norms[j] + delta) +
                (gradient == Bounded::kDk && fp8.ds_blocks ? kOfBlock * chunk.largest_ds[j] : smallest);
      }
    }
    chunk.other[at + j] = bound;
  }
}

__global__ void __launch_bounds__(kRowThreads)
    FinishBoundKernel(const double* values, std::int64_t count, double relative, double smallest,
                      double scale, double* bounds) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kRowThreads) {
    const double size = fabs(values[i]);
    double bound = bounds[i];
    bound += 0x1p-7 * (size + bound);  // bf16, twice
    if (scale != 0) bound += relative * (size + bound) + smallest / scale;
    if (size > 0 || bound > 0) bound += 1e-30;  // below bf16's normal values
    bounds[i] = bound;
  }
}

unsigned BlocksOf(std::int64_t count, std::int64_t size) {
  return static_cast<unsigned>((count + size - 1) / size);
}

// Blocks for the keys of a tile's range, blocks of rows, heads.
dim3 ColumnsOf(const Chunk& chunk, int rows) {
  return {BlocksOf(chunk.args.seqlen_kv, kRowThreads), BlocksOf(chunk.rows, rows),
          static_cast<unsigned>(chunk.heads)};
}

}  // namespace

void LaunchCastGradients(const Chunk& chunk, cudaStream_t stream) {
  if (chunk.args.seqlen_kv == 0) return;
  if (chunk.fp8.ds_blocks)
    LaunchKernel(CastAlongQueriesKernel, ColumnsOf(chunk, kMxBlock), kRowThreads, 0, stream,
                 "launching the oracle's casts along queries", chunk);
  LaunchKernel(CastGradientsKernel, RowsOf(chunk, chunk.heads), kRowThreads, 0, stream,
               "launching the oracle's casts", chunk);
}

void LaunchNorms(const Chunk& chunk, cudaStream_t stream) {
  if (chunk.args.seqlen_kv == 0) return;
  LaunchKernel(NormsKernel, BlocksOf(chunk.args.seqlen_kv, kRowThreads / 32), kRowThreads, 0, stream,
               "launching the oracle's norms", chunk);
}

void LaunchLargestDs(const Chunk& chunk, cudaStream_t stream) {
  if (chunk.args.seqlen_kv == 0) return;
  CheckCuda(cudaMemsetAsync(chunk.largest_ds, 0, chunk.args.seqlen_kv * sizeof(double), stream),
            "clearing the oracle's maxima");
  LaunchKernel(LargestDsKernel, ColumnsOf(chunk, kOracleTile), kRowThreads, 0, stream,
               "launching the oracle's maxima", chunk);
}

void LaunchBounds(const Chunk& chunk, Bounded gradient, cudaStream_t stream) {
  LaunchKernel(BoundsKernel, RowsOf(chunk, chunk.heads), kRowThreads, 0, stream,
               "launching the oracle's bounds", chunk, gradient);
}

void LaunchFinishBound(const double* values, std::int64_t count, double relative, double smallest,
                       double scale, double* bound, cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(BlocksOf(count, kRowThreads), 4096));
  LaunchKernel(FinishBoundKernel, blocks, kRowThreads, 0, stream, "launching the end of the oracle's bounds",
               values, count, relative, smallest, scale, bound);
}

void LoadOracleFp8() {
  LoadKernels("loading the oracle for fp8", CastAlongQueriesKernel, CastGradientsKernel, NormsKernel,
              LargestDsKernel, BoundsKernel, FinishBoundKernel);
}

}  // namespace cppool::kernels::cuda
