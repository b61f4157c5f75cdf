// The code under test: out[i] = the sum over r < ranks of in[r * count + i].
#pragma once

#include <stddef.h>

// On the host.
inline void Sum(const float* in, float* out, size_t count, int ranks) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = 0;
    for (int rank = 0; rank < ranks; ++rank) out[i] += in[rank * count + i];
  }
}

// On the GPU, in the order of `stream` (a cudaStream_t). A cudaError_t as text, or NULL.
#ifdef WITH_CUDA
inline constexpr bool kSumOnCuda = true;
const char* LaunchSum(const float* in, float* out, size_t count, int ranks, void* stream);
#else
inline constexpr bool kSumOnCuda = false;
inline const char* LaunchSum(const float*, float*, size_t, int, void*) { return "built without nvcc"; }
#endif
