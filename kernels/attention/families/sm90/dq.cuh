// What is done to dq before and after the backward kernel adds to it in fp32: zeros, and the result in the
// tensor's dtype. Only rows that are tokens; memory decides the speed.
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm90/backward_parameters.h"
#include "kernels/attention/families/sm90/ptx.cuh"

namespace cppool::kernels::cuda::sm90 {

inline constexpr int kDqRowsPerBlock = 8, kDqThreads = 256;

// Calls use(offset) for every fourth element of the rows of blocks [., heads * dim]. Grid: blocks, then rows
// / 8.
template <typename Use>
__device__ __forceinline__ void ForElements(const QueryBlock* blocks, int step, int row_size,
                                            const Use& use) {
  const QueryBlock block = blocks[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * kDqRowsPerBlock;
  const int end = min(first + kDqRowsPerBlock, block.length);
  for (int row = first; row < end; ++row) {
    const std::int64_t at = (static_cast<std::int64_t>(block.token + row) * step + block.member) * row_size;
    for (int i = static_cast<int>(threadIdx.x) * 4; i < row_size; i += kDqThreads * 4) use(at + i);
  }
}

static __global__ void __launch_bounds__(kDqThreads)
    ZeroDqKernel(const QueryBlock* blocks, int step, int row_size, float* dq) {
  ForElements(blocks, step, row_size,
              [&](std::int64_t at) { *reinterpret_cast<float4*>(dq + at) = make_float4(0, 0, 0, 0); });
}

template <typename T>
__global__ void __launch_bounds__(kDqThreads)
    RoundDqKernel(const QueryBlock* blocks, int step, int row_size, const float* from, T* to) {
  ForElements(blocks, step, row_size, [&](std::int64_t at) {
    const float4 four = *reinterpret_cast<const float4*>(from + at);
    *reinterpret_cast<uint2*>(to + at) =
        make_uint2(ptx::Pack<T>(four.x, four.y), ptx::Pack<T>(four.z, four.w));
  });
}

}  // namespace cppool::kernels::cuda::sm90
