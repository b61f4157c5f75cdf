// The kernel as schedules use it: calls continue one another in the forward pass and add up in the backward
// pass, whatever the family can do by itself. What it cannot is done here by TensorOps, with buffers between.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/schedules/fp8_operands.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/memory_list.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// How a schedule uses the kernel on one rank; decides the buffers.
struct BlockUse {
  KernelRequest request;
  const AttentionFamily* family = nullptr;
  Layout queries;                  // of every call
  std::int64_t rows_kv = 0;        // of the largest block of keys
  std::int64_t gradient_rows = 0;  // of blocks of keys whose gradients are wanted
  std::int64_t key_slots = 0;      // most of a block, see problem/transposed.h
  bool several_forward = false;    // blocks of a forward pass; else one, first and last
  bool several_backward = false;   // calls that add to dq; else one
  bool keys_in_fp32 = false;       // of some block dk and dv go to an accumulator
  bool softmax_offset = false;
  bool offset_gradient = false;                        // of the softmax offset: needs rows()
  bool padded_queries = false, padded_keys = false;    // some rows hold no token
  std::vector<std::int64_t> query_chunks, key_chunks;  // of sequences, where fp8 casts in blocks

  Capabilities capabilities() const { return family->capabilities(request); }
  // Whether parts of the softmax are merged here.
  bool merges() const { return !capabilities().continues_softmax && (several_forward || softmax_offset); }
  bool needs_rows() const { return merges() || offset_gradient; }
  // Returns the bytes of a plan's tables with these keys.
  std::size_t PlanBytes(const Layout& keys) const {
    return family->PlanBytes(request, queries, keys) +
           (request.fp8 ? operands().TableBytes(keys, key_chunks) : 0);
  }
  Fp8OperandUse operands() const {
    const Capabilities can = capabilities();
    return {request,   queries,        rows_kv,       query_chunks, key_chunks,
            key_slots, can.forward_qk, can.forward_v, can.backward};
  }
};

struct BlockBuffers {
  Buffer accumulator;     // [rows_q, heads, dim_v] fp32
  Buffer part, part_lse;  // merges(): one block's out and lse
  Buffer dq_accumulator;  // [rows_q, heads, dim_qk] fp32
  Buffer dq_part, dk_part,
      dv_part;  // one block's gradients in their dtypes, where the family adds to nothing
  Buffer workspace;
  Fp8OperandBuffers operands;
  // Declares what `use` needs, but for plans.
  void List(const BlockUse& use, MemoryList& list);
};

class BlockAttention {
 public:
  // `kernels` outlives this. Loads what calls need; the buffers are allocated by the time of the first call.
  BlockAttention(cppool_runtime* runtime, RankKernels& kernels, BlockUse use);

  BlockBuffers& buffers() { return buffers_; }
  const KernelShape& shape() const { return use_.request.shape; }
  const Capabilities& capabilities() const { return capabilities_; }
  // Returns the rows of the queries that hold a token; NULL when nothing asks for them.
  const TokenRows* rows() const { return rows_.get(); }

  // Everything runs on the main stream, Backward on `stream`: that one, or `args.beside`. `keys` has at most
  // use.rows_kv rows.
  std::unique_ptr<BlockPlan> Plan(const Layout& keys, const std::vector<Band>& bands);
  // Accumulator and workspace are this object's: the caller leaves them NULL. `softmax_offset` is read in the
  // last call alone.
  void Forward(ForwardArgs args);
  // dk and dv go to the caller's accumulators unless `args.key` is first and last; the accumulator of dq is
  // this object's. The block has use.gradient_rows rows. `args.beside`: only with
  // Capabilities::overlapping_keys.
  void Backward(BackwardArgs args, cppool_stream stream);
  // Follows Backward of the same block.
  void BackwardBias(BackwardArgs args, const BiasGradient& gradient);

  std::vector<QuantizedOperand> quantized() const;

 private:
  // Adds a block's gradient to the accumulator, or rounds the sum to the result in the last call.
  void AddPart(const Buffer& part, std::int64_t count, const GradientPass& pass, float* accumulator,
               TensorOut result);
  void ClearPadding();

  cppool_runtime* rt_;
  RankKernels& kernels_;
  BlockUse use_;
  Capabilities capabilities_;
  std::unique_ptr<TokenRows> rows_;
  std::optional<Fp8Operands> operands_;
  BlockBuffers buffers_;
};

}  // namespace cppool::kernels
