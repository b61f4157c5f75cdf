// The plain instances of the forward kernel, in a separate file so that files compile in parallel.
#include "kernels/attention/families/sm80/forward.cuh"

namespace cppool::kernels::cuda {

template Kernel<ForwardParameters> ForwardKernelOf<Variant::kPlain>(const KernelShape& shape);

}  // namespace cppool::kernels::cuda
