#include "kernels/attention/families/sm90/backward.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cppool::kernels::cuda::sm90 {

BackwardKernelEntry BackwardKernelOf(Dtype dtype, int dim_qk, int dim_v) {
  if (dtype == Dtype::kBf16) return BackwardKernelOf<__nv_bfloat16>(dim_qk, dim_v);
  if (dtype == Dtype::kFp16) return BackwardKernelOf<__half>(dim_qk, dim_v);
  return {};
}

}  // namespace cppool::kernels::cuda::sm90
