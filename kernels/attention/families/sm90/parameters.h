// What the forward kernel is launched with. Shapes as in kernels/attention/attention_kernel.h; all pointers
// are device memory.
#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>

#include "kernels/attention/families/common/kernel_parameters.h"
#include "kernels/attention/families/sm90/head_order.h"
#include "kernels/attention/layout.h"
#include "kernels/ring_transfers.h"

namespace cppool::kernels::cuda::sm90 {

struct WorkView {
  const Tile* tiles;    // of queries: the most work first
  const Range* ranges;  // of keys; native products: the upper half of a row is the first slot in v
  int tiles_count;
  int busy_tiles;  // these come first; the others have no ranges
  int query_step;
  int key_step;
};

// What is added to the scaled logits: a tensor, ALiBi, or nothing.
struct BiasParameters {
  CUtensorMap tensor;  // see EncodeBias; boxes of `rows` queries and 64 keys
  int rows;            // a block's; 1 where queries share the bias; 0 without a tensor
  int head_factor;     // 0 where heads share the bias, else 1
  int sequence_factor;
  const float* alibi_slopes;  // [heads], or NULL
  float inverse_scale;        // of the softmax
};

// Scales for fp8: what payloads are multiplied with, NULL for 1.
struct Fp8Parameters {
  const float* q;
  const float* k;
  const float* v;
  const float* dout;
  const float* ds_scale;  // dS is multiplied with the first before its cast; the second is its inverse
  float p_scale;          // P is multiplied with it before its cast
  float* amax_ds;         // raised to the largest |dS| where that is found; NULL: not wanted
};

// Blocks of keys behind the first one, which arrive while the kernel runs (ArrivingKeys).
struct ArrivingParameters {
  CUtensorMap k;  // boxes as of the first block's
  CUtensorMap v;
  const std::uint32_t* flags;  // NULL: there are no such blocks
  RingControl* control;
  std::uint32_t pass;
  int block_rows;
  int blocks;  // the first one, too
  int heads_per_piece;
};

struct ForwardParameters {
  CUtensorMap q;    // boxes of 64 rows
  CUtensorMap k;    // boxes of kBlock rows
  CUtensorMap v;    // boxes of kBlock rows; of a transposed payload, of kBlock slots and all dims of a head
  CUtensorMap out;  // boxes of 16 rows
  WorkView work;
  HeadMap map;
  ArrivingParameters arriving;
  HeadOrder order;
  float* accumulator;           // [rows_q, heads, dim_v]
  void* out_rows;               // [rows_q, heads, dim_v]
  float* lse;                   // [rows_q, heads]
  const float* softmax_offset;  // [heads], or NULL
  float* max_logit;             // [heads], or NULL
  int* schedule;                // two counters, 0; the kernel leaves them 0
  float scale;
  float scale_log2;  // scale in powers of two: scale * log2(e)
  bool first;
  bool last;
  BiasParameters bias;  // read by kernels with a bias alone
  Fp8Parameters fp8;    // read by kernels for fp8 alone
};

}  // namespace cppool::kernels::cuda::sm90
