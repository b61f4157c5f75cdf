#include "kernels/attention/families/sm90/forward.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cppool::kernels::cuda::sm90 {

ForwardKernelEntry ForwardKernelOf(Dtype dtype, int dim_qk, int dim_v, bool bias) {
  const auto of = [&]<typename T>() {
    return bias ? BiasedForwardKernelOf<T>(dim_qk, dim_v) : ForwardKernelOf<T>(dim_qk, dim_v);
  };
  if (dtype == Dtype::kBf16) return of.operator()<__nv_bfloat16>();
  if (dtype == Dtype::kFp16) return of.operator()<__half>();
  return {};
}

}  // namespace cppool::kernels::cuda::sm90
