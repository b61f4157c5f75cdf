// The compiled backward kernels, as what is needed to launch them: what backward.cuh computes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/families/sm90/backward_parameters.h"
#include "kernels/attention/families/sm90/bias_call.h"
#include "kernels/dtype.h"

namespace cppool::kernels::cuda::sm90 {

// One call with both sides wanted, see BackwardArgs in kernels/attention/attention_kernel.h. Pointers are
// device memory.
struct BackwardCall {
  float scale = 1;
  BackwardWork work{};  // of the entry's sizes
  HeadMap map{};
  std::int64_t rows_q = 0;  // of the whole buffers
  std::int64_t rows_kv = 0;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;
  const float* lse = nullptr;
  const float* delta = nullptr;
  BiasCall bias;
  const KeyTileBias* tile_biases = nullptr;  // of work.tiles, with a bias
  float* dq_sum = nullptr;                   // fp32, of the shape of dq
  float* dk_sum = nullptr;
  float* dv_sum = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  // An int and as many more as a fixed order of sums takes (see BackwardParameters::turns); no other launch
  // under way may use them. `state_bytes`: of both; without turns of the int alone.
  int* schedule = nullptr;
  int* turns = nullptr;
  std::size_t state_bytes = 0;
  int multiprocessors = 0;
  bool query_first = true, query_last = true;  // of dq, see GradientPass
  bool key_first = true, key_last = true;      // of dk and dv
  Fp8Parameters fp8{};
  // With casts in blocks, as in BackwardArgs.
  const void* q_of_dk = nullptr;
  const void* k_of_dq = nullptr;
  const void* dout_of_dv = nullptr;
  cudaStream_t beside = nullptr;  // as in BackwardArgs
};

struct BackwardKernelEntry {
  int tile_keys = 0;         // 0: there is no such kernel
  int block_rows = 0;        // of queries
  void (*load)() = nullptr;  // before the first launch
  void (*launch)(const BackwardCall&, cudaStream_t) = nullptr;
};

// What a kernel casts: nothing, P and dS are rounded to the dtype; P and dS with one scale each; P with one
// scale, of dS it finds the largest magnitude; P and dS in blocks (mxfp8). With casts the dtype is bf16.
enum class Casts { kNone, kPAndDs, kP, kBlocks };

// For head dims and a dtype. `bias`: the kernel adds one, of the logits' dtype.
BackwardKernelEntry BackwardKernelOf(Dtype dtype, int dim_qk, int dim_v, bool bias, Casts casts);

// Each dtype has its instances, one per head dims, in a file of its own.
template <typename T>
BackwardKernelEntry BackwardKernelOf(int dim_qk, int dim_v);
template <typename T>
BackwardKernelEntry BiasedBackwardKernelOf(int dim_qk, int dim_v);
BackwardKernelEntry Fp8BackwardKernelOf(int dim_qk, int dim_v);
BackwardKernelEntry BiasedFp8BackwardKernelOf(int dim_qk, int dim_v);
BackwardKernelEntry FindingBackwardKernelOf(int dim_qk, int dim_v, bool bias);
BackwardKernelEntry BlocksBackwardKernelOf(int dim_qk, int dim_v, bool bias);

}  // namespace cppool::kernels::cuda::sm90
