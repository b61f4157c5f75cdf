// The faults of a device (kernels/backend.h), each by a kernel of one thread, in stream order.
#pragma once

#include <cuda_runtime.h>

#include "kernels/backend.h"

namespace cppool::kernels::cuda {

// `memory`: for kFlipBit the byte, for kOutOfBounds an allocation whose end is left far behind: near it, the
// memory is another's of the same pool, and nothing would notice. Throws RuntimeError.
void BreakDevice(DeviceFault fault, void* memory, cudaStream_t stream);

// Loads the kernels: at their first use that could wait for a collective of another rank.
void LoadDeviceFaults();

}  // namespace cppool::kernels::cuda
