// Inputs from the counter-based generator: one thread per counter, that is per four consecutive dims of one
// token's head.
#include <algorithm>
#include <cstdint>

#include "check/launch.h"
#include "kernels/attention/philox.h"
#include "runtime/cuda_check.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;  // per segment; a block goes on to further tokens
constexpr int kSegments =
    128;  // per launch: they travel as a kernel argument, which needs neither memory nor a copy

struct Segments {
  Segment segment[kSegments];
};
static_assert(sizeof(Segments) < 3800, "kernel arguments are limited to 4 KiB");

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};

template <Dtype dtype>
__device__ auto InputBits(float value) {
  if constexpr (dtype == Dtype::kBf16) {
    return InputBf16(value);
  } else if constexpr (dtype == Dtype::kFp16) {
    return InputFp16(value);
  } else if constexpr (dtype == Dtype::kFp32) {
    return value;
  } else {
    return static_cast<double>(value);
  }
}

// Block (x, s): tokens x * blockDim.y + threadIdx.y, ... of segment s; threadIdx.x walks over the token's
// heads and dims.
template <Dtype dtype>
__global__ void GenerateKernel(std::uint32_t tensor, std::uint64_t seed, Segments segments, int row_step,
                               int heads, int dim, void* to) {
  using T = decltype(InputBits<dtype>(0.0f));
  const Segment segment = segments.segment[blockIdx.y];
  const int quads = (dim + 3) / 4;
  const bool whole = dim % 4 == 0 && reinterpret_cast<std::uintptr_t>(to) % sizeof(Four<T>) == 0;
  for (std::int64_t token = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y; token < segment.length;
       token += std::int64_t{gridDim.x} * blockDim.y) {
    T* row = static_cast<T*>(to) + (segment.row + token * row_step) * heads * dim;
    for (int unit = threadIdx.x; unit < heads * quads; unit += blockDim.x) {
      const int head = unit / quads;
      const int quad = unit % quads;
      const PhiloxBlock words =
          InputWords(seed, tensor, segment.sequence, segment.position + static_cast<int>(token), head, quad);
      T* at = row + std::int64_t{head} * dim + quad * 4;
      Four<T> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.value[e] = InputBits<dtype>(InputValue(words.word[e]));
      if (whole) {
        *reinterpret_cast<Four<T>*>(at) = four;
      } else {
        for (int e = 0; e < 4 && quad * 4 + e < dim; ++e) at[e] = four.value[e];
      }
    }
  }
}

using Kernel = void (*)(std::uint32_t, std::uint64_t, Segments, int, int, int, void*);

Kernel KernelFor(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
      return GenerateKernel<Dtype::kFp16>;
    case Dtype::kBf16:
      return GenerateKernel<Dtype::kBf16>;
    case Dtype::kFp32:
      return GenerateKernel<Dtype::kFp32>;
    case Dtype::kFp64:
      return GenerateKernel<Dtype::kFp64>;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "generate: unknown dtype");
}

}  // namespace

void LoadGenerate() {
  cudaFuncAttributes attributes;
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    CheckCuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(KernelFor(dtype))),
              "loading the input generator");
  }
}

void LaunchGenerate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim,
                    Dtype dtype, void* to, cudaStream_t stream) {
  const int units = heads * ((dim + 3) / 4);
  int width = 32;
  while (width < units && width < kThreads) width *= 2;
  const dim3 block(width, kThreads / width);
  for (std::size_t begin = 0; begin < layout.segments.size(); begin += kSegments) {
    const std::size_t count = std::min<std::size_t>(kSegments, layout.segments.size() - begin);
    Segments segments{};
    std::copy_n(layout.segments.begin() + begin, count, segments.segment);
    std::int32_t longest = 0;
    for (std::size_t i = 0; i < count; ++i) longest = std::max(longest, segments.segment[i].length);
    if (longest == 0) continue;
    const unsigned blocks = std::min<unsigned>(kMaxBlocks, (longest + block.y - 1) / block.y);
    KernelFor(dtype)<<<dim3(blocks, static_cast<unsigned>(count)), block, 0, stream>>>(
        static_cast<std::uint32_t>(tensor), seed, segments, layout.row_step, heads, dim, to);
    CheckCuda(cudaGetLastError(), "launching the input generator");
  }
}

}  // namespace cppool::kernels::cuda
