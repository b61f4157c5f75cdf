// The attention kernels of one rank, on either runtime. Every call enqueues work on a stream and returns;
// pointers are device memory of the rank (memory on the host) and stay valid until the work is done. Errors
// throw RuntimeError.
//
// Tensors are rows [rows, heads, dim], contiguous; lse and delta are [rows, heads] fp32, so that they travel
// like any other tensor.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention/layout.h"
#include "kernels/attention/spec.h"

namespace cppool::kernels {

// What is the same in all calls of a case on one rank. Query head h (of `heads` here, the `head0 + h`th of
// all) reads key/value head (head0 + h) / group - kv_head0 of `kv_heads` here.
struct KernelShape {
  Dtype dtype = Dtype::kBf16;  // of q, k, v, out, dout, dq, dk, dv
  int dim_qk = 128;
  int dim_v = 128;
  int heads = 1;
  int kv_heads = 1;
  int head0 = 0;
  int kv_head0 = 0;
  int group = 1;  // query heads per key/value head, in the whole problem
  float scale = 1;
};

// The block of queries and keys that a call works on, prepared: the work lists in device memory, in the
// kernels' own tile sizes. Destroy it only after the work that uses it is done.
class BlockPlan {
 public:
  virtual ~BlockPlan() = default;
  virtual std::int64_t pairs() const = 0;  // visible (query, key) pairs per head; 0: a call has nothing to do
};

// What is added to the scaled logits: a tensor, ALiBi, or (all null) nothing. Pointers are to the first head here.
struct BiasArgs {
  // Element (sequence, head here, query position, key position) in the tensors' dtype; strides in elements, 0
  // where the bias is broadcast.
  const void* tensor = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, query_stride = 0;
  // [heads]: -slope * |key - query - diagonal| of the sequence's band.
  const float* alibi_slopes = nullptr;
};

// Softmax over the keys of several calls is merged in (accumulator, lse): `first` starts from out 0 and lse
// -inf without reading them, otherwise the call continues from what is there; `last` writes `out` in the
// tensors' dtype, otherwise the accumulator holds the normalised fp32 output so far. Max-shifted: Milakov and
// Gimelshein 2018; FlashAttention (Dao et al. 2022, 2023).
struct ForwardArgs {
  const BlockPlan* plan = nullptr;
  const void* q = nullptr;       // [rows_q, heads, dim_qk]
  const void* k = nullptr;       // [rows_kv, kv_heads, dim_qk]
  const void* v = nullptr;       // [rows_kv, kv_heads, dim_v]
  float* accumulator = nullptr;  // [rows_q, heads, dim_v]; may be NULL when first and last
  void* out = nullptr;           // [rows_q, heads, dim_v]; written when last
  float* lse = nullptr;          // [rows_q, heads]: natural logarithm, over keys alone
  BiasArgs bias;
  // [heads]: exp(offset) enters the denominator of `out` once, in the last call; lse is without it. NULL: none.
  const float* softmax_offset = nullptr;
  // [heads]: raised to the largest scaled, biased, visible logit of this call. The same bits in any order. NULL:
  // not wanted.
  float* max_logit = nullptr;
  bool first = true;
  bool last = true;
};

// Gradients of one block, from the final lse and delta of the whole row. dq, dk and dv are handled as in the
// forward pass: `*_accumulator` in fp32 between calls, added to unless first; the result in the dtype when
// last. Which way is chosen apart for dq and for dk/dv, since their blocks come in different orders. No
// atomics: the same bits on every run.
struct BackwardArgs {
  const BlockPlan* plan = nullptr;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;  // [rows_q, heads, dim_v]
  const float* lse =
      nullptr;  // [rows_q, heads]; with a softmax offset the logarithm of the whole denominator
  BiasArgs bias;
  const float* delta = nullptr;     // [rows_q, heads]
  float* dq_accumulator = nullptr;  // [rows_q, heads, dim_qk]
  void* dq = nullptr;
  float* dk_accumulator = nullptr;  // [rows_kv, kv_heads, dim_qk]
  float* dv_accumulator = nullptr;  // [rows_kv, kv_heads, dim_v]
  void* dk = nullptr;
  void* dv = nullptr;
  bool first = true;
  bool last = true;
};

// dbias in fp32, where BackwardBias adds: element (sequence, head here, query position, key position), strides as
// in BiasArgs, the pointer to the first head here.
struct BiasGradient {
  float* sum = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, query_stride = 0;
};

// One member of an all-to-all over heads: which heads of the whole it computes. Key/value heads may go to
// several members (GQA and MQA with fewer key/value heads than members): their gradients are then summed.
struct HeadRange {
  int begin = 0;
  int count = 0;
};

class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;

  // Loads everything that calls with this shape need, so that no call waits for the device while other ranks'
  // collectives spin on theirs. Throws RuntimeError(CPPOOL_UNSUPPORTED) for a shape that there is no kernel
  // for.
  virtual void Load(const KernelShape& shape, bool training) = 0;  // with everything below

  // `training`: for BackwardQuery and BackwardKey too, which may cut the block into other tiles than Forward.
  // Host tables are copied before it returns; device tables are ready for work enqueued on `stream`
  // afterwards.
  virtual std::unique_ptr<BlockPlan> Plan(const KernelShape& shape, const Layout& query, const Layout& key,
                                          const std::vector<Band>& bands, bool training,
                                          cppool_stream stream) = 0;

  virtual void Forward(const KernelShape&, const ForwardArgs&, cppool_stream) = 0;
  // delta[row, head] = sum over dim of out * dout.
  virtual void Delta(const KernelShape&, std::int64_t rows, const void* out, const void* dout, float* delta,
                     cppool_stream) = 0;
  virtual void BackwardQuery(const KernelShape&, const BackwardArgs&, cppool_stream) = 0;  // dq
  virtual void BackwardKey(const KernelShape&, const BackwardArgs&, cppool_stream) = 0;    // dk, dv

  // Adds the gradient of the logits to dbias: sums over sequences and heads where their strides are 0; where
  // query_stride is 0 both of them must be there, and it sums over queries. One fixed order.
  virtual void BackwardBias(const KernelShape&, const BackwardArgs&, const BiasGradient&, cppool_stream) = 0;
  // total[row, head] = log(exp(lse) + exp(offset[head])), of every row; offset [heads].
  virtual void AddOffset(const KernelShape&, std::int64_t rows, const float* lse, const float* offset,
                         float* total, cppool_stream) = 0;
  // gradient[head] = -sum over the plan's queries of exp(offset - total) * delta. Rows of padding take no part.
  virtual void OffsetGradient(const KernelShape&, const BlockPlan* plan, const float* total,
                              const float* delta, const float* offset, float* gradient, cppool_stream) = 0;

  // to[i][row][0 .. ranges[i].count][dim] = from[row][ranges[i].begin ..][dim]: member i's part, one after
  // another in `to`.
  virtual void SplitHeads(Dtype dtype, std::int64_t rows, int heads, int dim,
                          const std::vector<HeadRange>& ranges, const void* from, void* to,
                          cppool_stream) = 0;
  // The reverse, to[row][head][dim]: parts in `from_dtype`; a head that several parts hold is their sum in
  // fp32, in the order of the parts, rounded once to `to_dtype`. Every head must be in a part.
  virtual void MergeHeads(Dtype from_dtype, Dtype to_dtype, std::int64_t rows, int heads, int dim,
                          const std::vector<HeadRange>& ranges, const void* from, void* to,
                          cppool_stream) = 0;
  virtual void Fill(float* to, float value, std::int64_t count, cppool_stream) = 0;
  // to += from, element by element.
  virtual void Add(const float* from, float* to, std::int64_t count, cppool_stream) = 0;
  // to[column] = sum over rows of from[row][column], in order.
  virtual void SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                       cppool_stream) = 0;
  // Rounds fp32 to dtype.
  virtual void Round(const float* from, Dtype dtype, void* to, std::int64_t count, cppool_stream) = 0;
};

// The kernels for the runtime's backend: the host's, or those of the CUDA module.
std::unique_ptr<AttentionKernels> MakeAttentionKernels(cppool_runtime* runtime);

}  // namespace cppool::kernels
