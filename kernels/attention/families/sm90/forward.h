// The compiled forward kernels, as what is needed to launch them: what forward.cuh computes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/families/sm90/bias_call.h"
#include "kernels/attention/families/sm90/parameters.h"
#include "kernels/dtype.h"

namespace cppool::kernels::cuda::sm90 {

// Blocks of keys that arrive while the kernel runs, see ArrivingKeys; none without flags.
struct ArrivingCall {
  const void* k = nullptr;
  const void* v = nullptr;
  const std::uint32_t* flags = nullptr;
  RingControl* control = nullptr;
  std::uint32_t pass = 0;
  std::int64_t block_rows = 0;
  int blocks = 1;
  int heads_per_piece = 1;
};

// One call, see ForwardArgs in kernels/attention/attention_kernel.h. Pointers are device memory.
struct ForwardCall {
  float scale = 1;
  WorkView work{};  // tiles of ForwardKernelOf's tile_rows
  HeadMap map{};
  std::int64_t rows_q = 0;   // of the whole buffers
  std::int64_t rows_kv = 0;  // without those that arrive
  ArrivingCall arriving;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  float* accumulator = nullptr;  // may be NULL when first and last
  void* out = nullptr;           // written when last
  float* lse = nullptr;
  const float* softmax_offset = nullptr;
  float* max_logit = nullptr;
  BiasCall bias;
  int* schedule = nullptr;  // two ints, 0 before and after; no other launch under way may use them
  int multiprocessors = 0;
  bool first = true;
  bool last = true;
  Fp8Parameters fp8{};
  // Native products: q and k are payloads, v is one transposed to [kv_heads, dim_v, all_slots].
  std::int64_t all_slots = 0;
};

// A warpgroup takes so many rows of a tile. Shorter tiles have a multiple of it, but for the last one of a
// sequence.
inline constexpr int kGroupRows = 64;

struct ForwardKernelEntry {
  int tile_rows = 0;         // 0: there is no such kernel
  void (*load)() = nullptr;  // before the first launch
  void (*launch)(const ForwardCall&, cudaStream_t) = nullptr;
};

// What a kernel multiplies: 16-bit values; those of payloads, and P after its cast; payloads.
enum class Products { kPlain, kFp8Values, kFp8Native };

// For head dims and a dtype, which is bf16 in fp8. `bias`: the kernel adds one, of the logits' dtype.
ForwardKernelEntry ForwardKernelOf(Dtype dtype, int dim_qk, int dim_v, bool bias, Products products);

// Each dtype has its instances, one per head dims, in a file of its own.
template <typename T>
ForwardKernelEntry ForwardKernelOf(int dim_qk, int dim_v);
template <typename T>
ForwardKernelEntry BiasedForwardKernelOf(int dim_qk, int dim_v);
ForwardKernelEntry Fp8ForwardKernelOf(int dim_qk, int dim_v);
ForwardKernelEntry BiasedFp8ForwardKernelOf(int dim_qk, int dim_v);
// With products of payloads.
ForwardKernelEntry NativeForwardKernelOf(int dim_qk, int dim_v);

}  // namespace cppool::kernels::cuda::sm90
