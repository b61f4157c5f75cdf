// Delays a stream or breaks its device (the faults of kernels/backend.h), each by a kernel of one thread, in
// stream order.
#pragma once

#include <cuda_runtime.h>

#include <chrono>

#include "kernels/backend.h"

namespace cppool::kernels::cuda {

// Delays the stream by at least `time` of the device's clock; the thread mostly sleeps. Throws RuntimeError.
void HoldStream(cudaStream_t stream, std::chrono::nanoseconds time);

// `memory`: for kFlipBit the byte, for kOutOfBounds an allocation. The write is far behind its end: memory
// near it belongs to the same pool, and the write would not be noticed. Throws RuntimeError.
void BreakDevice(DeviceFault fault, void* memory, cudaStream_t stream);

// Loads the kernels now: loading at their first use could wait for a collective of another rank.
void LoadDeviceFaults();

}  // namespace cppool::kernels::cuda
