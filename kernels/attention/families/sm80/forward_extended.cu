// The extended instances of the forward kernel. Files of their own compile side by side.
#include "kernels/attention/families/sm80/forward.cuh"

namespace cppool::kernels::cuda {

template Kernel<ForwardParameters> ForwardKernelOf<true>(const KernelShape& shape);

}  // namespace cppool::kernels::cuda
