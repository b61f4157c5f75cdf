// A bias as a call has it, and what kernels are launched with.
#pragma once

#include "kernels/attention/families/sm90/parameters.h"
#include "kernels/attention/families/sm90/tensor_map.h"

namespace cppool::kernels::cuda::sm90 {

// What is added to the scaled logits, for kernels with a bias. Both pointers NULL: nothing.
struct BiasCall {
  BiasTensor tensor{};                  // of the logits' dtype, of 16 bits
  const float* alibi_slopes = nullptr;  // [heads]
};

// Boxes of `rows` queries.
inline BiasParameters BiasParametersOf(const BiasCall& call, float scale, int rows = 64) {
  BiasParameters p{};
  p.alibi_slopes = call.alibi_slopes;
  p.inverse_scale = 1 / scale;
  const BiasTensor& tensor = call.tensor;
  if (!tensor.data) return p;
  p.rows = tensor.query_step == 0 ? 1 : rows;
  p.head_factor = tensor.head_step != 0;
  p.sequence_factor = tensor.sequence_step != 0;
  p.tensor = EncodeBias(tensor, p.rows);
  return p;
}

}  // namespace cppool::kernels::cuda::sm90
