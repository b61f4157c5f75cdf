// The table that libcppool_cuda.so exports as `cppool_cuda_module`. No other binary has CUDA or NCCL.
#pragma once

#include <memory>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/check_kernels.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/backend.h"

namespace cppool::kernels {

struct CudaModule {
  // SeamId() of build_id.h. It stays the first member: with another id nothing else of the table is read.
  const char* seam_id;
  const char* commit;  // Commit(); empty: unknown
  std::unique_ptr<Backend> (*create_backend)(const Place&, Transport, WorldLink);
  std::vector<const AttentionFamily*> (*attention_families)();  // the preferred ones first
  std::unique_ptr<TensorOps> (*make_tensor_ops)(cppool_runtime*);
  std::unique_ptr<CheckKernels> (*make_check_kernels)(cppool_runtime*);
};

inline constexpr const char* kCudaModuleSymbol =
    "cppool_cuda_module";  // extern "C" const CudaModule* cppool_cuda_module()

// The module, opened by the first call that succeeds and kept until the process ends. Any thread. Throws
// RuntimeError that says what to do. In library cppool_kernels (cuda_loader.cpp).
const CudaModule& OpenCudaModule();

}  // namespace cppool::kernels
