// An attention kernel on one rank: forward and backward of one block of queries and keys. What it supports,
// and how it takes part in what schedules do, is its family's to say (attention_family.h).
//
// Tensors are rows [rows, heads, dim], contiguous; lse and delta are [rows, heads] fp32. Pointers are device
// memory of the rank (memory on the host) and stay valid until the work is done. The dtypes of the arguments
// are those of the shape. A kernel belongs to its rank's thread; calls enqueue work on a stream and return.
// Errors throw RuntimeError.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/attention/call_trial.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/spec.h"
#include "kernels/attention/tensor.h"
#include "kernels/ring_transfers.h"

namespace cppool::kernels {

// What is the same in all calls of a case on one rank. Query head h (of `heads` here, the `head0 + h`th of
// all) reads key/value head (head0 + h) / group - kv_head0 of `kv_heads` here.
struct KernelShape {
  TensorDtypes dtypes;
  int dim_qk = 128;
  int dim_v = 128;
  int heads = 1;
  int kv_heads = 1;
  int head0 = 0;
  int kv_head0 = 0;
  int group = 1;  // query heads per key/value head, in the whole problem
  float scale = 1;
};

// Where the elements of a bias tensor are, which is whole on every rank: element (sequence, head of all,
// query position, key position).
struct BiasExtent {
  std::int64_t batch_stride = 0, head_stride = 0, query_stride = 0;  // in elements; 0 where it is broadcast
  std::int64_t queries = 0, keys = 0;                                // lengths of the last two axes
  std::int64_t elements = 0;
};

// Everything that decides whether a kernel can do a case, and how much memory it takes.
struct KernelRequest {
  KernelShape shape;
  bool training = true;  // Backward is called too
  BiasType bias = BiasType::kNone;
  BiasExtent bias_extent;  // of kPostScale
  bool max_logit = false;
  bool deterministic = false;    // the same bits on every run
  std::optional<Fp8Recipe> fp8;  // calls cast P and dS as their arguments say
};

// A block of queries and keys, prepared: the work lists in device memory, in the kernel's own tile sizes.
// Destroy it only after the work that uses it is done.
class BlockPlan {
 public:
  virtual ~BlockPlan() = default;
  virtual std::int64_t pairs() const = 0;  // visible (query, key) pairs per head; 0: a call has nothing to do
};

// What is added to the scaled logits: a tensor, ALiBi, or (both NULL) nothing. Pointers are to the first head
// here.
struct BiasArgs {
  // Element (sequence, head here, query position, key position); strides in elements, 0 where the bias is
  // broadcast.
  TensorRef tensor;
  std::int64_t batch_stride = 0, head_stride = 0, query_stride = 0;
  // [heads]: -slope * |key - query - diagonal| of the sequence's band.
  const float* alibi_slopes = nullptr;
};

// Blocks of keys that arrive while the kernel runs, one after another in memory: those of the plan behind the
// first block, which is the call's `k` and `v` (Layout::block_rows). A piece is some key/value heads of a
// block: piece g * (blocks - 1) + b - 1 has the heads from g * heads_per_piece on of block b. The kernel
// works on the first block's keys first, and on the heads in their order.
struct ArrivingKeys {
  TensorRef k, v;
  std::int64_t block_rows = 0;  // 0: there are none
  int blocks = 1;               // the first one, too
  int heads_per_piece = 1;
  Arrivals arrivals;

  std::size_t Piece(std::int64_t block, int kv_head) const {
    return static_cast<std::size_t>(kv_head / heads_per_piece) * static_cast<std::size_t>(blocks - 1) +
           static_cast<std::size_t>(block - 1);
  }
};

// Softmax over the keys of several calls is merged in (accumulator, lse): `first` starts from out 0 and lse
// -inf without reading them, otherwise the call continues from what is there; `last` writes `out`, otherwise
// the accumulator holds the normalised fp32 output so far. Max-shifted: Milakov and Gimelshein 2018;
// FlashAttention (Dao et al. 2022, 2023). A first or a last call writes every row of the plan's queries;
// other calls may leave out rows without work. A row that sees no key has out 0 and lse -inf. Rows of no
// token are not written.
//
// A family without Capabilities::continues_softmax is called with first = last = true and no softmax offset.
struct ForwardArgs {
  const BlockPlan* plan = nullptr;
  TensorRef q;                   // [rows_q, heads, dim_qk]; in fp8 of a form of Capabilities, with its scale
  TensorRef k;                   // [rows_kv, kv_heads, dim_qk]
  TensorRef v;                   // [rows_kv, kv_heads, dim_v]
  float* accumulator = nullptr;  // [rows_q, heads, dim_v]; may be NULL when first and last
  TensorOut out;                 // [rows_q, heads, dim_v]; written when last
  float* lse = nullptr;          // [rows_q, heads]: natural logarithm, over keys alone
  BiasArgs bias;
  // [heads]: exp(offset) enters the denominator of `out` once, in the last call; lse is without it. NULL:
  // none.
  const float* softmax_offset = nullptr;
  // [heads]: raised to the largest scaled, biased, visible logit of this call. The same bits in any order.
  // NULL: not wanted.
  float* max_logit = nullptr;
  bool first = true;
  bool last = true;
  ArrivingKeys arriving;  // only with Capabilities::arriving_piece_bytes, when first and last
  // Kernels of a communicator move data under the call: a kernel with a thread block per multiprocessor
  // leaves them some. The results are the same.
  bool beside_transfers = false;
  float p_scale = 0;  // P * p_scale is rounded to E4M3 for the product with v; 0: P is rounded to the dtype
  void* workspace = nullptr;  // of AttentionFamily::WorkspaceBytes; its content is undefined
};

// How a backward pass in fp8 casts P and dS before their products. Sums, lse and delta are those of the
// values before the casts. dS is the gradient of the scaled logits.
struct Fp8Casts {
  float p_scale = 0;  // P * p_scale is rounded to E4M3; 0: no casts, P and dS are rounded to the dtype
  // Device memory: the scale with which dS is rounded to E5M2, and its inverse. NULL, and not `ds_blocks`: dS
  // stays as it is.
  const float* ds_scale = nullptr;
  // dS is rounded to E4M3 in blocks of 32 positions, with a power of two each: of keys for dq, of queries for
  // dk.
  bool ds_blocks = false;
  float* amax_ds =
      nullptr;  // raised to the largest |dS|, by the calls that make dq; only where dS stays as it is
};

// How a call treats one side's gradients. As in the forward pass: `first` does not read the accumulator,
// otherwise the call adds to it; `last` writes the result, otherwise the accumulator holds the fp32 sum so
// far.
struct GradientPass {
  bool wanted = true;
  bool first = true;
  bool last = true;
};

// dbias in fp32, which a block's part is added to: element (sequence, head here, query position, key
// position), strides as in BiasArgs, the pointer to the first head here. Where query_stride is 0 the part is
// summed over the queries, and the other two strides are not 0.
struct BiasGradient {
  float* sum = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, query_stride = 0;
};

// Gradients of one block, exact parts of the whole sum: from the final lse and delta of the whole row. dq has
// its own pass, and dk and dv have one, since their blocks come in different orders.
//
// A family without Capabilities::accumulates_gradients is called with first = last = true for both sides, one
// without Capabilities::gradients_apart with both sides wanted.
struct BackwardArgs {
  const BlockPlan* plan = nullptr;
  TensorRef q, k, v;  // as in ForwardArgs
  TensorRef dout;     // [rows_q, heads, dim_v]
  // With casts in blocks: q for dk, k for dq and dout for dv, quantized along the tokens; else without data.
  TensorRef q_of_dk, k_of_dq, dout_of_dv;
  Fp8Casts casts;
  TensorRef out;  // [rows_q, heads, dim_v]: the final output, for kernels that compute delta themselves
  const float* lse =
      nullptr;  // [rows_q, heads]; with a softmax offset the logarithm of the whole denominator
  const float* delta = nullptr;  // [rows_q, heads]: TensorOps::Delta
  BiasArgs bias;
  GradientPass query, key;
  float* dq_accumulator = nullptr;  // [rows_q, heads, dim_qk]
  float* dk_accumulator = nullptr;  // [rows_kv, kv_heads, dim_qk]
  float* dv_accumulator = nullptr;  // [rows_kv, kv_heads, dim_v]
  TensorOut dq, dk, dv;
  BiasGradient dbias;             // only with Capabilities::bias_with_gradients; NULL: there is none
  bool beside_transfers = false;  // as in ForwardArgs
  void* workspace = nullptr;      // as in ForwardArgs; NULL with `beside`
  // A second stream of the pass, told to every call; only with Capabilities::overlapping_keys. The first and
  // the last call of dq are not on it: calls on it wait until the first one has set dq to 0, and the last one
  // waits for all others before it rounds dq. NULL: all calls are on one stream.
  cppool_stream beside = nullptr;
};

class AttentionKernel {
 public:
  virtual ~AttentionKernel() = default;

  // Loads everything that calls of this request need, so that no call waits for the device while other ranks'
  // collectives spin on theirs. Throws RuntimeError(CPPOOL_UNSUPPORTED) for what the family refuses, or this
  // device lacks.
  virtual void Load(const KernelRequest& request) = 0;

  // `request.training`: for Backward and BackwardBias too, which may cut the block into other tiles than
  // Forward. Host tables are copied before it returns; device tables are ready for work enqueued on `stream`
  // afterwards.
  virtual std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query,
                                          const Layout& key, const std::vector<Band>& bands,
                                          cppool_stream stream) = 0;

  virtual void Forward(const KernelShape&, const ForwardArgs&, cppool_stream) = 0;
  virtual void Backward(const KernelShape&, const BackwardArgs&, cppool_stream) = 0;
  // A kernel that is not cppool's own can have its calls put under trials. AllowTrials comes before Load and
  // Plan, and makes ready what trials need. From SetTrial on every call goes through the trial, which
  // outlives its use; NULL: none.
  virtual bool takes_trials() const { return false; }
  virtual void AllowTrials() {}
  virtual void SetTrial(CallTrial*) {}

  // Adds the gradient of the logits to dbias: sums over sequences and heads where their strides are 0. Not
  // called with Capabilities::bias_with_gradients.
  virtual void BackwardBias(const KernelShape&, const BackwardArgs&, const BiasGradient&, cppool_stream) = 0;
};

}  // namespace cppool::kernels
