// Delays a stream for a given time, in stream order.
#pragma once

#include <cuda_runtime.h>

#include <chrono>

namespace cppool::kernels::cuda {

// At least `time` by the device's clock, with one thread of the device that mostly sleeps. Throws RuntimeError.
void HoldStream(cudaStream_t stream, std::chrono::nanoseconds time);

}  // namespace cppool::kernels::cuda
