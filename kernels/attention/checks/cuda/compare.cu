// One pass over both tensors: each block reduces its share of the elements to a CompareStats, and a second launch of one block
// reduces these. The shares and the order of the additions are the same on every device, so the result has the same bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/attention/checks/cuda/launch.h"
#include "kernels/error.h"
#include "kernels/host_device.h"
#include "kernels/numerics/fp8.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxBlocks = 1024;

template <typename T, int n>
struct alignas(n * sizeof(T)) Pack {
  T value[n];
};

CPPOOL_HOST_DEVICE inline double ToDouble(float x) { return x; }
CPPOOL_HOST_DEVICE inline double ToDouble(__half x) { return __half2float(x); }
CPPOOL_HOST_DEVICE inline double ToDouble(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, int n>
CPPOOL_HOST_DEVICE void ReadPack(const void* data, std::int64_t at, double (&to)[n]) {
  const auto pack = *reinterpret_cast<const Pack<T, n>*>(static_cast<const T*>(data) + at);
  for (int e = 0; e < n; ++e) to[e] = ToDouble(pack.value[e]);
}

// Reads elements at, at + 1, ... of a tensor of any dtype; all threads take the same branch. Also a host function, because the
// host compiler warns if a dtype is missing in the switch.
template <int n>
CPPOOL_HOST_DEVICE void Read(const void* data, Dtype dtype, std::int64_t at, double (&to)[n]) {
  switch (dtype) {
    case Dtype::kFp64:
      for (int e = 0; e < n; ++e) to[e] = static_cast<const double*>(data)[at + e];
      return;
    case Dtype::kFp32:
      return ReadPack<float>(data, at, to);
    case Dtype::kFp16:
      return ReadPack<__half>(data, at, to);
    case Dtype::kBf16:
      return ReadPack<__nv_bfloat16>(data, at, to);
    case Dtype::kE4M3:
      for (int e = 0; e < n; ++e) to[e] = E4M3ToFloat(static_cast<const std::uint8_t*>(data)[at + e]);
      return;
    case Dtype::kE5M2:
      for (int e = 0; e < n; ++e) to[e] = E5M2ToFloat(static_cast<const std::uint8_t*>(data)[at + e]);
      return;
  }
}

// `bound`: NULL, or of the element.
__device__ void Add(double a, double b, double relative, const double* bound, CompareStats& stats) {
  if (!isfinite(a) || !isfinite(b)) {
    stats.mismatches += a == b ? 0 : 1;  // equal infinities are no error; NaN equals nothing
    return;
  }
  const double error = fabs(a - b);
  const double reference = fabs(b);
  stats.max_abs_err = fmax(stats.max_abs_err, error);
  stats.max_abs_ref = fmax(stats.max_abs_ref, reference);
  stats.max_excess = fmax(stats.max_excess, error - relative * reference);
  stats.sum_sq_err += error * error;
  stats.sum_sq_ref += reference * reference;
  stats.sum_err_ref += (a - b) * b;
  if (!bound) return;
  stats.max_of_bound = fmax(stats.max_of_bound, error / *bound);
  stats.largest_bound = fmax(stats.largest_bound, *bound);
}

__device__ void Merge(const CompareStats& from, CompareStats& to) {
  to.max_abs_err = fmax(to.max_abs_err, from.max_abs_err);
  to.max_abs_ref = fmax(to.max_abs_ref, from.max_abs_ref);
  to.max_excess = fmax(to.max_excess, from.max_excess);
  to.sum_sq_err += from.sum_sq_err;
  to.sum_sq_ref += from.sum_sq_ref;
  to.sum_err_ref += from.sum_err_ref;
  to.max_of_bound = fmax(to.max_of_bound, from.max_of_bound);
  to.largest_bound = fmax(to.largest_bound, from.largest_bound);
  to.mismatches += from.mismatches;
}

// Returns the block's sum in thread 0. The tree of additions is fixed.
__device__ CompareStats ReduceBlock(CompareStats stats) {
  __shared__ alignas(CompareStats) unsigned char shared[kWarps * sizeof(CompareStats)];
  CompareStats* warps = reinterpret_cast<CompareStats*>(
      shared);  // shared variables may not have initializers, and CompareStats has
  for (int distance = 16; distance > 0; distance /= 2) {
    CompareStats other;
    other.max_abs_err = __shfl_down_sync(~0u, stats.max_abs_err, distance);
    other.max_abs_ref = __shfl_down_sync(~0u, stats.max_abs_ref, distance);
    other.max_excess = __shfl_down_sync(~0u, stats.max_excess, distance);
    other.sum_sq_err = __shfl_down_sync(~0u, stats.sum_sq_err, distance);
    other.sum_sq_ref = __shfl_down_sync(~0u, stats.sum_sq_ref, distance);
    other.sum_err_ref = __shfl_down_sync(~0u, stats.sum_err_ref, distance);
    other.max_of_bound = __shfl_down_sync(~0u, stats.max_of_bound, distance);
    other.largest_bound = __shfl_down_sync(~0u, stats.largest_bound, distance);
    other.mismatches = __shfl_down_sync(~0u, stats.mismatches, distance);
    Merge(other, stats);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = stats;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) Merge(warps[w], stats);
  }
  return stats;
}

// Reads n elements at a time: `columns`, strides and offsets must be multiples of n, and the tensors aligned to n elements.
template <int n>
__global__ void __launch_bounds__(kThreads) CompareKernel(CompareArgs args, CompareStats* partials) {
  const std::int64_t packs = args.columns / n;  // per row
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t stride_rows = stride / packs;
  const std::int64_t stride_packs = stride % packs;
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  std::int64_t row = first / packs;
  std::int64_t pack = first % packs;
  CompareStats stats;
  while (row < args.rows) {
    const std::int64_t a_row = args.a_rows ? args.a_rows[row] : row;
    const std::int64_t b_row = args.b_rows ? args.b_rows[row] : row;
    double a[n];
    double b[n];
    Read<n>(args.a.data, args.a.dtype, a_row * args.a_stride + args.a_offset + pack * n, a);
    const std::int64_t b_at = b_row * args.b_stride + args.b_offset + pack * n;
    Read<n>(args.b.data, args.b.dtype, b_at, b);
#pragma unroll
    for (int e = 0; e < n; ++e)
      Add(a[e], b[e], args.relative, args.bound ? args.bound + b_at + e : nullptr, stats);
    row += stride_rows;
    pack += stride_packs;
    if (pack >= packs) {
      pack -= packs;
      ++row;
    }
  }
  stats = ReduceBlock(stats);
  if (threadIdx.x == 0) partials[blockIdx.x] = stats;
}

__global__ void __launch_bounds__(kThreads)
    CompareFinishKernel(const CompareStats* partials, int count, std::uint64_t elements,
                        CompareStats* result) {
  CompareStats stats;
  for (int i = threadIdx.x; i < count; i += kThreads) Merge(partials[i], stats);
  stats = ReduceBlock(stats);
  stats.count = elements;
  if (threadIdx.x == 0) *result = stats;
}

// Whether four elements can be read at a time: stride and offset are multiples of four and the data is aligned. fp64 needs no
// alignment, because it is read element by element.
bool Packs(const TensorRef& tensor, std::int64_t stride, std::int64_t offset) {
  return stride % 4 == 0 && offset % 4 == 0 &&
         (tensor.dtype == Dtype::kFp64 ||
          reinterpret_cast<std::uintptr_t>(tensor.data) % (4 * SizeOf(tensor.dtype)) == 0);
}

bool Packs(const CompareArgs& args) {
  return args.columns % 4 == 0 && Packs(args.a, args.a_stride, args.a_offset) &&
         Packs(args.b, args.b_stride, args.b_offset);
}

}  // namespace

void LoadCompare() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(CompareKernel<1>), reinterpret_cast<const void*>(CompareKernel<4>),
        reinterpret_cast<const void*>(CompareFinishKernel)}) {
    CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "loading the comparison");
  }
}

int CompareBlocks(const CompareArgs& args) {
  const std::int64_t units = args.rows * args.columns / (Packs(args) ? 4 : 1);
  return static_cast<int>(std::clamp<std::int64_t>((units + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

void LaunchCompare(const CompareArgs& args, CompareStats* partials, CompareStats* result,
                   cudaStream_t stream) {
  const std::uint64_t elements =
      static_cast<std::uint64_t>(args.rows) * static_cast<std::uint64_t>(args.columns);
  const int blocks = elements ? CompareBlocks(args) : 0;
  if (blocks && Packs(args)) {
    CompareKernel<4><<<blocks, kThreads, 0, stream>>>(args, partials);
  } else if (blocks) {
    CompareKernel<1><<<blocks, kThreads, 0, stream>>>(args, partials);
  }
  CheckCuda(cudaGetLastError(), "launching the comparison");
  CompareFinishKernel<<<1, kThreads, 0, stream>>>(partials, blocks, elements, result);
  CheckCuda(cudaGetLastError(), "launching the comparison's end");
}

}  // namespace cppool::kernels::cuda
