// Memory-bound kernels: every byte is read and written once, 16 bytes at a time where alignment allows. No
// shared memory.
#include "kernels/attention/tensor_ops/cuda/tensor_ops.h"

#include <algorithm>
#include <string>

#include "kernels/attention/tensor_ops/cuda/element.cuh"
#include "kernels/error.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Computes delta with eight lanes per vector.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    DeltaKernel(std::int64_t vectors, int dim, const T* out, const T* dout, float* delta) {
  using Eight = Packed<T, 8>;
  const std::int64_t vector = blockIdx.x * static_cast<std::int64_t>(kThreads / 8) + threadIdx.x / 8;
  if (vector >= vectors) return;
  float sum = 0;
  for (int at = threadIdx.x % 8 * 8; at < dim; at += 64) {
    const Eight a = *reinterpret_cast<const Eight*>(out + vector * dim + at);
    const Eight b = *reinterpret_cast<const Eight*>(dout + vector * dim + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(ElementToFloat(a.at[i]), ElementToFloat(b.at[i]), sum);
  }
  const unsigned lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
  for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(lanes, sum, apart);
  if (threadIdx.x % 8 == 0) delta[vector] = sum;
}

constexpr int kMaxParts = 64;  // of an all-to-all; limited because the list is a kernel parameter

struct Parts {
  int count;
  int begin[kMaxParts];  // first head
  int heads[kMaxParts];
  int before[kMaxParts];  // number of heads in the preceding parts
};

// Copies part blockIdx.y; a head has `units` units.
template <typename Unit, typename Index>
__global__ void __launch_bounds__(kThreads)
    SplitKernel(Index rows, int heads, int units, const __grid_constant__ Parts parts, const Unit* from,
                Unit* to) {
  const int begin = parts.begin[blockIdx.y], before = parts.before[blockIdx.y];
  const Index columns = static_cast<Index>(parts.heads[blockIdx.y]) * units;
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= rows * columns) return;
  const Index row = i / columns, column = i % columns;
  to[rows * units * before + i] = from[(row * heads + begin) * units + column];
}

template <typename From, typename To, int kCount, typename Index>
__global__ void __launch_bounds__(kThreads)
    MergeKernel(Index rows, int heads, int units, const __grid_constant__ Parts parts, const From* from,
                To* to) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= rows * heads * units) return;
  const Index vector = i / units, unit = i % units, row = vector / heads;
  const int head = static_cast<int>(vector % heads);
  float sum[kCount] = {};
  for (int part = 0; part < parts.count; ++part) {
    const int within = head - parts.begin[part];
    if (within < 0 || within >= parts.heads[part]) continue;
    const Index at = (rows * parts.before[part] + row * parts.heads[part] + within) * units + unit;
    const auto some = reinterpret_cast<const Packed<From, kCount>*>(from)[at];
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] += ElementToFloat(some.at[j]);
  }
  Packed<To, kCount> rounded;
#pragma unroll
  for (int j = 0; j < kCount; ++j) rounded.at[j] = Rounded<To>(sum[j]);
  reinterpret_cast<Packed<To, kCount>*>(to)[i] = rounded;
}

constexpr int kMostSummed = 64;
struct Summed {
  const float* parts[kMostSummed];
  int count;
};

template <typename To, int kCount>
__global__ void __launch_bounds__(kThreads)
    RoundSumKernel(std::int64_t count, const __grid_constant__ Summed from, To* to) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  if (i * kCount >= count) return;
  if ((i + 1) * kCount > count) {  // the tail
    for (std::int64_t j = i * kCount; j < count; ++j) {
      float sum = from.parts[0][j];
      for (int part = 1; part < from.count; ++part) sum += from.parts[part][j];
      to[j] = Rounded<To>(sum);
    }
    return;
  }
  auto sum = reinterpret_cast<const Packed<float, kCount>*>(from.parts[0])[i];
  for (int part = 1; part < from.count; ++part) {
    const auto some = reinterpret_cast<const Packed<float, kCount>*>(from.parts[part])[i];
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum.at[j] += some.at[j];
  }
  Packed<To, kCount> rounded;
#pragma unroll
  for (int j = 0; j < kCount; ++j) rounded.at[j] = Rounded<To>(sum.at[j]);
  reinterpret_cast<Packed<To, kCount>*>(to)[i] = rounded;
}

Parts MakeParts(const std::vector<HeadRange>& ranges, int heads) {
  if (ranges.size() > kMaxParts) {
    throw RuntimeError(CPPOOL_UNSUPPORTED, "heads in more than " + std::to_string(kMaxParts) + " ranges");
  }
  Parts parts{};
  parts.count = static_cast<int>(ranges.size());
  int before = 0;
  for (int i = 0; i < parts.count; ++i) {
    const HeadRange& range = ranges[static_cast<std::size_t>(i)];
    if (range.begin < 0 || range.count < 0 || range.begin + range.count > heads) {
      throw RuntimeError(CPPOOL_INTERNAL, "a range of heads is not inside the tensor");
    }
    parts.begin[i] = range.begin;
    parts.heads[i] = range.count;
    parts.before[i] = before;
    before += range.count;
  }
  return parts;
}

// Calls run(0) with an index type for these parts of [rows, heads, units]: 32-bit division is several times
// faster than 64-bit division.
template <typename Run>
void WithIndex(std::int64_t rows, int heads, int units, const Parts& parts, Run run) {
  const int last = parts.count - 1;
  const std::int64_t all = rows * units * std::max(heads, parts.before[last] + parts.heads[last]);
  if (all < 0x7fffffff) {
    run(std::uint32_t{});
  } else {
    run(std::uint64_t{});
  }
}

template <typename Unit>
void Split(std::int64_t rows, int heads, int units, const Parts& parts, const void* from, void* to,
           cppool_stream stream) {
  const int most = *std::max_element(parts.heads, parts.heads + parts.count);
  if (most == 0) return;
  const dim3 grid(BlocksFor(rows * most * units, kThreads), static_cast<unsigned>(parts.count));
  WithIndex(rows, heads, units, parts, [&]<typename Index>(Index) {
    LaunchKernel(SplitKernel<Unit, Index>, grid, kThreads, 0, AsCuda(stream), "launching the split of heads",
                 static_cast<Index>(rows), heads, units, parts, static_cast<const Unit*>(from),
                 static_cast<Unit*>(to));
  });
}

template <typename From, typename To, int kCount>
void MergeParts(std::int64_t rows, int heads, int units, const Parts& parts, const void* from, void* to,
                cppool_stream stream) {
  const unsigned blocks = BlocksFor(rows * heads * units, kThreads);
  WithIndex(rows, heads, units, parts, [&]<typename Index>(Index) {
    LaunchKernel(MergeKernel<From, To, kCount, Index>, blocks, kThreads, 0, AsCuda(stream),
                 "launching the merge of heads", static_cast<Index>(rows), heads, units, parts,
                 static_cast<const From*>(from), static_cast<To*>(to));
  });
}

}  // namespace

void CudaTensorOps::Delta(std::int64_t vectors, int dim, TensorRef out, TensorRef dout, float* delta,
                          cppool_stream stream) {
  if (out.dtype != dout.dtype)
    throw RuntimeError(CPPOOL_INTERNAL, "tensor operations: delta of out and dout of different dtypes");
  if (vectors == 0) return;
  WithType(out.dtype, [&]<typename T>(T) {
    LaunchKernel(DeltaKernel<T>, BlocksFor(vectors * 8, kThreads), kThreads, 0, AsCuda(stream),
                 "launching delta", vectors, dim, static_cast<const T*>(out.data),
                 static_cast<const T*>(dout.data), delta);
  });
}

void CudaTensorOps::SplitHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                               TensorRef from, void* to, cppool_stream stream) {
  const Parts parts = MakeParts(ranges, heads);
  if (rows == 0 || dim == 0 || parts.count == 0) return;
  const int bytes = dim * static_cast<int>(SizeOf(from.dtype));
  const auto fits = [&](int unit) {
    return bytes % unit == 0 && Aligned(from.data, static_cast<std::size_t>(unit)) &&
           Aligned(to, static_cast<std::size_t>(unit));
  };
  if (fits(16)) {
    Split<uint4>(rows, heads, bytes / 16, parts, from.data, to, stream);
  } else if (fits(4)) {
    Split<std::uint32_t>(rows, heads, bytes / 4, parts, from.data, to, stream);
  } else if (fits(2)) {
    Split<std::uint16_t>(rows, heads, bytes / 2, parts, from.data, to, stream);
  } else {
    throw RuntimeError(CPPOOL_UNSUPPORTED, "a head with an odd number of bytes cannot be split");
  }
}

void CudaTensorOps::MergeHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                               TensorRef from, TensorOut to, cppool_stream stream) {
  const Parts parts = MakeParts(ranges, heads);
  if (rows == 0 || heads == 0 || dim == 0 || parts.count == 0) return;
  WithType(from.dtype, [&]<typename From>(From) {
    WithType(to.dtype, [&]<typename To>(To) {
      if (dim % 8 == 0 && Aligned(from.data, 16) && Aligned(to.data, 16)) {
        MergeParts<From, To, 8>(rows, heads, dim / 8, parts, from.data, to.data, stream);
      } else {
        MergeParts<From, To, 1>(rows, heads, dim, parts, from.data, to.data, stream);
      }
    });
  });
}

void CudaTensorOps::RoundSum(const std::vector<const float*>& parts, TensorOut to, std::int64_t count,
                             cppool_stream stream) {
  if (count == 0) return;
  if (parts.empty() || parts.size() > kMostSummed)
    throw RuntimeError(CPPOOL_INTERNAL, "a sum of " + std::to_string(parts.size()) + " parts");
  Summed from{};
  from.count = static_cast<int>(parts.size());
  std::copy(parts.begin(), parts.end(), from.parts);
  const auto aligned = [](const void* pointer) { return Aligned(pointer, 16); };
  const bool wide = std::all_of(parts.begin(), parts.end(), aligned) && aligned(to.data);
  WithType(to.dtype, [&]<typename To>(To) {
    const auto kernel = wide ? &RoundSumKernel<To, 8> : &RoundSumKernel<To, 1>;
    const unsigned blocks = BlocksFor(wide ? (count + 7) / 8 : count, kThreads);
    LaunchKernel(kernel, blocks, kThreads, 0, AsCuda(stream), "launching a rounded sum", count, from,
                 static_cast<To*>(to.data));
  });
}

void CudaTensorOps::LoadHeads() {
  const auto split = []<typename Unit>(Unit) {
    LoadKernels("cudaFuncGetAttributes", SplitKernel<Unit, std::uint32_t>, SplitKernel<Unit, std::uint64_t>);
  };
  split(uint4{});
  split(std::uint32_t{});
  split(std::uint16_t{});
  ForEachType([]<typename To>(To) {
    LoadKernels("cudaFuncGetAttributes", DeltaKernel<To>, RoundSumKernel<To, 1>, RoundSumKernel<To, 8>);
    ForEachType([]<typename From>(From) {
      LoadKernels("cudaFuncGetAttributes", MergeKernel<From, To, 1, std::uint32_t>,
                  MergeKernel<From, To, 1, std::uint64_t>, MergeKernel<From, To, 8, std::uint32_t>,
                  MergeKernel<From, To, 8, std::uint64_t>);
    });
  });
}

}  // namespace cppool::kernels::cuda
