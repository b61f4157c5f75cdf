// A word that a stream writes when it comes there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cppool::kernels::cuda {

// Finds the driver's function, which may take long. Throws RuntimeError, as WriteWord does.
void LoadWriteWord();
// Writes `value` to memory of a device or to page-locked memory, after all of the stream's work before it:
// who sees the value sees what that work has written.
void WriteWord(cudaStream_t stream, std::uint32_t* word, std::uint32_t value);

}  // namespace cppool::kernels::cuda
