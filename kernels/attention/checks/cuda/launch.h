// The launch functions of CheckKernels. Load...() makes the driver load the kernels of a file now instead of
// at their first launch.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels::cuda {

void LoadGenerate();
void LaunchGenerate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim,
                    Dtype dtype, bool uneven, void* to, cudaStream_t stream);
void LaunchGenerateBias(std::uint64_t seed, std::int64_t batch, int heads, std::int64_t seqlen_q,
                        std::int64_t seqlen_kv, Dtype dtype, void* to, cudaStream_t stream);

// `partials` holds DigestBlocks(bytes) integers in device memory; `result` is page-locked host memory,
// written by the device.
void LoadValues();
int DigestBlocks(std::size_t bytes);
void LaunchDigest(const void* data, std::size_t bytes, std::uint64_t* partials, std::uint64_t* result,
                  cudaStream_t stream);
void LaunchCopyRows(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay, cudaStream_t stream);
void LaunchRoundValues(Dtype dtype, double* values, std::int64_t count, cudaStream_t stream);
void LaunchFillValues(double* values, double value, std::int64_t count, cudaStream_t stream);

// `partials` holds CompareBlocks(args) CompareStats in device memory; `result` is page-locked host memory,
// written by the device.
void LoadCompare();
int CompareBlocks(const CompareArgs& args);
void LaunchCompare(const CompareArgs& args, CompareStats* partials, CompareStats* result,
                   cudaStream_t stream);

// `sum`: one in device memory; `result` is page-locked host memory.
void LoadCheckBits();
void LaunchCheckBits(const BitsCheck& check, BitsTally* sum, BitsTally* result, cudaStream_t stream);

// `workspace` holds OracleWorkspace(ShapeOf(args)) bytes of device memory.
void LoadOracle();
void LaunchOracle(const OracleArgs& args, std::byte* workspace, cudaStream_t stream);

}  // namespace cppool::kernels::cuda
