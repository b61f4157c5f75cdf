#include "kernels/attention/families/sm90/tensor_map.h"

#include <cuda_runtime.h>

#include <string>

#include "kernels/error.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that the runtime library has loaded.
Encode EncodeFunction() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    CheckCuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result),
        "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess || !entry)
      throw RuntimeError(CPPOOL_UNSUPPORTED, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(entry);
  }();
  return function;
}

// In boxes of `box_rows` rows and `box_dims` dims; 128 bytes make a line of a box.
CUtensorMap EncodeLines(const RowTensor& tensor, CUtensorMapDataType type, int element_bytes, int box_rows,
                        int box_dims) {
  if (tensor.rows % tensor.step != 0 || tensor.rows > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "a tensor of " + std::to_string(tensor.rows) + " rows");
  const auto size = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  const int line = 128 / element_bytes;
  const std::int64_t head_bytes = std::int64_t{tensor.dim} * element_bytes,
                     row_bytes = head_bytes * tensor.heads;
  const cuuint64_t sizes[5] = {size(line), size(tensor.rows / tensor.step), size(tensor.dim / line),
                               size(tensor.heads), size(tensor.step)};
  const cuuint64_t strides[4] = {size(row_bytes * tensor.step), 128, size(head_bytes), size(row_bytes)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(line), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_dims / line), 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      EncodeFunction()(&map, type, 5, const_cast<void*>(tensor.data), sizes, strides, box, element_strides,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw RuntimeError(CPPOOL_INTERNAL, "cuTensorMapEncodeTiled: error " + std::to_string(result));
  return map;
}

}  // namespace

CUtensorMap EncodeRows(const RowTensor& tensor, int box_rows) {
  return EncodeLines(tensor, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, box_rows, tensor.dim);
}

CUtensorMap EncodeFloatRows(const RowTensor& tensor, int box_rows, int box_dims) {
  return EncodeLines(tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, box_rows, box_dims);
}

}  // namespace cppool::kernels::cuda::sm90
