// The kernel under test: out[i] = the sum over r < ranks of in[r * count + i].
#pragma once

#include <stddef.h>

// On the GPU, in the order of `stream` (a cudaStream_t). A cudaError_t as text, or NULL.
const char* LaunchSum(const float* in, float* out, size_t count, int ranks, void* stream);
