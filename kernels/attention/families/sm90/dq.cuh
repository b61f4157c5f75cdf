// What is done to dq before and after the backward kernel adds to it in fp32: zeros, and the result in the
// tensor's dtype. Only rows that are tokens; memory decides the speed.
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm90/backward_parameters.h"
#include "kernels/attention/families/sm90/ptx.cuh"

namespace cppool::kernels::cuda::sm90 {

// With Config::kDqAsMade sums lie in the order in which consumers have them, so that these store 16 bytes at
// a time without bank conflicts: of 16 dims of a row the chunk of 16 bytes i is dims 2 i, 2 i + 1, 8 + 2 i
// and 9 + 2 i, and in odd rows of a block two such 16 are swapped.
//
// Returns the chunk, of the 8 of 32 dims, that holds chunk `i` of the first or second 16.
__device__ __forceinline__ int DqChunk(int row, int sixteen, int i) { return (sixteen ^ (row % 2)) * 4 + i; }

inline constexpr int kDqRowsPerBlock = 8, kDqThreads = 256;

// Calls use(row of the block, offset) for every fourth element of the rows of blocks [., heads * dim]. Grid:
// blocks, then rows / 8.
template <typename Use>
__device__ __forceinline__ void ForElements(const QueryBlock* blocks, int step, int row_size,
                                            const Use& use) {
  const QueryBlock block = blocks[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * kDqRowsPerBlock;
  const int end = min(first + kDqRowsPerBlock, block.length);
  for (int row = first; row < end; ++row) {
    const std::int64_t at = (static_cast<std::int64_t>(block.token + row) * step + block.member) * row_size;
    for (int i = static_cast<int>(threadIdx.x) * 4; i < row_size; i += kDqThreads * 4) use(row, at + i);
  }
}

static __global__ void __launch_bounds__(kDqThreads)
    ZeroDqKernel(const QueryBlock* blocks, int step, int row_size, float* dq) {
  ForElements(blocks, step, row_size,
              [&](int, std::int64_t at) { *reinterpret_cast<float4*>(dq + at) = make_float4(0, 0, 0, 0); });
}

template <typename T, bool kAsMade>
__global__ void __launch_bounds__(kDqThreads)
    RoundDqKernel(const QueryBlock* blocks, int step, int row_size, const float* from, T* to) {
  ForElements(blocks, step, row_size, [&](int row, std::int64_t at) {
    float4 four;
    if constexpr (kAsMade) {
      const int dim = static_cast<int>(at % 32), i = dim % 8 / 2;
      const float* const pairs = from + at - dim + dim % 16 / 8 * 2;
      const float2 low = *reinterpret_cast<const float2*>(pairs + DqChunk(row, dim / 16, i) * 4);
      const float2 high = *reinterpret_cast<const float2*>(pairs + DqChunk(row, dim / 16, i + 1) * 4);
      four = make_float4(low.x, low.y, high.x, high.y);
    } else {
      four = *reinterpret_cast<const float4*>(from + at);
    }
    *reinterpret_cast<uint2*>(to + at) =
        make_uint2(ptx::Pack<T>(four.x, four.y), ptx::Pack<T>(four.z, four.w));
  });
}

}  // namespace cppool::kernels::cuda::sm90
