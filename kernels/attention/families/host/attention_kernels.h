// Attention on the host: what attention_kernels.h asks for, on the host runtime's streams. fp16 or bf16 in
// memory, fp32 arithmetic, and P and dS rounded to the tensors' dtype before their matrix products, so that
// errors are like those of tensor-core kernels.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/attention_kernels.h"

namespace cppool::kernels {

// The runtime must be the host's and outlive the kernels.
std::unique_ptr<AttentionKernels> MakeHostAttentionKernels(cppool_runtime* runtime);

}  // namespace cppool::kernels
