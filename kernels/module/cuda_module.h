// The table that libcppool_cuda.so exports as `cppool_cuda_module`: CUDA and NCCL stay out of every other
// binary.
#pragma once

#include <memory>

#include "kernels/attention/attention_kernels.h"
#include "kernels/attention/check_kernels.h"
#include "kernels/backend.h"

namespace cppool::kernels {

struct CudaModule {
  const char* version;  // of the build; another version is refused
  std::unique_ptr<Backend> (*create_backend)(int world_size, Transport transport);
  std::unique_ptr<AttentionKernels> (*make_attention_kernels)(cppool_runtime*);
  std::unique_ptr<CheckKernels> (*make_check_kernels)(cppool_runtime*);
};

inline constexpr const char* kCudaModuleSymbol =
    "cppool_cuda_module";  // extern "C" const CudaModule* cppool_cuda_module()

}  // namespace cppool::kernels
