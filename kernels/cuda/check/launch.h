// The launches behind CheckKernels: one file each. Load...() makes the driver load the kernels now instead of
// at their first launch.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels::cuda {

void LoadGenerate();
void LaunchGenerate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim,
                    Dtype dtype, void* to, cudaStream_t stream);

// `partials` holds CompareBlocks(args) CompareStats in device memory; `result` is page-locked host memory,
// written by the device.
void LoadCompare();
int CompareBlocks(const CompareArgs& args);
void LaunchCompare(const CompareArgs& args, CompareStats* partials, CompareStats* result,
                   cudaStream_t stream);

// `workspace` holds OracleBytes(args) bytes of device memory.
void LoadOracle();
std::size_t OracleBytes(const OracleArgs& args);
void LaunchOracle(const OracleArgs& args, std::byte* workspace, cudaStream_t stream);

}  // namespace cppool::kernels::cuda
