// Loads kernels, and launches one in clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda::sm90 {

// Before the first launch. `shared_bytes` of dynamic shared memory, which may be more than a kernel gets
// unasked.
template <typename... Parameters>
void LoadKernel(void (*kernel)(Parameters...), int shared_bytes) {
  CheckCuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
            "cudaFuncSetAttribute");
}

// As LaunchKernel, in clusters of `cluster` thread blocks.
template <typename... Parameters>
void LaunchClusters(void (*kernel)(Parameters...), unsigned cluster, dim3 grid, int threads, int shared_bytes,
                    cudaStream_t stream, const char* what,
                    const std::type_identity_t<Parameters>&... parameters) {
  void* arguments[] = {const_cast<std::remove_const_t<Parameters>*>(&parameters)...};
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &size;
  config.numAttrs = 1;
  CheckCuda(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments), what);
}

}  // namespace cppool::kernels::cuda::sm90
