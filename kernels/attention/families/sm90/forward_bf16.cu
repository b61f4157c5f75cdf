// The bf16 instances of the forward kernel.
#include "kernels/attention/families/sm90/forward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {

template ForwardKernelEntry ForwardKernelOf<__nv_bfloat16>(int dim_qk, int dim_v);

}  // namespace cppool::kernels::cuda::sm90
