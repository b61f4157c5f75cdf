// One thread per element, with these exceptions: the gradient of the softmax offset has a thread block per
// head, which loops over the rows and adds the sums of its threads in a fixed tree; the maxima of columns
// have a block per column; the merge of partial outputs has a warp per vector.
#include "kernels/attention/tensor_ops/cuda/tensor_ops.h"

#include <algorithm>
#include <cmath>

#include "kernels/attention/tensor_ops/cuda/element.cuh"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGradientThreads = 1024;

__device__ __forceinline__ std::int64_t Element() {
  return blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads)
    AddOffsetKernel(std::int64_t count, int heads, const float* lse, const float* offset, float* total) {
  const std::int64_t i = Element();
  if (i >= count) return;
  const float of_keys = lse[i], of_offset = offset[i % heads], most = fmaxf(of_keys, of_offset);
  total[i] = most == -INFINITY ? most : most + log1pf(expf(fminf(of_keys, of_offset) - most));
}

__global__ void __launch_bounds__(kGradientThreads)
    OffsetGradientKernel(const RowView rows, int heads, const float* total, const float* delta,
                         const float* offset, float* gradient) {
  const int head = static_cast<int>(blockIdx.x);
  const float of_head = offset[head];
  float sum = 0;
  for (std::int64_t i = threadIdx.x; i < static_cast<std::int64_t>(rows.count) * kRowTile;
       i += kGradientThreads) {
    const RowTile& tile = rows.tiles[i / kRowTile];
    const std::int64_t in_tile = i % kRowTile;
    if (in_tile >= tile.length) continue;
    const std::int64_t at = (tile.row + in_tile * rows.step) * heads + head;
    sum = fmaf(expf(of_head - total[at]), delta[at], sum);
  }
  __shared__ float sums[kGradientThreads];
  sums[threadIdx.x] = sum;
  for (int half = kGradientThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) gradient[head] = 0.0f - sums[0];
}

__global__ void __launch_bounds__(kThreads) FillKernel(float* to, float value, std::int64_t count) {
  const std::int64_t i = Element();
  if (i < count) to[i] = value;
}

// The last axis is the fastest.
__global__ void __launch_bounds__(kThreads) CopyStridedKernel(const StridedCopy copy, std::int64_t count) {
  const std::int64_t i = Element();
  if (i >= count) return;
  const std::int64_t c = i % copy.extent[2], ab = i / copy.extent[2];
  const std::int64_t b = ab % copy.extent[1], a = ab / copy.extent[1];
  copy.to[a * copy.to_strides[0] + b * copy.to_strides[1] + c * copy.to_strides[2]] =
      copy.factor * copy.from[a * copy.from_strides[0] + b * copy.from_strides[1] + c * copy.from_strides[2]];
}

template <typename From>
__global__ void __launch_bounds__(kThreads)
    AccumulateKernel(const From* from, float* to, std::int64_t count, bool first) {
  const std::int64_t i = Element();
  if (i >= count) return;
  const float value = ElementToFloat(from[i]);
  to[i] = first ? value : to[i] + value;
}

// The weights for merging one vector [dim] of a partial output into the accumulator.
struct MergeWeights {
  float lse;   // merged lse
  float old;   // weight of the accumulator; 0: it is not read
  float part;  // weight of the part; 0: it is not read
};

__device__ __forceinline__ MergeWeights WeightsOf(float old_lse, float part_lse) {
  const float most = fmaxf(old_lse, part_lse);  // fmaxf ignores NaN
  const float lse = most == -INFINITY ? (isnan(part_lse) ? part_lse : old_lse)
                                      : most + logf(expf(old_lse - most) + expf(part_lse - most));
  return {lse, old_lse == -INFINITY ? 0 : expf(old_lse - lse),
          part_lse == -INFINITY ? 0 : expf(part_lse - lse)};
}

// Each warp merges one vector at a time; blockIdx.x is a tile of rows, whose vectors are divided among
// gridDim.y blocks.
template <typename Part, typename Out>
__global__ void __launch_bounds__(kThreads) MergeKernel(const RowView rows, const MergeArgs args) {
  const RowTile tile = rows.tiles[blockIdx.x];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t vectors = tile.length * args.heads;
  for (std::int64_t i = blockIdx.y * (kThreads / 32) + warp; i < vectors; i += gridDim.y * (kThreads / 32)) {
    const int head = static_cast<int>(i % args.heads);
    const std::int64_t vector = (tile.row + i / args.heads * rows.step) * args.heads + head;
    MergeWeights weights = WeightsOf(args.first ? -INFINITY : args.lse[vector], args.part_lse[vector]);
    __syncwarp();  // all lanes have read lse
    if (lane == 0) args.lse[vector] = weights.lse;
    if (args.last && args.softmax_offset && weights.lse != -INFINITY) {
      const float share = 1.0f / (1.0f + expf(args.softmax_offset[head] - weights.lse));
      weights.old *= share;
      weights.part *= share;
    }
    const Part* const part = static_cast<const Part*>(args.part.data) + vector * args.dim;
    float* const accumulator = args.accumulator + vector * args.dim;
    Out* const out = static_cast<Out*>(args.out.data) + vector * args.dim;
    for (int d = lane; d < args.dim; d += 32) {
      float value = 0;
      if (weights.old != 0) value = weights.old * accumulator[d];
      if (weights.part != 0) value = fmaf(weights.part, ElementToFloat(part[d]), value);
      if (args.last) {
        out[d] = Rounded<Out>(value);
      } else {
        accumulator[d] = value;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    SumRowsKernel(const float* from, std::int64_t rows, std::int64_t columns, float* to) {
  const std::int64_t column = Element();
  if (column >= columns) return;
  float sum = 0;
  for (std::int64_t row = 0; row < rows; ++row) sum += from[row * columns + column];
  to[column] = sum;
}

__device__ __forceinline__ float MaxOrNan(float a, float b) { return b > a || isnan(b) ? b : a; }

__global__ void __launch_bounds__(kGradientThreads)
    MaxRowsKernel(const float* from, std::int64_t rows, std::int64_t columns, float* to) {
  const std::int64_t column = blockIdx.x;
  float most = -INFINITY;
  for (std::int64_t row = threadIdx.x; row < rows; row += kGradientThreads)
    most = MaxOrNan(most, from[row * columns + column]);
  __shared__ float maxima[kGradientThreads];
  maxima[threadIdx.x] = most;
  for (int half = kGradientThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) maxima[threadIdx.x] = MaxOrNan(maxima[threadIdx.x], maxima[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) to[column] = MaxOrNan(to[column], maxima[0]);
}

template <typename From>
__global__ void __launch_bounds__(kThreads) AddStridedKernel(const StridedSum sum, std::int64_t count) {
  std::int64_t i = Element(), from = 0, to = 0;
  if (i >= count) return;
  for (int axis = 3; axis >= 0; --axis) {  // the last one is the fastest
    const std::int64_t at = i % sum.extent[axis];
    i /= sum.extent[axis];
    from += at * sum.from_strides[axis];
    to += at * sum.to_strides[axis];
  }
  sum.to[to] += ElementToFloat(static_cast<const From*>(sum.from.data)[from]);
}

}  // namespace

void CudaTensorOps::AddOffset(std::int64_t rows, int heads, const float* lse, const float* offset,
                              float* total, cppool_stream stream) {
  const std::int64_t count = rows * heads;
  if (count == 0) return;
  LaunchKernel(AddOffsetKernel, BlocksFor(count, kThreads), kThreads, 0, AsCuda(stream),
               "launching the sum with a softmax offset", count, heads, lse, offset, total);
}

void CudaTensorOps::OffsetGradient(const TokenRows& rows, int heads, const float* total, const float* delta,
                                   const float* offset, float* gradient, cppool_stream stream) {
  if (heads == 0) return;
  LaunchKernel(OffsetGradientKernel, static_cast<unsigned>(heads), kGradientThreads, 0, AsCuda(stream),
               "launching the softmax offset's gradient", ViewOf(rows), heads, total, delta, offset,
               gradient);
}

void CudaTensorOps::Merge(const MergeArgs& args, cppool_stream stream) {
  const RowView& rows = ViewOf(*args.rows);
  if (rows.count == 0 || args.heads == 0) return;
  const dim3 grid(static_cast<unsigned>(rows.count), static_cast<unsigned>(std::min(args.heads, 8)));
  WithType(args.part.dtype, [&]<typename Part>(Part) {
    WithType(args.out.dtype, [&]<typename Out>(Out) {
      LaunchKernel(MergeKernel<Part, Out>, grid, kThreads, 0, AsCuda(stream),
                   "launching the merge of partial outputs", rows, args);
    });
  });
}

void CudaTensorOps::Fill(float* to, float value, std::int64_t count, cppool_stream stream) {
  if (count == 0) return;
  LaunchKernel(FillKernel, BlocksFor(count, kThreads), kThreads, 0, AsCuda(stream), "launching a fill", to,
               value, count);
}

void CudaTensorOps::Accumulate(TensorRef from, float* to, std::int64_t count, bool first,
                               cppool_stream stream) {
  if (count == 0) return;
  WithType(from.dtype, [&]<typename From>(From) {
    LaunchKernel(AccumulateKernel<From>, BlocksFor(count, kThreads), kThreads, 0, AsCuda(stream),
                 "launching an addition", static_cast<const From*>(from.data), to, count, first);
  });
}

void CudaTensorOps::CopyStrided(const StridedCopy& copy, cppool_stream stream) {
  const std::int64_t count = copy.extent[0] * copy.extent[1] * copy.extent[2];
  if (count == 0) return;
  LaunchKernel(CopyStridedKernel, BlocksFor(count, kThreads), kThreads, 0, AsCuda(stream),
               "launching a strided copy", copy, count);
}

void CudaTensorOps::MaxRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                            cppool_stream stream) {
  if (columns == 0) return;
  LaunchKernel(MaxRowsKernel, static_cast<unsigned>(columns), kGradientThreads, 0, AsCuda(stream),
               "launching the maxima of columns", from, rows, columns, to);
}

void CudaTensorOps::AddStrided(const StridedSum& sum, cppool_stream stream) {
  const std::int64_t count = sum.extent[0] * sum.extent[1] * sum.extent[2] * sum.extent[3];
  if (count == 0) return;
  WithType(sum.from.dtype, [&]<typename From>(From) {
    LaunchKernel(AddStridedKernel<From>, BlocksFor(count, kThreads), kThreads, 0, AsCuda(stream),
                 "launching a strided addition", sum, count);
  });
}

void CudaTensorOps::SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                            cppool_stream stream) {
  if (columns == 0) return;
  LaunchKernel(SumRowsKernel, BlocksFor(columns, kThreads), kThreads, 0, AsCuda(stream),
               "launching the sum of rows", from, rows, columns, to);
}

void CudaTensorOps::LoadSums() {
  LoadKernels("cudaFuncGetAttributes", AddOffsetKernel, OffsetGradientKernel, FillKernel, SumRowsKernel,
              CopyStridedKernel, MaxRowsKernel);
  ForEachType([]<typename From>(From) {
    LoadKernels("cudaFuncGetAttributes", AccumulateKernel<From>, AddStridedKernel<From>);
    ForEachType([]<typename Out>(Out) { LoadKernels("cudaFuncGetAttributes", MergeKernel<From, Out>); });
  });
}

}  // namespace cppool::kernels::cuda
