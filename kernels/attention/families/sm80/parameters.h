// The parameters of the kernels. Shapes as in kernels/attention/attention_kernel.h; all pointers are device
// memory.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/families/common/kernel_parameters.h"
#include "kernels/attention/layout.h"

namespace cppool::kernels::cuda {

struct WorkView {
  const Tile* tiles;    // indexed by blockIdx.x / heads; those with the most work come first
  const Range* ranges;  // of the other side (keys for tiles of queries, queries for tiles of keys)
  int self_step;
  int other_step;
};

// The bias that is added to the scaled logits, see BiasArgs.
struct Bias {
  const void* tensor;  // element (sequence, head, query position, key position), or NULL
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t query_stride;
  const float* alibi_slopes;  // [heads], or NULL
  float inverse_scale;        // 1 / scale
};

// What the stored elements are multiplied with, see TensorRef; NULL: 1.
struct OperandScales {
  const float* q;
  const float* k;
  const float* v;
  const float* dout;
};

struct ForwardParameters {
  WorkView work;  // tiles of queries, ranges of keys
  HeadMap map;
  const void* q;       // [rows_q, heads, dim_qk]
  const void* k;       // [rows_kv, kv_heads, dim_qk]
  const void* v;       // [rows_kv, kv_heads, dim_v]
  float* accumulator;  // [rows_q, heads, dim_v]
  void* out;           // [rows_q, heads, dim_v]
  float* lse;          // [rows_q, heads]
  Bias bias;
  const float* softmax_offset;  // [heads], or NULL
  float* max_logit;             // [heads], or NULL
  float scale;
  float scale_log2;  // scale in powers of two: scale * log2(e)
  bool first;
  bool last;
  // Only the instances for fp8 read these. They are last, so that the others' parameters stay where they are.
  OperandScales scales;
  float p_scale;
};

struct BackwardParameters {
  WorkView work;  // tiles of queries and ranges of keys for dq; the other way round for dk and dv
  HeadMap map;
  const void* q;
  const void* k;
  const void* v;
  const void* dout;  // [rows_q, heads, dim_v]
  const float* lse;  // [rows_q, heads]
  Bias bias;
  const float* delta;     // [rows_q, heads]
  float* dq_accumulator;  // [rows_q, heads, dim_qk]
  void* dq;
  float* dk_accumulator;  // [rows_kv, kv_heads, dim_qk]
  float* dv_accumulator;  // [rows_kv, kv_heads, dim_v]
  void* dk;
  void* dv;
  float scale;
  float scale_log2;  // scale in powers of two: scale * log2(e)
  bool first;
  bool last;
  // Only the instances for fp8 read these.
  OperandScales scales;
  Fp8Casts casts;
  const void* q_of_dk;  // with casts in blocks, as in BackwardArgs
  const void* k_of_dq;
  const void* dout_of_dv;
};

// The gradient of the bias, from a subset of a work list's tiles.
struct BiasGradientParameters {
  BackwardParameters backward;  // tiles of keys, ranges of queries
  BiasGradient gradient;
};

}  // namespace cppool::kernels::cuda
