// One pass over both tensors. A thread block takes one block of the comparison after another, 64 rows of a
// head: it reduces the elements of each to a BlockStats, and all of its elements to a CompareStats. A second
// launch of one thread block reduces these. The shares and the order of the additions are the same on every
// device, so the result has the same bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <algorithm>
#include <cstdint>

#include "kernels/attention/checks/cuda/check_kernels.h"
#include "kernels/error.h"
#include "kernels/host_device.h"
#include "kernels/numerics/fp8.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/launch.h"

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

// Reads elements at, at + 1, ... of a tensor of any dtype; all threads take the same branch. Also a host
// function, because the host compiler warns if a dtype is missing in the switch.
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

__device__ void NoteWorst(double error, std::int64_t place, BlockStats& block) {
  if (error < block.worst_err || (error == block.worst_err && place > block.worst)) return;
  block.worst_err = error;
  block.worst = place;
}

// `bound` is the element's, or NULL; `place` its place in the block.
__device__ void Add(double a, double b, const CompareArgs& args, const double* bound, std::int64_t place,
                    BlockStats& block, CompareStats& stats) {
  const double relative = args.relative;
  if (!isfinite(a) || !isfinite(b)) {
    if (a == b) return;  // equal infinities are no error; NaN equals nothing
    ++stats.mismatches;
    ++block.bad;
    return NoteWorst(CUDART_INF, place, block);
  }
  const double error = fabs(a - b);
  NoteWorst(error, place, block);
  const double reference = fabs(b);
  block.max_abs_err = fmax(block.max_abs_err, error);
  block.max_abs_ref = fmax(block.max_abs_ref, reference);
  stats.max_excess = fmax(stats.max_excess, error - relative * reference);
  block.sum_sq_err += error * error;
  block.sum_sq_ref += reference * reference;
  stats.sum_err_ref += (a - b) * b;
  // As on the host, which has no fused multiply and add.
  const double allowed =
      bound && isfinite(args.tolerance) ? *bound : __dadd_rn(args.tolerance, __dmul_rn(relative, reference));
  block.bad += error > allowed ? 1 : 0;
  if (!bound) return;
  stats.max_of_bound = fmax(stats.max_of_bound, error / *bound);
  stats.largest_bound = fmax(stats.largest_bound, *bound);
}

// The members that both have.
template <typename From, typename To>
__device__ void MergeErrors(const From& from, To& to) {
  to.max_abs_err = fmax(to.max_abs_err, from.max_abs_err);
  to.max_abs_ref = fmax(to.max_abs_ref, from.max_abs_ref);
  to.sum_sq_err += from.sum_sq_err;
  to.sum_sq_ref += from.sum_sq_ref;
}

__device__ void Merge(const BlockStats& from, BlockStats& to) {
  MergeErrors(from, to);
  to.bad += from.bad;
  if (from.worst >= 0) NoteWorst(from.worst_err, from.worst, to);
}
__device__ void Merge(const CompareStats& from, CompareStats& to) {
  MergeErrors(from, to);
  to.max_excess = fmax(to.max_excess, from.max_excess);
  to.sum_err_ref += from.sum_err_ref;
  to.max_of_bound = fmax(to.max_of_bound, from.max_of_bound);
  to.largest_bound = fmax(to.largest_bound, from.largest_bound);
  to.mismatches += from.mismatches;
}

// Returns the values of the thread `distance` further on in the warp.
template <typename Stats>
__device__ Stats ErrorsFrom(const Stats& stats, int distance) {
  Stats other;
  other.max_abs_err = __shfl_down_sync(~0u, stats.max_abs_err, distance);
  other.max_abs_ref = __shfl_down_sync(~0u, stats.max_abs_ref, distance);
  other.sum_sq_err = __shfl_down_sync(~0u, stats.sum_sq_err, distance);
  other.sum_sq_ref = __shfl_down_sync(~0u, stats.sum_sq_ref, distance);
  return other;
}
__device__ BlockStats From(const BlockStats& stats, int distance) {
  BlockStats other = ErrorsFrom(stats, distance);
  other.bad = __shfl_down_sync(~0u, stats.bad, distance);
  other.worst_err = __shfl_down_sync(~0u, stats.worst_err, distance);
  other.worst = __shfl_down_sync(~0u, stats.worst, distance);
  return other;
}
__device__ CompareStats From(const CompareStats& stats, int distance) {
  CompareStats other = ErrorsFrom(stats, distance);
  other.max_excess = __shfl_down_sync(~0u, stats.max_excess, distance);
  other.sum_err_ref = __shfl_down_sync(~0u, stats.sum_err_ref, distance);
  other.max_of_bound = __shfl_down_sync(~0u, stats.max_of_bound, distance);
  other.largest_bound = __shfl_down_sync(~0u, stats.largest_bound, distance);
  other.mismatches = __shfl_down_sync(~0u, stats.mismatches, distance);
  return other;
}

// Returns the thread block's sum in thread 0. The tree of additions is fixed.
template <typename Stats>
__device__ Stats Reduce(Stats stats) {
  __shared__ alignas(Stats) unsigned char shared[kWarps * sizeof(Stats)];
  Stats* warps =
      reinterpret_cast<Stats*>(shared);  // shared variables may not have initializers, and Stats has
  for (int distance = 16; distance > 0; distance /= 2) Merge(From(stats, distance), stats);
  __syncthreads();  // thread 0 has read what the call before left
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = stats;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) Merge(warps[w], stats);
  }
  return stats;
}

// Reads n elements at a time: `columns`, `block_columns`, strides and offsets must be multiples of n, and the
// tensors aligned to n elements.
template <int n>
__global__ void __launch_bounds__(kThreads) CompareKernel(CompareArgs args, CompareStats* partials) {
  const std::int64_t column_blocks = args.ColumnBlocks();
  const std::int64_t all = args.RowBlocks() * column_blocks;
  CompareStats stats;
  for (std::int64_t at = blockIdx.x; at < all; at += gridDim.x) {
    const std::int64_t row_block = at / column_blocks;
    const std::int64_t column = at % column_blocks * args.block_columns;
    const std::int64_t begin = args.row_blocks ? args.row_blocks[row_block] : row_block * kBlockRows;
    const std::int64_t end = args.row_blocks ? args.row_blocks[row_block + 1] : begin + kBlockRows;
    const std::int64_t row_end = end < args.rows ? end : args.rows;
    const std::int64_t columns_left = args.columns - column;
    const std::int64_t columns = args.block_columns < columns_left ? args.block_columns : columns_left;
    const auto packs = static_cast<unsigned>(columns / n);  // per row
    std::int64_t row = begin + threadIdx.x / packs;
    unsigned pack = threadIdx.x % packs;
    BlockStats block;
    while (row < row_end) {
      const std::int64_t a_row = args.a_rows ? args.a_rows[row] : row;
      const std::int64_t b_row = args.b_rows ? args.b_rows[row] : row;
      double a[n];
      double b[n];
      Read<n>(args.a.data, args.a.dtype, a_row * args.a_stride + args.a_offset + column + pack * n, a);
      const std::int64_t b_at = b_row * args.b_stride + args.b_offset + column + pack * n;
      Read<n>(args.b.data, args.b.dtype, b_at, b);
#pragma unroll
      for (int e = 0; e < n; ++e)
        Add(a[e], b[e], args, args.bound ? args.bound + b_at + e : nullptr,
            (row - begin) * columns + pack * n + e, block, stats);
      row += kThreads / packs;
      pack += kThreads % packs;
      if (pack >= packs) {
        pack -= packs;
        ++row;
      }
    }
    MergeErrors(block, stats);
    if (!args.blocks) continue;
    block = Reduce(block);
    block.count = static_cast<std::uint64_t>((row_end - begin) * packs * n);
    if (threadIdx.x != 0) continue;
    if (block.worst >= 0) {
      const std::int64_t worst_row = begin + block.worst / columns, in_row = column + block.worst % columns;
      const std::int64_t a_row = args.a_rows ? args.a_rows[worst_row] : worst_row;
      const std::int64_t b_row = args.b_rows ? args.b_rows[worst_row] : worst_row;
      double a[1], b[1];
      Read<1>(args.a.data, args.a.dtype, a_row * args.a_stride + args.a_offset + in_row, a);
      Read<1>(args.b.data, args.b.dtype, b_row * args.b_stride + args.b_offset + in_row, b);
      block.worst_a = a[0];
      block.worst_b = b[0];
    }
    args.blocks[at] = block;
  }
  stats = Reduce(stats);
  if (threadIdx.x == 0) partials[blockIdx.x] = stats;
}

__global__ void __launch_bounds__(kThreads)
    CompareFinishKernel(const CompareStats* partials, int count, std::uint64_t elements,
                        CompareStats* result) {
  CompareStats stats;
  for (int i = threadIdx.x; i < count; i += kThreads) Merge(partials[i], stats);
  stats = Reduce(stats);
  stats.count = elements;
  if (threadIdx.x == 0) *result = stats;
}

// Whether four elements can be read at a time: stride and offset are multiples of four and the data is
// aligned. fp64 needs no alignment, because it is read element by element.
bool Packs(const TensorRef& tensor, std::int64_t stride, std::int64_t offset) {
  return stride % 4 == 0 && offset % 4 == 0 &&
         (tensor.dtype == Dtype::kFp64 ||
          reinterpret_cast<std::uintptr_t>(tensor.data) % (4 * SizeOf(tensor.dtype)) == 0);
}

bool Packs(const CompareArgs& args) {
  return args.columns % 4 == 0 && args.block_columns % 4 == 0 &&
         Packs(args.a, args.a_stride, args.a_offset) && Packs(args.b, args.b_stride, args.b_offset);
}

}  // namespace

void CudaCheckKernels::LoadCompare() {
  LoadKernels("loading the comparison", CompareKernel<1>, CompareKernel<4>, CompareFinishKernel);
}

void CudaCheckKernels::Compare(const CompareArgs& args, CompareStats* result, cppool_stream stream) {
  const auto most =
      static_cast<int>(std::clamp<std::int64_t>(args.RowBlocks() * args.ColumnBlocks(), 1, kMaxBlocks));
  const Buffer memory(rt_, most * sizeof(CompareStats), stream);
  auto* const partials = memory.get<CompareStats>();
  const std::uint64_t elements =
      static_cast<std::uint64_t>(args.rows) * static_cast<std::uint64_t>(args.columns);
  const int blocks = elements ? most : 0;
  const auto kernel = Packs(args) ? &CompareKernel<4> : &CompareKernel<1>;
  if (blocks)
    LaunchKernel(kernel, blocks, kThreads, 0, Cuda(stream), "launching the comparison", args, partials);
  LaunchKernel(CompareFinishKernel, 1, kThreads, 0, Cuda(stream), "launching the comparison's end", partials,
               blocks, elements, result);
}

}  // namespace cppool::kernels::cuda
