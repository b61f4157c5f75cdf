// The bf16 instances of the forward kernel with a bias.
#include "kernels/attention/families/sm90/forward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {

template ForwardKernelEntry BiasedForwardKernelOf<__nv_bfloat16>(int dim_qk, int dim_v);

}  // namespace cppool::kernels::cuda::sm90
