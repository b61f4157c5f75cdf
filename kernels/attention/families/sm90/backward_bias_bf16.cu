// The bf16 instances of the backward kernel with a bias.
#include "kernels/attention/families/sm90/backward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {

template BackwardKernelEntry BiasedBackwardKernelOf<__nv_bfloat16>(int dim_qk, int dim_v);

}  // namespace cppool::kernels::cuda::sm90
