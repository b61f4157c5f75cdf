#include "kernels/attention/schedules/fp8_operands.h"

#include <algorithm>
#include <utility>

#include "kernels/attention/problem/transposed.h"

namespace cppool::kernels {

TensorDtypes MovedDtypes(const AttentionSpec& spec) {
  TensorDtypes dtypes = spec.dtypes;
  if (!spec.fp8 || InBlocks(*spec.fp8)) return dtypes;
  dtypes.q = dtypes.k = dtypes.v = Dtype::kE4M3;
  if (spec.fp8->bwd) dtypes.dout = Dtype::kE5M2;
  return dtypes;
}

bool Fp8OperandUse::has(Operand operand) const {
  const bool backward = request.training && request.fp8->bwd;
  switch (operand) {
    case Operand::kQ:
    case Operand::kK:
    case Operand::kV:
      return true;
    case Operand::kDout:
      return backward;
    case Operand::kVOfDp:
    case Operand::kQOfDk:
    case Operand::kKOfDq:
    case Operand::kDoutOfDv:
      return backward && InBlocks(*request.fp8);
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such operand");
}

bool Fp8OperandUse::of_queries(Operand operand) const {
  return operand != Operand::kK && operand != Operand::kV && operand != Operand::kVOfDp &&
         operand != Operand::kKOfDq;
}
int Fp8OperandUse::heads(Operand operand) const {
  return of_queries(operand) ? request.shape.heads : request.shape.kv_heads;
}
int Fp8OperandUse::dim(Operand operand) const {
  const bool of_v = operand == Operand::kV || operand == Operand::kVOfDp || operand == Operand::kDout ||
                    operand == Operand::kDoutOfDv;
  return of_v ? request.shape.dim_v : request.shape.dim_qk;
}

bool Fp8OperandUse::reads_values() const {
  return InBlocks(*request.fp8) || forward_qk == Fp8Form::kValues ||
         (request.training && (!request.fp8->bwd || backward == Fp8Form::kValues));
}

void Fp8OperandBuffers::List(const Fp8OperandUse& use, MemoryList& list) {
  static constexpr const char* kNames[kOperands] = {"q for kernels",    "k for kernels", "v for kernels",
                                                    "dout for kernels", "v for dP",      "q for dk",
                                                    "k for dq",         "dout for dv"};
  for (int i = 0; i < kOperands; ++i) {
    const auto operand = static_cast<Operand>(i);
    if (!use.has(operand)) continue;
    const std::int64_t rows = use.of_queries(operand) ? use.queries.rows : use.rows_kv;
    const int heads = use.heads(operand), dim = use.dim(operand);
    const auto elements = static_cast<std::size_t>(rows * heads * dim);
    Each& to = each[static_cast<std::size_t>(i)];
    if (use.reads_values()) list.Add(kNames[i], elements * SizeOf(Dtype::kBf16), to.values);
    if (operand == Operand::kV && use.transposes())
      list.Add("transposed v", static_cast<std::size_t>(use.key_slots * heads * dim), to.payload);
    if (!InBlocks(*use.request.fp8)) continue;
    list.Add("payload in blocks", elements * SizeOf(Dtype::kE4M3), to.payload);
    // A block along the tokens has one token at least.
    list.Add("exponents of blocks",
             static_cast<std::size_t>(std::max(MxExponents(MxAxis::kDim, rows, 0, heads, dim),
                                               MxExponents(MxAxis::kTokens, rows, rows, heads, dim))),
             to.exponents);
  }
  list.AddTables("rows and blocks of the queries", use.TableBytes(use.queries, use.query_chunks));
}

std::size_t Fp8OperandUse::TableBytes(const Layout& tokens, const std::vector<std::int64_t>& chunks) const {
  const std::size_t blocks = InBlocks(*request.fp8) ? MxBlocks(tokens, chunks).size() : 0;
  const auto slots = static_cast<std::size_t>(transposes() ? SlotsOf(tokens) / kSlotTile : 0);
  return RowTilesBytes(tokens) + (blocks + slots) * sizeof(RowTile);
}

Fp8Operands::Fp8Operands(cppool_runtime* runtime, TensorOps& ops, Fp8OperandUse use,
                         const Fp8OperandBuffers& buffers)
    : rt_(runtime),
      ops_(ops),
      use_(std::move(use)),
      queries_(TokensOf(use_.queries, use_.query_chunks)),
      buffers_(buffers) {}

Fp8Operands::Tokens Fp8Operands::TokensOf(const Layout& layout, const std::vector<std::int64_t>& chunks) {
  Tokens tokens{layout, ops_.Rows(layout, rt_->stream), nullptr, nullptr};
  if (in_blocks()) tokens.blocks = ops_.fp8().Blocks(layout, chunks, rt_->stream);
  return tokens;
}

void Fp8Operands::AddKeys(const BlockPlan* plan, const Layout& keys) {
  Tokens tokens = TokensOf(keys, use_.key_chunks);
  if (use_.transposes()) tokens.slots = ops_.fp8().Slots(keys, rt_->stream);
  keys_[plan] = std::move(tokens);
}

void Fp8Operands::Record(QuantizedOperand quantized) {
  for (QuantizedOperand& known : quantized_) {
    if (known.operand == quantized.operand) {
      known = std::move(quantized);
      return;
    }
  }
  quantized_.push_back(std::move(quantized));
}

void Fp8Operands::Dequantize(Operand operand, InputTensor tensor, const TensorRef& from, const Tokens& tokens,
                             bool in_fp8, Fp8Form form) {
  const int heads = use_.heads(operand), dim = use_.dim(operand);
  TensorOut values;
  if (form == Fp8Form::kTransposed) {
    ops_.fp8().Transpose(*tokens.slots, heads, dim, from, of(operand).payload.get<std::uint8_t>(),
                         rt_->stream);
  } else if (form == Fp8Form::kValues) {
    values = {of(operand).values.get(), Dtype::kBf16};
    ops_.fp8().Dequantize(*tokens.rows, std::int64_t{heads} * dim,
                          {from.data, from.dtype, in_fp8 ? nullptr : from.scale}, values, rt_->stream);
  }
  const KernelShape& shape = use_.request.shape;
  Record({operand, tensor, std::nullopt, from, nullptr, values, tokens.layout,
          use_.of_queries(operand) ? shape.head0 : shape.kv_head0, heads, dim});
}

void Fp8Operands::CastInBlocks(Operand operand, InputTensor tensor, const TensorRef& from,
                               const Tokens& tokens, MxAxis axis) {
  const int heads = use_.heads(operand), dim = use_.dim(operand);
  const Fp8OperandBuffers::Each& to = of(operand);
  const MxTensor quantized{to.payload.get<std::uint8_t>(), to.exponents.get<std::uint8_t>()};
  ops_.fp8().CastBlocks(*tokens.blocks, axis, heads, dim, from, quantized, rt_->stream);
  ops_.fp8().DequantizeBlocks(*tokens.blocks, axis, heads, dim, quantized, {to.values.get(), Dtype::kBf16},
                              rt_->stream);
  const KernelShape& shape = use_.request.shape;
  Record({operand,
          tensor,
          axis,
          {quantized.payload, Dtype::kE4M3},
          quantized.exponents,
          {to.values.get(), Dtype::kBf16},
          tokens.layout,
          use_.of_queries(operand) ? shape.head0 : shape.kv_head0,
          heads,
          dim});
}

void Fp8Operands::Prepare(ForwardArgs& args) {
  const Tokens& keys = keys_.at(args.plan);
  if (in_blocks()) {
    if (args.first) CastInBlocks(Operand::kQ, InputTensor::kQ, args.q, queries_, MxAxis::kDim);
    CastInBlocks(Operand::kK, InputTensor::kK, args.k, keys, MxAxis::kDim);
    CastInBlocks(Operand::kV, InputTensor::kV, args.v, keys, MxAxis::kTokens);
  } else {
    if (args.first) Dequantize(Operand::kQ, InputTensor::kQ, args.q, queries_, true, use_.forward_qk);
    Dequantize(Operand::kK, InputTensor::kK, args.k, keys, true, use_.forward_qk);
    Dequantize(Operand::kV, InputTensor::kV, args.v, keys, true, use_.forward_v);
  }
  args.p_scale = PScale(*use_.request.fp8);
  const auto point = [&](Operand operand, Fp8Form form, TensorRef& at) {
    if (in_blocks()) {
      at = {of(operand).values.get(), Dtype::kBf16};
    } else if (form == Fp8Form::kValues) {
      at = {of(operand).values.get(), Dtype::kBf16, at.scale};
    } else if (form == Fp8Form::kTransposed) {
      at.data = of(operand).payload.get();
    }
  };
  point(Operand::kQ, use_.forward_qk, args.q);
  point(Operand::kK, use_.forward_qk, args.k);
  point(Operand::kV, use_.forward_v, args.v);
}

void Fp8Operands::Prepare(BackwardArgs& args) {
  const Tokens& keys = keys_.at(args.plan);
  const bool first = args.query.wanted && args.query.first;
  if (!in_blocks()) {
    const bool in_fp8 = backward_in_fp8();
    const Fp8Form form = backward_form();
    if (first) Dequantize(Operand::kQ, InputTensor::kQ, args.q, queries_, in_fp8, form);
    if (first && in_fp8) Dequantize(Operand::kDout, InputTensor::kDout, args.dout, queries_, true, form);
    Dequantize(Operand::kK, InputTensor::kK, args.k, keys, in_fp8, form);
    Dequantize(Operand::kV, InputTensor::kV, args.v, keys, in_fp8, form);
  } else {
    if (first) CastInBlocks(Operand::kQ, InputTensor::kQ, args.q, queries_, MxAxis::kDim);
    CastInBlocks(Operand::kK, InputTensor::kK, args.k, keys, MxAxis::kDim);
    if (!backward_in_fp8()) {
      CastInBlocks(Operand::kV, InputTensor::kV, args.v, keys, MxAxis::kTokens);
    } else {
      CastInBlocks(Operand::kVOfDp, InputTensor::kV, args.v, keys, MxAxis::kDim);
      CastInBlocks(Operand::kKOfDq, InputTensor::kK, args.k, keys, MxAxis::kTokens);
      if (first) {
        CastInBlocks(Operand::kDout, InputTensor::kDout, args.dout, queries_, MxAxis::kDim);
        CastInBlocks(Operand::kQOfDk, InputTensor::kQ, args.q, queries_, MxAxis::kTokens);
        CastInBlocks(Operand::kDoutOfDv, InputTensor::kDout, args.dout, queries_, MxAxis::kTokens);
      }
    }
  }
  Use(args);
}

void Fp8Operands::Use(BackwardArgs& args) const {
  if (backward_in_fp8()) args.casts.p_scale = PScale(*use_.request.fp8);
  if (!in_blocks() && backward_form() == Fp8Form::kPayload) return;
  const auto point = [&](Operand operand, TensorRef& at, bool with_scale) {
    at = {of(operand).values.get(), Dtype::kBf16, with_scale ? at.scale : nullptr};
  };
  const bool with_scales = !in_blocks() && backward_in_fp8();
  point(Operand::kQ, args.q, with_scales);
  point(Operand::kK, args.k, with_scales);
  point(in_blocks() && backward_in_fp8() ? Operand::kVOfDp : Operand::kV, args.v, with_scales);
  if (!backward_in_fp8()) return;
  point(Operand::kDout, args.dout, with_scales);
  if (!in_blocks()) return;
  args.casts.ds_blocks = true;
  point(Operand::kQOfDk, args.q_of_dk, false);
  point(Operand::kKOfDq, args.k_of_dq, false);
  point(Operand::kDoutOfDv, args.dout_of_dv, false);
}

}  // namespace cppool::kernels
