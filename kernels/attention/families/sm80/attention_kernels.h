// AttentionKernels on CUDA: tensor core kernels for sm_80 and newer, one code path (mma.sync).
#pragma once

#include <memory>

#include "kernels/attention/attention_kernels.h"

namespace cppool::kernels::cuda {

// For one rank, on its thread, with its device current. `runtime` is that rank's of the CUDA backend and outlives the result.
std::unique_ptr<AttentionKernels> MakeAttentionKernels(cppool_runtime* runtime);

}  // namespace cppool::kernels::cuda
