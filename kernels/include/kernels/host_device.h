// Marks functions that are compiled for the host and for CUDA kernels.
#pragma once

#ifdef __CUDACC__
#define CPPOOL_HOST_DEVICE __host__ __device__
#else
#define CPPOOL_HOST_DEVICE
#endif
