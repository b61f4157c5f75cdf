// The one throwing check for CUDA. `what` says what was being done: "cudaMemcpyAsync of 64 bytes".
#pragma once

#include <cuda_runtime.h>

#include "kernels/error.h"

namespace cppool::kernels::cuda {

// Throws RuntimeError: CPPOOL_OUT_OF_MEMORY when memory ran out, else CPPOOL_CUDA. Clears the thread's last
// error, so that it is not reported twice; a sticky error stays with the context.
void CheckCuda(cudaError_t result, const char* what);

// Loads kernels on the current device by reading their attributes, so that their first launch, which may have
// to wait for the device, is an ordinary one.
template <typename... Kernels>
void LoadKernels(const char* what, Kernels*... kernels) {
  cudaFuncAttributes attributes;
  (CheckCuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels)), what), ...);
}

}  // namespace cppool::kernels::cuda
