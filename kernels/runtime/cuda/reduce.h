// Reductions over the ranks' buffers on the device, in the order of the ranks, so that every run gives the
// same bits.
#pragma once

#include <cppool/runtime.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

namespace cppool::kernels::cuda {

// out[i] = the reduction of in[0][i], in[1][i], ... for i < count, at most 64 of them. float16 and bfloat16
// are added in float32 and rounded once; integers wrap; the maximum of anything and NaN is NaN. `out` may be
// one of the inputs. The stream's device must reach all of this memory. Throws RuntimeError.
void LaunchReduce(cppool_dtype dtype, cppool_reduce reduce, const std::vector<const void*>& in,
                  std::size_t count, void* out, cudaStream_t stream);

// Makes the driver load the kernels for the current device now instead of at their first launch.
void LoadReduce();

}  // namespace cppool::kernels::cuda
