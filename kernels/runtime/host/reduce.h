// Reductions over the ranks' buffers, in the order of the ranks, so that every run gives the same bits.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>
#include <vector>

namespace cppool::kernels::host {

// out[i] = the reduction of in[0][i], in[1][i], ... for i < count. float16 and bfloat16 are summed in float32
// and rounded once; integers wrap; the maximum of anything and NaN is NaN. `out` may be one of the inputs.
void Reduce(cppool_dtype dtype, cppool_reduce reduce, const std::vector<const void*>& in, std::size_t count,
            void* out);

}  // namespace cppool::kernels::host
