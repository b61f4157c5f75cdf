// What kernels read in fp8, made from what a schedule moves. Kernels read 16-bit tensors: a payload's values
// are exact in bf16, and its scale goes with them; a tensor that is quantized in blocks moves in 16 bits, and
// is cast where it is read.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/check_kernels.h"
#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/fp8_table.h"
#include "kernels/attention/schedule.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/memory_list.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// How a rank's calls use them.
struct Fp8OperandUse {
  KernelRequest request;
  Layout queries;
  std::int64_t rows_kv = 0;                            // of the largest block of keys
  std::vector<std::int64_t> query_chunks, key_chunks;  // casts in blocks: see MxBlocks
  std::int64_t key_slots = 0;                          // of a transposed payload of any block
  Fp8Form forward_qk = Fp8Form::kValues, forward_v = Fp8Form::kValues, backward = Fp8Form::kValues;

  Fp8Table table() const { return Fp8TableOf(*request.fp8, request.training); }
  int heads(const Fp8Row& row) const {
    return row.of_queries() ? request.shape.heads : request.shape.kv_heads;
  }
  int dim(const Fp8Row& row) const { return row.of_v() ? request.shape.dim_v : request.shape.dim_qk; }
  // In what form kernels of the pass read it: kValues for what is in blocks, and for a pass in 16 bits.
  Fp8Form FormOf(const Fp8Row& row, Fp8Reader pass) const;
  bool reads_values(const Fp8Row& row) const;
  bool transposes() const { return forward_v == Fp8Form::kTransposed; }
  // The tables of these tokens' rows and blocks, on a runtime that has them in device memory.
  std::size_t TableBytes(const Layout& tokens, const std::vector<std::int64_t>& chunks) const;
};

struct Fp8OperandBuffers {
  struct Each {
    Buffer values;              // bf16 [rows, heads, dim]; where reads_values
    Buffer payload, exponents;  // with casts in blocks; the payload of v also where it is transposed
  };
  std::array<Each, kOperands> each;

  void List(const Fp8OperandUse& use, MemoryList& list);
};

class Fp8Operands {
 public:
  // `ops` and `buffers` outlive it; the buffers are allocated by the first Prepare.
  Fp8Operands(cppool_runtime* runtime, TensorOps& ops, Fp8OperandUse use, const Fp8OperandBuffers& buffers);

  // Before calls with this plan.
  void AddKeys(const BlockPlan* plan, const Layout& keys);

  // Make the operands of a call on the main stream and point the arguments at them. Those of queries are made
  // by the first call of a pass.
  void Prepare(ForwardArgs& args);
  void Prepare(BackwardArgs& args);
  // Uses the operands of the last call of Prepare, without making them again.
  void Use(BackwardArgs& args) const;

  // Returns what was quantized for the last call of each operand.
  const std::vector<QuantizedOperand>& quantized() const { return quantized_; }

 private:
  struct Tokens {
    Layout layout;
    std::unique_ptr<TokenRows> rows, blocks, slots;
  };
  Tokens TokensOf(const Layout& layout, const std::vector<std::int64_t>& chunks);
  const Fp8OperandBuffers::Each& of(Operand operand) const {
    return buffers_.each[static_cast<std::size_t>(operand)];
  }
  // Makes what kernels read of a tensor that the schedule has moved; nothing of what they read as it is.
  void MakeOperand(const Fp8Row& row, Fp8Reader pass, const TensorRef& from, const Tokens& tokens);
  // Makes those of a pass, and points its arguments, arg_of(operand), at them.
  template <typename ArgOf>
  void Make(Fp8Reader pass, bool of_queries, const Tokens& keys, ArgOf&& arg_of);
  template <typename ArgOf>
  void Point(Fp8Reader pass, ArgOf&& arg_of) const;
  void Record(QuantizedOperand quantized);

  cppool_runtime* rt_;
  TensorOps& ops_;
  Fp8OperandUse use_;
  Fp8Table table_;
  Tokens queries_;
  std::map<const BlockPlan*, Tokens> keys_;
  const Fp8OperandBuffers& buffers_;
  std::vector<QuantizedOperand> quantized_;
};

}  // namespace cppool::kernels
