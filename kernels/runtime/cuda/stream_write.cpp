#include "kernels/runtime/cuda/stream_write.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/error.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

// The driver is reached through the runtime: libcuda is not linked.
PFN_cuStreamWriteValue32_v11070 StreamWriteValue32() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CheckCuda(
        cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &entry, 11070, cudaEnableDefault, &found),
        "finding cuStreamWriteValue32 in the driver");
    if (found != cudaDriverEntryPointSuccess || !entry) {
      throw RuntimeError(CPPOOL_CUDA,
                         "the driver has no cuStreamWriteValue32 (CUDA 11.7): install a newer driver");
    }
    return reinterpret_cast<PFN_cuStreamWriteValue32_v11070>(entry);
  }();
  return function;
}

}  // namespace

void LoadWriteWord() { StreamWriteValue32(); }

// Page-locked memory has the same address on the device, under unified addressing. The runtime and the driver
// use the same error codes. The default flag has the fence.
void WriteWord(cudaStream_t stream, std::uint32_t* word, std::uint32_t value) {
  CheckCuda(static_cast<cudaError_t>(StreamWriteValue32()(stream, reinterpret_cast<CUdeviceptr>(word), value,
                                                          CU_STREAM_WRITE_VALUE_DEFAULT)),
            "writing a number in stream order");
}

}  // namespace cppool::kernels::cuda
