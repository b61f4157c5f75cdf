// Generates inputs with the counter-based generator. Each thread computes one counter: four consecutive dims
// of one head of a token, or four consecutive keys of a bias.
#include <algorithm>
#include <cstdint>

#include "kernels/attention/checks/cuda/check_kernels.h"
#include "kernels/numerics/philox.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;  // per segment; a block loops over further tokens
constexpr int kSegments =
    128;  // per launch; passed as a kernel argument, which needs neither device memory nor a copy

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
    static_assert(dtype == Dtype::kFp64);
    return static_cast<double>(value);
  }
}

// Block (x, s) generates tokens x * blockDim.y + threadIdx.y, ... of segment s; threadIdx.x loops over the
// heads and dims of a token.
template <Dtype dtype>
__global__ void GenerateKernel(std::uint32_t tensor, std::uint64_t seed, Segments segments, int row_step,
                               int heads, int dim, bool uneven, void* to) {
  const bool is_k = tensor == static_cast<std::uint32_t>(InputTensor::kK),
             is_v = tensor == static_cast<std::uint32_t>(InputTensor::kV);
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
      for (int e = 0; e < 4; ++e) {
        float value = InputValue(words.word[e]);
        if (uneven) {
          value *= UnevenFactor(is_k, is_v, segment.sequence, segment.position + static_cast<int>(token),
                                head, quad * 4 + e);
        }
        four.value[e] = InputBits<dtype>(value);
      }
      if (whole) {
        *reinterpret_cast<Four<T>*>(at) = four;
      } else {
        for (int e = 0; e < 4 && quad * 4 + e < dim; ++e) at[e] = four.value[e];
      }
    }
  }
}

// Block (x, y, z) generates keys 4 * blockDim.x * x, ... of queries y, ... of the matrices z, ... (one for
// each sequence and head); threadIdx.y selects one of several queries.
template <Dtype dtype>
__global__ void __launch_bounds__(kThreads)
    GenerateBiasKernel(std::uint64_t seed, std::int64_t matrices, int heads, std::int64_t seqlen_q,
                       std::int64_t seqlen_kv, void* to) {
  using T = decltype(InputBits<dtype>(0.0f));
  const std::int64_t quad = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t there = seqlen_kv - quad * 4;
  if (there <= 0) return;
  const bool whole = seqlen_kv % 4 == 0 && reinterpret_cast<std::uintptr_t>(to) % sizeof(Four<T>) == 0;
  for (std::int64_t matrix = blockIdx.z; matrix < matrices; matrix += gridDim.z) {
    const auto sequence = static_cast<std::uint32_t>(matrix / heads);
    const auto head = static_cast<std::uint32_t>(matrix % heads);
    for (std::int64_t query = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y; query < seqlen_q;
         query += std::int64_t{gridDim.y} * blockDim.y) {
      const PhiloxBlock words =
          BiasWords(seed, static_cast<std::uint32_t>(InputTensor::kBias), sequence,
                    static_cast<std::uint32_t>(query), head, static_cast<std::uint32_t>(quad));
      T* at = static_cast<T*>(to) + (matrix * seqlen_q + query) * seqlen_kv + quad * 4;
      Four<T> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.value[e] = InputBits<dtype>(InputValue(words.word[e]));
      if (whole) {
        *reinterpret_cast<Four<T>*>(at) = four;
      } else {
        for (int e = 0; e < 4 && e < there; ++e) at[e] = four.value[e];
      }
    }
  }
}

// Calls visit.operator()<dtype>() for a dtype that inputs are drawn in.
template <typename Visit>
void WithInputDtype(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::kFp16:
      return visit.template operator()<Dtype::kFp16>();
    case Dtype::kBf16:
      return visit.template operator()<Dtype::kBf16>();
    case Dtype::kFp32:
      return visit.template operator()<Dtype::kFp32>();
    case Dtype::kFp64:
      return visit.template operator()<Dtype::kFp64>();
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;  // inputs are quantized, not drawn
  }
  throw RuntimeError(CPPOOL_INTERNAL, "generate: unknown dtype");
}

// Returns how many of a block's threads lie along an axis of so many units: a power of two.
int WidthFor(std::int64_t units) {
  int width = 32;
  while (width < units && width < kThreads) width *= 2;
  return width;
}

}  // namespace

void CudaCheckKernels::LoadGenerate() {
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    WithInputDtype(dtype, [&]<Dtype kDtype>() {
      LoadKernels("loading the input generator", GenerateKernel<kDtype>, GenerateBiasKernel<kDtype>);
    });
  }
}

void CudaCheckKernels::Generate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads,
                                int dim, Dtype dtype, void* to, cppool_stream stream, bool uneven) {
  const int width = WidthFor(heads * ((dim + 3) / 4));
  const dim3 block(width, kThreads / width);
  for (std::size_t begin = 0; begin < layout.segments.size(); begin += kSegments) {
    const std::size_t count = std::min<std::size_t>(kSegments, layout.segments.size() - begin);
    Segments segments{};
    std::copy_n(layout.segments.begin() + begin, count, segments.segment);
    std::int32_t longest = 0;
    for (std::size_t i = 0; i < count; ++i) longest = std::max(longest, segments.segment[i].length);
    if (longest == 0) continue;
    const dim3 grid(std::min<unsigned>(kMaxBlocks, (longest + block.y - 1) / block.y),
                    static_cast<unsigned>(count));
    WithInputDtype(dtype, [&]<Dtype kDtype>() {
      LaunchKernel(GenerateKernel<kDtype>, grid, block, 0, Cuda(stream), "launching the input generator",
                   static_cast<std::uint32_t>(tensor), seed, segments, layout.row_step, heads, dim, uneven,
                   to);
    });
  }
}

void CudaCheckKernels::GenerateBias(std::uint64_t seed, std::int64_t batch, int heads, std::int64_t seqlen_q,
                                    std::int64_t seqlen_kv, Dtype dtype, void* to, cppool_stream stream) {
  const std::int64_t matrices = batch * heads;
  const std::int64_t quads = (seqlen_kv + 3) / 4;
  if (matrices == 0 || seqlen_q == 0 || quads == 0) return;
  const int width = WidthFor(quads);
  const dim3 block(width, kThreads / width);
  const std::int64_t rows = (seqlen_q + block.y - 1) / block.y;
  const dim3 grid(static_cast<unsigned>((quads + width - 1) / width),
                  static_cast<unsigned>(std::min<std::int64_t>(rows, kMaxBlocks)),
                  static_cast<unsigned>(std::min<std::int64_t>(matrices, kMaxBlocks)));
  WithInputDtype(dtype, [&]<Dtype kDtype>() {
    LaunchKernel(GenerateBiasKernel<kDtype>, grid, block, 0, Cuda(stream), "launching the bias generator",
                 seed, matrices, heads, seqlen_q, seqlen_kv, to);
  });
}

}  // namespace cppool::kernels::cuda
