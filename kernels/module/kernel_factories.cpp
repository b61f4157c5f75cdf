// The kernels that belong to a runtime: the host's, or those of the CUDA module that made the runtime.
#include <string_view>

#include "kernels/attention/families/host/attention_kernels.h"
#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/module/cuda_loader.h"
#include "kernels/error.h"

namespace cppool::kernels {
namespace {

bool OnHost(const cppool_runtime* runtime) {
  const std::string_view backend = runtime->backend;
  if (backend != "host" && backend != "cuda")
    throw RuntimeError(CPPOOL_INTERNAL, "no kernels for the backend " + std::string(backend));
  return backend == "host";
}

}  // namespace

std::unique_ptr<AttentionKernels> MakeAttentionKernels(cppool_runtime* runtime) {
  return OnHost(runtime) ? MakeHostAttentionKernels(runtime)
                         : OpenCudaModule().make_attention_kernels(runtime);
}

std::unique_ptr<CheckKernels> MakeCheckKernels(cppool_runtime* runtime) {
  return OnHost(runtime) ? MakeHostCheckKernels(runtime) : OpenCudaModule().make_check_kernels(runtime);
}

}  // namespace cppool::kernels
