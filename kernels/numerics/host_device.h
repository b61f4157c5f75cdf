// Functions that are the same on the host and in CUDA kernels.
#pragma once

#ifdef __CUDACC__
#define CPPOOL_HOST_DEVICE __host__ __device__
#else
#define CPPOOL_HOST_DEVICE
#endif
