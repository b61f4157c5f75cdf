// Launch functions of memory-bound kernels: delta, splitting and merging heads for an all-to-all, and rounding. Arguments as in
// TensorOps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/attention/tensor_ops.h"

namespace cppool::kernels::cuda {

inline constexpr int kMaxParts = 64;  // of an all-to-all; limited because the list is a kernel parameter

// out and dout [vectors, dim] of `dtype`, dim a multiple of 64, 16-byte aligned; delta [vectors].
void LaunchDelta(Dtype dtype, std::int64_t vectors, int dim, const void* out, const void* dout, float* delta,
                 cudaStream_t stream);

void LaunchSplitHeads(Dtype dtype, std::int64_t rows, int heads, int dim,
                      const std::vector<HeadRange>& ranges, const void* from, void* to, cudaStream_t stream);
void LaunchMergeHeads(Dtype from_dtype, Dtype to_dtype, std::int64_t rows, int heads, int dim,
                      const std::vector<HeadRange>& ranges, const void* from, void* to, cudaStream_t stream);
void LaunchRound(const float* from, Dtype dtype, void* to, std::int64_t count, cudaStream_t stream);

// Loads all these kernels on the current device.
void LoadHeadKernels();

}  // namespace cppool::kernels::cuda
