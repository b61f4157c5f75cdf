// Memory that the family "table" needs between a kernel's calls and the results of a block: parts before they
// are merged, and sums where the caller has none. It serves one block at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/attention_kernel.h"

namespace cppool::kernels::table {

struct Scratch {
  // `base`: 256-byte aligned memory of bytes(), NULL to ask for its size. Parts have room for fp32.
  Scratch(const KernelRequest& request, std::int64_t rows_q, std::int64_t rows_kv, void* base);
  std::size_t bytes() const { return bytes_; }

  // The forward pass uses these.
  void* out = nullptr;          // [rows_q, heads, dim_v]
  float* out_sum = nullptr;     // the same, fp32
  void* out_payload = nullptr;  // the same in E4M3, in fp8
  float* lse = nullptr;         // [rows_q, heads]
  float* packed_lse = nullptr;  // as many
  float* row_max = nullptr;     // likewise, with max_logit
  float* packed_max = nullptr;
  // The backward pass uses these.
  float* packed_delta = nullptr;  // [rows_q, heads]
  void* dq = nullptr;             // [rows_q, heads, dim_qk]
  void* dk = nullptr;             // [rows_kv, kv_heads, dim_qk]
  void* dv = nullptr;             // [rows_kv, kv_heads, dim_v]
  float* dq_sum = nullptr;        // the same, fp32
  float* dk_sum = nullptr;
  float* dv_sum = nullptr;
  void* dbias = nullptr;     // of one call, with a bias
  float* amax_ds = nullptr;  // of one call, with fp8

 private:
  std::size_t bytes_ = 0;
};

}  // namespace cppool::kernels::table
