// Kernels for digests, for copying rows, and for rounding and filling fp64 values.
#include <algorithm>
#include <cstdint>

#include "kernels/attention/checks/cuda/check_kernels.h"
#include "kernels/attention/checks/digest.h"
#include "kernels/error.h"
#include "kernels/numerics/rounding.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 2048;
// A delayed copy leaves most of the GPU free: work that does not wait for it must find room, or it would wait
// after all.
constexpr int kDelayedBlocks = 32;

int Blocks(std::int64_t count) {
  return static_cast<int>(std::clamp<std::int64_t>((count + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

// Returns the block's sum in thread 0.
__device__ unsigned long long SumBlock(unsigned long long sum) {
  __shared__ unsigned long long warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(~0u, sum, distance);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) sum += warps[w];
  }
  return sum;
}

// Word number `index`, read in pieces of two bytes if the data is not aligned or the word is incomplete
// (missing bytes are 0).
__device__ std::uint64_t WordAt(const void* data, std::uint64_t bytes, std::uint64_t index, bool aligned) {
  const std::uint64_t begin = index * sizeof(std::uint64_t);
  if (aligned && begin + sizeof(std::uint64_t) <= bytes)
    return static_cast<const std::uint64_t*>(data)[index];
  std::uint64_t word = 0;
  for (int piece = 0; piece < 4 && begin + 2 * piece < bytes; ++piece) {
    word |= std::uint64_t{static_cast<const std::uint16_t*>(data)[begin / 2 + piece]} << (16 * piece);
  }
  return word;
}

__global__ void __launch_bounds__(kThreads)
    DigestKernel(const void* data, std::uint64_t bytes, bool aligned, std::uint64_t* partials) {
  const std::uint64_t words = (bytes + 7) / 8;
  std::uint64_t sum = 0;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < words;
       i += std::uint64_t{gridDim.x} * kThreads) {
    sum += DigestWord(i, WordAt(data, bytes, i, aligned));
  }
  sum = SumBlock(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    DigestFinishKernel(const std::uint64_t* partials, int count, std::uint64_t bytes, std::uint64_t* result) {
  std::uint64_t sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partials[i];
  sum = SumBlock(sum);
  if (threadIdx.x == 0) *result = sum + DigestStart(bytes);
}

struct RowsCopies {
  RowsCopy each[CheckKernels::kMostCopies];
  int count;
};

__global__ void __launch_bounds__(kThreads) CopyRowsKernel(const RowsCopies copies, std::uint64_t delay_ns) {
  if (delay_ns > 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    std::uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
      __nanosleep(1000);
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < delay_ns);
  }
  for (int c = 0; c < copies.count; ++c) {
    const RowsCopy& copy = copies.each[c];
    const std::int64_t pieces = copy.bytes / 2, count = copy.batch * copy.rows * pieces;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * kThreads) {
      const std::int64_t piece = i % pieces, row = i / pieces % copy.rows, b = i / pieces / copy.rows;
      const auto* from = static_cast<const char*>(copy.from) + b * copy.from_batch + row * copy.from_row;
      auto* to = static_cast<char*>(copy.to) + b * copy.to_batch + row * copy.to_row;
      reinterpret_cast<std::uint16_t*>(to)[piece] = reinterpret_cast<const std::uint16_t*>(from)[piece];
    }
  }
}

__global__ void __launch_bounds__(kThreads) RoundKernel(Dtype dtype, double* values, std::int64_t count) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    values[i] = RoundTo(dtype, values[i]);
  }
}

__global__ void __launch_bounds__(kThreads) FillKernel(double* values, double value, std::int64_t count) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    values[i] = value;
  }
}

}  // namespace

void CudaCheckKernels::LoadValues() {
  LoadKernels("loading digests and rounding", DigestKernel, DigestFinishKernel, CopyRowsKernel, RoundKernel,
              FillKernel);
}

void CudaCheckKernels::Digest(const void* data, std::size_t bytes, std::uint64_t* result,
                              cppool_stream stream) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % sizeof(std::uint64_t) == 0;
  const int blocks = Blocks(static_cast<std::int64_t>(bytes / 8));
  const Buffer memory(rt_, blocks * sizeof(std::uint64_t), stream);
  auto* const partials = memory.get<std::uint64_t>();
  LaunchKernel(DigestKernel, blocks, kThreads, 0, Cuda(stream), "launching the digest", data, bytes, aligned,
               partials);
  LaunchKernel(DigestFinishKernel, 1, kThreads, 0, Cuda(stream), "launching the digest's end", partials,
               blocks, bytes, result);
}

void CudaCheckKernels::CopyRows(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay,
                                cppool_stream stream) {
  if (copies.size() > kMostCopies)
    throw RuntimeError(CPPOOL_INTERNAL, "check kernels: too many copies at once");
  RowsCopies all{};
  std::int64_t most = 0;
  for (const RowsCopy& copy : copies) {
    all.each[all.count++] = copy;
    most = std::max(most, copy.batch * copy.rows * copy.bytes / 2);
  }
  if (most == 0) return;
  const int blocks = delay.count() > 0 ? std::min(Blocks(most), kDelayedBlocks) : Blocks(most);
  LaunchKernel(CopyRowsKernel, blocks, kThreads, 0, Cuda(stream), "launching the copy of rows", all,
               static_cast<std::uint64_t>(delay.count()));
}

void CudaCheckKernels::RoundValues(Dtype dtype, double* values, std::int64_t count, cppool_stream stream) {
  LaunchKernel(RoundKernel, Blocks(count), kThreads, 0, Cuda(stream), "launching the rounding of values",
               dtype, values, count);
}

void CudaCheckKernels::FillValues(double* values, double value, std::int64_t count, cppool_stream stream) {
  LaunchKernel(FillKernel, Blocks(count), kThreads, 0, Cuda(stream), "launching the filling of values",
               values, value, count);
}

}  // namespace cppool::kernels::cuda
