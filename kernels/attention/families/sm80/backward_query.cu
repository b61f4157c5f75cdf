// The plain instances of the kernel for dq, in a separate file so that files compile in parallel.
#include "kernels/attention/families/sm80/backward_query.cuh"

namespace cppool::kernels::cuda {

template Kernel<BackwardParameters> BackwardQueryKernelOf<Variant::kPlain>(const KernelShape& shape);

}  // namespace cppool::kernels::cuda
