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

CUtensorMap Encoded(CUtensorMapDataType type, cuuint32_t rank, const void* data, const cuuint64_t* sizes,
                    const cuuint64_t* strides, const cuuint32_t* box,
                    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      EncodeFunction()(&map, type, rank, const_cast<void*>(data), sizes, strides, box, element_strides,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw RuntimeError(CPPOOL_INTERNAL, "cuTensorMapEncodeTiled: error " + std::to_string(result));
  return map;
}

cuuint64_t Size(std::int64_t n) { return static_cast<cuuint64_t>(n); }

// In boxes of `box_rows` rows and `box_dims` dims; `line_bytes`, 128 or 64, make a line of a box.
CUtensorMap EncodeLines(const RowTensor& tensor, CUtensorMapDataType type, int element_bytes, int box_rows,
                        int box_dims, int line_bytes = 128) {
  if (tensor.rows % tensor.step != 0 || tensor.rows > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "a tensor of " + std::to_string(tensor.rows) + " rows");
  const int line = line_bytes / element_bytes;
  const std::int64_t head_bytes = std::int64_t{tensor.dim} * element_bytes,
                     row_bytes = head_bytes * tensor.heads;
  const cuuint64_t sizes[5] = {Size(line), Size(tensor.rows / tensor.step), Size(tensor.dim / line),
                               Size(tensor.heads), Size(tensor.step)};
  const cuuint64_t strides[4] = {Size(row_bytes * tensor.step), Size(line_bytes), Size(head_bytes),
                                 Size(row_bytes)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(line), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_dims / line), 1, 1};
  return Encoded(type, 5, tensor.data, sizes, strides, box,
                 line_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

CUtensorMap EncodeBoxes(const BiasTensor& tensor, CUtensorMapDataType type, int element_bytes, int rows) {
  if (!HasAlignedRows(tensor, element_bytes))
    throw RuntimeError(CPPOOL_INTERNAL, "a bias whose rows do not begin at multiples of 16 bytes");
  // Where there is one item its step is not used, but must be one that the driver takes.
  const auto bytes = [&](std::int64_t step) {
    return Size(step == 0 ? tensor.keys * element_bytes : step * element_bytes);
  };
  const cuuint64_t sizes[4] = {Size(tensor.keys), Size(tensor.queries), Size(tensor.heads),
                               Size(tensor.sequences)};
  const cuuint64_t strides[3] = {bytes(tensor.query_step), bytes(tensor.head_step),
                                 bytes(tensor.sequence_step)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / element_bytes), static_cast<cuuint32_t>(rows), 1,
                             1};
  return Encoded(type, 4, tensor.data, sizes, strides, box);
}

}  // namespace

CUtensorMap EncodeRows(const RowTensor& tensor, int box_rows) {
  return EncodeRows(tensor, box_rows, tensor.dim);
}

CUtensorMap EncodeRows(const RowTensor& tensor, int box_rows, int box_dims) {
  return EncodeLines(tensor, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, box_rows, box_dims);
}

CUtensorMap EncodePayloadRows(const RowTensor& tensor, int box_rows) {
  return EncodeLines(tensor, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, box_rows, tensor.dim,
                     tensor.dim % 128 == 0 ? 128 : 64);
}

CUtensorMap EncodeTransposed(const void* data, std::int64_t lines, std::int64_t slots, int box_lines) {
  if (slots > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, "a transposed payload of " + std::to_string(slots) + " tokens");
  const cuuint64_t sizes[2] = {Size(slots), Size(lines)}, strides[1] = {Size(slots)};
  const cuuint32_t box[2] = {128, static_cast<cuuint32_t>(box_lines)};
  return Encoded(CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, data, sizes, strides, box);
}

CUtensorMap EncodeFloatRows(const RowTensor& tensor, int box_rows, int box_dims) {
  return EncodeLines(tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, box_rows, box_dims);
}

bool HasAlignedRows(const BiasTensor& tensor, int element_bytes) {
  const auto aligned = [](std::int64_t bytes) { return bytes % 16 == 0; };
  return aligned(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data))) &&
         aligned(tensor.keys * element_bytes) && aligned(tensor.query_step * element_bytes) &&
         aligned(tensor.head_step * element_bytes) && aligned(tensor.sequence_step * element_bytes);
}

CUtensorMap EncodeBias(const BiasTensor& tensor, int rows) {
  return EncodeBoxes(tensor, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, rows);
}

CUtensorMap EncodeBiasGradient(const BiasTensor& tensor) {
  return EncodeBoxes(tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, 64);
}

}  // namespace cppool::kernels::cuda::sm90
