// Parameters that the kernels of the CUDA families share.
#pragma once

#include "kernels/attention/attention_kernel.h"

namespace cppool::kernels::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;

// Which key/value head a query head reads, where a rank holds a part of the heads.
struct HeadMap {
  int heads;     // query heads of this call
  int kv_heads;  // key/value heads of this call
  int head0;     // index of the first query head in the whole problem
  int kv_head0;  // likewise of the first key/value head
  int group;     // query heads per key/value head
};

inline HeadMap HeadMapOf(const KernelShape& shape) {
  return {shape.heads, shape.kv_heads, shape.head0, shape.kv_head0, shape.group};
}

}  // namespace cppool::kernels::cuda
