// The fp16 instances of the forward kernel.
#include "kernels/attention/families/sm90/forward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {

template ForwardKernelEntry ForwardKernelOf<__half>(int dim_qk, int dim_v);

}  // namespace cppool::kernels::cuda::sm90
