// Fills, sums and what a softmax offset needs: fp32, in one fixed order. Arguments as in AttentionKernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/families/sm80/parameters.h"

namespace cppool::kernels::cuda {

// lse and total [rows, heads].
void LaunchAddOffset(std::int64_t rows, int heads, const float* lse, const float* offset, float* total,
                     cudaStream_t stream);
// `queries`: a list of `tiles` tiles of at most `tile_rows` queries.
void LaunchOffsetGradient(const WorkView& queries, int tiles, int tile_rows, int heads, const float* total,
                          const float* delta, const float* offset, float* gradient, cudaStream_t stream);
void LaunchFill(float* to, float value, std::int64_t count, cudaStream_t stream);
void LaunchAdd(const float* from, float* to, std::int64_t count, cudaStream_t stream);
void LaunchSumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                   cudaStream_t stream);

// Loads all of the above onto the current device.
void LoadSums();

}  // namespace cppool::kernels::cuda
