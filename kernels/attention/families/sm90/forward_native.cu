// The instances of the forward kernel with products of payloads.
#include "kernels/attention/families/sm90/forward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {

ForwardKernelEntry NativeForwardKernelOf(int dim_qk, int dim_v) {
  return ForwardEntry<__nv_bfloat16, NativeForwardTiling>(dim_qk, dim_v);
}

}  // namespace cppool::kernels::cuda::sm90
