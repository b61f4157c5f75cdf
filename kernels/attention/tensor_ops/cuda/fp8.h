// Launch functions of the kernels for 8-bit payloads and their scales. Arguments as in Fp8Ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/tensor_ops/cuda/row_view.h"

namespace cppool::kernels::cuda {

void LaunchAmax(const RowView& rows, std::int64_t columns, TensorRef from, float* amax, cudaStream_t stream);
void LaunchMakeScale(Dtype format, const float* amax, Fp8Scale* to, cudaStream_t stream);
void LaunchCast(const RowView& rows, std::int64_t columns, TensorRef from, const Fp8Scale* scale,
                TensorOut payload, cudaStream_t stream);
void LaunchDequantise(const RowView& rows, std::int64_t columns, TensorRef payload, TensorOut to,
                      cudaStream_t stream);
void LaunchScaledDelta(const RowView& rows, int heads, int dim, TensorRef out, TensorRef dout, float* delta,
                       cudaStream_t stream);
// `blocks`: tiles of at most kMxBlock rows; dim: a multiple of kMxBlock.
void LaunchCastBlocks(const RowView& blocks, MxAxis axis, int heads, int dim, TensorRef from,
                      const MxTensor& to, cudaStream_t stream);
void LaunchWidenBlocks(const RowView& blocks, MxAxis axis, int heads, int dim, const MxTensor& from,
                       TensorOut to, cudaStream_t stream);

// Loads all these kernels on the current device.
void LoadFp8Kernels();

}  // namespace cppool::kernels::cuda
