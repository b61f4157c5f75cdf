#include "kernels/attention/families/sm90/backward.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cppool::kernels::cuda::sm90 {

BackwardKernelEntry BackwardKernelOf(Dtype dtype, int dim_qk, int dim_v, bool bias) {
  const auto of = [&]<typename T>() {
    return bias ? BiasedBackwardKernelOf<T>(dim_qk, dim_v) : BackwardKernelOf<T>(dim_qk, dim_v);
  };
  if (dtype == Dtype::kBf16) return of.operator()<__nv_bfloat16>();
  if (dtype == Dtype::kFp16) return of.operator()<__half>();
  return {};
}

}  // namespace cppool::kernels::cuda::sm90
