// The compiled kernels for the gradient of a bias, as what is needed to launch them: what bias_gradient.cuh
// computes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/families/common/kernel_parameters.h"
#include "kernels/attention/families/sm90/parameters.h"
#include "kernels/attention/families/sm90/tensor_map.h"
#include "kernels/attention/layout.h"
#include "kernels/dtype.h"

namespace cppool::kernels::cuda::sm90 {

// Adds a block's part to the gradient, see BackwardArgs and BiasGradient in
// kernels/attention/attention_kernel.h. Pointers are device memory.
//
// Heads that share the bias are added up in order before one addition to memory. No other launch under way
// may add to the same elements: sequences that share the bias need a launch each.
struct BiasGradientCall {
  float scale = 1;
  const Tile* tiles = nullptr;    // of queries, of BiasGradientKernelOf's tile_rows, that see keys
  const Range* ranges = nullptr;  // of keys
  int tiles_count = 0;
  int query_step = 1;
  int key_step = 1;
  HeadMap map{};
  std::int64_t rows_q = 0;  // of the whole buffers
  std::int64_t rows_kv = 0;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;
  const float* lse = nullptr;
  const float* delta = nullptr;
  BiasTensor bias{};
  BiasTensor gradient{};  // of floats; queries have rows of their own
  int multiprocessors = 0;
  Fp8Parameters fp8{};  // scales of q, k, v and dout
};

struct BiasGradientKernelEntry {
  int tile_rows = 0;         // 0: there is no such kernel
  void (*load)() = nullptr;  // before the first launch
  void (*launch)(const BiasGradientCall&, cudaStream_t) = nullptr;
};

// Returns the kernel for these head dims and this dtype. `fp8`: operands are payloads' values in bf16.
BiasGradientKernelEntry BiasGradientKernelOf(Dtype dtype, int dim_qk, int dim_v, bool fp8);

}  // namespace cppool::kernels::cuda::sm90
