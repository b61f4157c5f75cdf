// The kernels that belong to a runtime: the host's, or those of the CUDA module that made the runtime.
#include <string_view>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/attention/families/host/family.h"
#include "kernels/attention/tensor_ops/host/tensor_ops.h"
#include "kernels/error.h"
#include "kernels/module/cuda_loader.h"

namespace cppool::kernels {
namespace {

bool OnHost(std::string_view backend) {
  if (backend != "host" && backend != "cuda")
    throw RuntimeError(CPPOOL_INTERNAL, "no kernels for the backend " + std::string(backend));
  return backend == "host";
}

}  // namespace

std::vector<const AttentionFamily*> AttentionFamilies(std::string_view backend) {
  return OnHost(backend) ? std::vector<const AttentionFamily*>{&host::HostFamily()}
                         : OpenCudaModule().attention_families();
}

std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime) {
  return OnHost(runtime->backend) ? host::MakeTensorOps(runtime) : OpenCudaModule().make_tensor_ops(runtime);
}

std::unique_ptr<CheckKernels> MakeCheckKernels(cppool_runtime* runtime) {
  return OnHost(runtime->backend) ? MakeHostCheckKernels(runtime)
                                  : OpenCudaModule().make_check_kernels(runtime);
}

}  // namespace cppool::kernels
