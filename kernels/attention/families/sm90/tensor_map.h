// Describes tensors for TMA.
#pragma once

#include <cuda.h>  // CUtensorMap; nothing of libcuda is linked

#include <cstdint>

namespace cppool::kernels::cuda::sm90 {

// A tensor [rows, heads, dim], of 16-bit elements by default, whose rows of one sequence are `step` apart.
struct RowTensor {
  const void* data;
  std::int64_t rows;  // a multiple of step
  int step;
  int heads;
  int dim;  // a multiple of 64
};

// In boxes of `box_rows` rows of one head, which arrive as [dim / 64][box_rows][64], swizzled by 128 bytes.
// Coordinates are {0, row / step, 0, head, row % step}; rows past the end read as 0 and are not written.
// Throws RuntimeError: rows that 32-bit coordinates cannot count are CPPOOL_UNSUPPORTED.
CUtensorMap EncodeRows(const RowTensor& tensor, int box_rows);

// The same in boxes of `box_dims` dims, a multiple of 64; the third coordinate is the first dim / 64.
CUtensorMap EncodeRows(const RowTensor& tensor, int box_rows, int box_dims);

// The same for 8-bit elements: a box arrives as [dim / line][box_rows][line], with lines of 128 bytes, or 64
// where 128 do not divide dim, swizzled by as many.
CUtensorMap EncodePayloadRows(const RowTensor& tensor, int box_rows);

// A transposed payload [lines, slots] of 8-bit elements, slots a multiple of 16: boxes of 128 slots and
// `box_lines` lines, swizzled by 128 bytes. Coordinates are {slot, line}.
CUtensorMap EncodeTransposed(const void* data, std::int64_t lines, std::int64_t slots, int box_lines);

// The same for floats: boxes of `box_rows` rows and `box_dims` dims, a multiple of 32, as [box_dims /
// 32][box_rows][32]. Coordinates are {0, row / step, first dim / 32, head, row % step}.
CUtensorMap EncodeFloatRows(const RowTensor& tensor, int box_rows, int box_dims);

// A bias, or its gradient, [sequences, heads, queries, keys], with steps in elements; a size is 1 where the
// others share it.
struct BiasTensor {
  const void* data;
  std::int64_t sequences, heads, queries, keys;
  std::int64_t sequence_step, head_step, query_step;
};

// Whether rows of a tensor with these steps begin where TMA can fetch, at multiples of 16 bytes.
bool HasAlignedRows(const BiasTensor& tensor, int element_bytes);

// The first key of a box is a multiple of this: in 16-bit elements, the 16 bytes that TMA can begin at.
// Anything else is an illegal instruction.
inline constexpr int kBiasKeyStep = 8;

// 16-bit elements have boxes of `rows` queries and 64 keys, floats boxes of 64 queries and 32 keys: a box
// arrives as [rows][128 bytes], swizzled by 128 bytes. Coordinates are {key, query, head, sequence}; elements
// outside read as 0 and are not written. Throws RuntimeError, CPPOOL_INTERNAL where HasAlignedRows is false.
CUtensorMap EncodeBias(const BiasTensor& tensor, int rows);
CUtensorMap EncodeBiasGradient(const BiasTensor& tensor);

}  // namespace cppool::kernels::cuda::sm90
