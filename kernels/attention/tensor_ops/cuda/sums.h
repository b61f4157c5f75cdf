// Launch functions for fills, sums, the merge of partial outputs, and the softmax offset, in fp32 with a fixed order of additions.
// Arguments as in TensorOps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/tensor_ops.h"
#include "kernels/attention/tensor_ops/cuda/row_view.h"

namespace cppool::kernels::cuda {

// lse and total [rows, heads].
void LaunchAddOffset(std::int64_t rows, int heads, const float* lse, const float* offset, float* total,
                     cudaStream_t stream);
void LaunchOffsetGradient(const RowView& rows, int heads, const float* total, const float* delta,
                          const float* offset, float* gradient, cudaStream_t stream);
void LaunchMerge(const RowView& rows, const MergeArgs& args, cudaStream_t stream);
void LaunchFill(float* to, float value, std::int64_t count, cudaStream_t stream);
void LaunchAccumulate(Dtype dtype, const void* from, float* to, std::int64_t count, bool first,
                      cudaStream_t stream);
void LaunchCopyStrided(const StridedCopy& copy, cudaStream_t stream);
void LaunchAddStrided(const StridedSum& sum, cudaStream_t stream);
void LaunchMaxRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                   cudaStream_t stream);
void LaunchSumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                   cudaStream_t stream);

// Loads all these kernels on the current device.
void LoadSums();

}  // namespace cppool::kernels::cuda
