// One thread per element, but for the offset's gradient: a block of threads per head, which walks over the tiles
// of queries and adds up its threads' sums in a fixed tree.
#include "kernels/attention/tensor_ops/cuda/sums.h"

#include <cmath>

#include "kernels/attention/families/sm80/launch.h"
#include "kernels/runtime/cuda/check.h"

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
    OffsetGradientKernel(const WorkView queries, int tiles, int tile_rows, int heads, const float* total,
                         const float* delta, const float* offset, float* gradient) {
  const int head = static_cast<int>(blockIdx.x);
  const float of_head = offset[head];
  float sum = 0;
  for (std::int64_t i = threadIdx.x; i < static_cast<std::int64_t>(tiles) * tile_rows;
       i += kGradientThreads) {
    const Tile& tile = queries.tiles[i / tile_rows];
    const std::int64_t in_tile = i % tile_rows;
    if (in_tile >= tile.length) continue;
    const std::int64_t at = (tile.row + in_tile * queries.self_step) * heads + head;
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

__global__ void __launch_bounds__(kThreads) AddKernel(const float* from, float* to, std::int64_t count) {
  const std::int64_t i = Element();
  if (i < count) to[i] += from[i];
}

__global__ void __launch_bounds__(kThreads)
    SumRowsKernel(const float* from, std::int64_t rows, std::int64_t columns, float* to) {
  const std::int64_t column = Element();
  if (column >= columns) return;
  float sum = 0;
  for (std::int64_t row = 0; row < rows; ++row) sum += from[row * columns + column];
  to[column] = sum;
}

}  // namespace

void LaunchAddOffset(std::int64_t rows, int heads, const float* lse, const float* offset, float* total,
                     cudaStream_t stream) {
  const std::int64_t count = rows * heads;
  if (count == 0) return;
  AddOffsetKernel<<<BlocksFor(count, kThreads), kThreads, 0, stream>>>(count, heads, lse, offset, total);
  CheckCuda(cudaGetLastError(), "launching the sum with a softmax offset");
}

void LaunchOffsetGradient(const WorkView& queries, int tiles, int tile_rows, int heads, const float* total,
                          const float* delta, const float* offset, float* gradient, cudaStream_t stream) {
  if (heads == 0) return;
  OffsetGradientKernel<<<static_cast<unsigned>(heads), kGradientThreads, 0, stream>>>(
      queries, tiles, tile_rows, heads, total, delta, offset, gradient);
  CheckCuda(cudaGetLastError(), "launching the softmax offset's gradient");
}

void LaunchFill(float* to, float value, std::int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  FillKernel<<<BlocksFor(count, kThreads), kThreads, 0, stream>>>(to, value, count);
  CheckCuda(cudaGetLastError(), "launching a fill");
}

void LaunchAdd(const float* from, float* to, std::int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  AddKernel<<<BlocksFor(count, kThreads), kThreads, 0, stream>>>(from, to, count);
  CheckCuda(cudaGetLastError(), "launching an addition");
}

void LaunchSumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                   cudaStream_t stream) {
  if (columns == 0) return;
  SumRowsKernel<<<BlocksFor(columns, kThreads), kThreads, 0, stream>>>(from, rows, columns, to);
  CheckCuda(cudaGetLastError(), "launching the sum of rows");
}

void LoadSums() {
  const void* const functions[] = {
      reinterpret_cast<const void*>(&AddOffsetKernel), reinterpret_cast<const void*>(&OffsetGradientKernel),
      reinterpret_cast<const void*>(&FillKernel), reinterpret_cast<const void*>(&AddKernel),
      reinterpret_cast<const void*>(&SumRowsKernel)};
  for (const void* const function : functions) {
    cudaFuncAttributes attributes;  // finding them loads the function
    CheckCuda(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
  }
}

}  // namespace cppool::kernels::cuda
