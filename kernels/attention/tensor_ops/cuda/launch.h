// Launch functions of the tensor operations' kernels, which are memory-bound. Arguments as in TensorOps and
// Fp8Ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/attention/tensor_ops/cuda/row_view.h"
#include "kernels/error.h"

namespace cppool::kernels::cuda {

// The number of blocks of `block_threads` threads for at least `threads` threads. Throws RuntimeError,
// CPPOOL_UNSUPPORTED, when it exceeds the limit of a grid.
inline unsigned BlocksFor(std::int64_t threads, int block_threads) {
  const std::int64_t blocks = (threads + block_threads - 1) / block_threads;
  if (blocks > 0x7fffffff) throw RuntimeError(CPPOOL_UNSUPPORTED, "a tensor is too large for one kernel");
  return static_cast<unsigned>(blocks);
}

// heads.cu has delta, splitting and merging heads for an all-to-all, and rounding.

inline constexpr int kMaxParts = 64;  // of an all-to-all; limited because the list is a kernel parameter

// out and dout are [vectors, dim] of `dtype`, dim a multiple of 64, 16-byte aligned; delta is [vectors].
void LaunchDelta(Dtype dtype, std::int64_t vectors, int dim, const void* out, const void* dout, float* delta,
                 cudaStream_t stream);

void LaunchSplitHeads(Dtype dtype, std::int64_t rows, int heads, int dim,
                      const std::vector<HeadRange>& ranges, const void* from, void* to, cudaStream_t stream);
void LaunchMergeHeads(Dtype from_dtype, Dtype to_dtype, std::int64_t rows, int heads, int dim,
                      const std::vector<HeadRange>& ranges, const void* from, void* to, cudaStream_t stream);
void LaunchRoundSum(const std::vector<const float*>& parts, Dtype dtype, void* to, std::int64_t count,
                    cudaStream_t stream);

// sums.cu has fills, sums, the merge of partial outputs, and the softmax offset, in fp32 with a fixed order
// of additions.

// lse and total are [rows, heads].
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

// fp8.cu has what 8-bit payloads and their scales need, with the casts of kernels/numerics/fp8.h.

void LaunchAmax(const RowView& rows, std::int64_t columns, TensorRef from, float* amax, cudaStream_t stream);
void LaunchMakeScale(Dtype format, const float* amax, Fp8Scale* to, cudaStream_t stream);
void LaunchCast(const RowView& rows, std::int64_t columns, TensorRef from, const Fp8Scale* scale,
                TensorOut payload, cudaStream_t stream);
void LaunchDequantize(const RowView& rows, std::int64_t columns, TensorRef payload, TensorOut to,
                      cudaStream_t stream);
void LaunchScaledDelta(const RowView& rows, int heads, int dim, TensorRef out, TensorRef dout, float* delta,
                       cudaStream_t stream);
// `blocks` has tiles of at most kMxBlock rows, and dim is a multiple of kMxBlock.
void LaunchCastBlocks(const RowView& blocks, MxAxis axis, int heads, int dim, TensorRef from,
                      const MxTensor& to, cudaStream_t stream);
void LaunchDequantizeBlocks(const RowView& blocks, MxAxis axis, int heads, int dim, const MxTensor& from,
                            TensorOut to, cudaStream_t stream);
// `slots` has a tile for each kSlotTile slots.
void LaunchTranspose(const RowView& slots, int heads, int dim, TensorRef payload, std::uint8_t* to,
                     cudaStream_t stream);

// Each loads the kernels of one of these files on the current device, so that no call waits for it.
void LoadHeadKernels();
void LoadSums();
void LoadFp8Kernels();

}  // namespace cppool::kernels::cuda
