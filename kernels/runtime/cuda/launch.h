// Loads and launches kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {

// Loads kernels on the current device by reading their attributes: at their first launch it could wait for
// the device.
template <typename... Kernels>
void LoadKernels(const char* what, Kernels*... kernels) {
  cudaFuncAttributes attributes;
  (CheckCuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels)), what), ...);
}

// Launches the kernel. `what` names it in the error's text.
template <typename... Parameters>
void LaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
                  const char* what, const std::type_identity_t<Parameters>&... parameters) {
  void* arguments[] = {nullptr, const_cast<std::remove_const_t<Parameters>*>(&parameters)...};
  CheckCuda(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments + 1,
                             static_cast<std::size_t>(shared_bytes), stream),
            what);
}

}  // namespace cppool::kernels::cuda
