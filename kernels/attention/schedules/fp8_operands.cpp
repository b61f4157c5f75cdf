#include "kernels/attention/schedules/fp8_operands.h"

#include <algorithm>
#include <utility>

#include "kernels/attention/problem/transposed.h"

namespace cppool::kernels {

Fp8Form Fp8OperandUse::FormOf(const Fp8Row& row, Fp8Reader pass) const {
  if (row.axis || pass == kBackwardPass16) return Fp8Form::kValues;
  return pass == kBackwardPass ? backward : row.tensor == Fp8Tensor::kV ? forward_v : forward_qk;
}

bool Fp8OperandUse::reads_values(const Fp8Row& row) const {
  for (const Fp8Reader pass : {kForwardPass, kBackwardPass, kBackwardPass16})
    if (row.readers & pass && FormOf(row, pass) == Fp8Form::kValues) return true;
  return false;
}

void Fp8OperandBuffers::List(const Fp8OperandUse& use, MemoryList& list) {
  for (const Fp8Row& row : use.table()) {
    if (!row.operand) continue;
    const std::int64_t rows = row.of_queries() ? use.queries.rows : use.rows_kv;
    const int heads = use.heads(row), dim = use.dim(row);
    const auto elements = static_cast<std::size_t>(rows * heads * dim);
    Each& to = each[static_cast<std::size_t>(*row.operand)];
    if (use.reads_values(row)) list.Add("values of an operand", elements * SizeOf(Dtype::kBf16), to.values);
    if (row.operand == Operand::kV && use.transposes())
      list.Add("transposed v", static_cast<std::size_t>(use.key_slots * heads * dim), to.payload);
    if (!row.axis) continue;
    list.Add("payload in blocks", elements * SizeOf(row.format), to.payload);
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
      table_(use_.table()),
      queries_(TokensOf(use_.queries, use_.query_chunks)),
      buffers_(buffers) {}

Fp8Operands::Tokens Fp8Operands::TokensOf(const Layout& layout, const std::vector<std::int64_t>& chunks) {
  Tokens tokens{layout, ops_.Rows(layout, rt_->stream), nullptr, nullptr};
  if (InBlocks(*use_.request.fp8)) tokens.blocks = ops_.fp8().Blocks(layout, chunks, rt_->stream);
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

namespace {

InputTensor InputOf(Fp8Tensor tensor) {
  return tensor == Fp8Tensor::kQ   ? InputTensor::kQ
         : tensor == Fp8Tensor::kK ? InputTensor::kK
         : tensor == Fp8Tensor::kV ? InputTensor::kV
                                   : InputTensor::kDout;
}

}  // namespace

void Fp8Operands::MakeOperand(const Fp8Row& row, Fp8Reader pass, const TensorRef& from,
                              const Tokens& tokens) {
  const int heads = use_.heads(row), dim = use_.dim(row);
  const Fp8OperandBuffers::Each& to = of(*row.operand);
  const TensorOut values{to.values.get(), Dtype::kBf16};
  const KernelShape& shape = use_.request.shape;
  QuantizedOperand made{*row.operand,  InputOf(row.tensor),
                        row.axis,      from,
                        nullptr,       {},
                        tokens.layout, row.of_queries() ? shape.head0 : shape.kv_head0,
                        heads,         dim};
  if (row.axis) {
    const MxTensor quantized{to.payload.get<std::uint8_t>(), to.exponents.get<std::uint8_t>()};
    ops_.fp8().CastBlocks(*tokens.blocks, *row.axis, heads, dim, from, quantized, rt_->stream);
    ops_.fp8().DequantizeBlocks(*tokens.blocks, *row.axis, heads, dim, quantized, values, rt_->stream);
    made.payload = {quantized.payload, row.format};
    made.exponents = quantized.exponents;
    made.values = values;
  } else if (use_.FormOf(row, pass) == Fp8Form::kTransposed) {
    ops_.fp8().Transpose(*tokens.slots, heads, dim, from, to.payload.get<std::uint8_t>(), rt_->stream);
  } else if (use_.FormOf(row, pass) == Fp8Form::kValues) {
    const float* const scale = pass == kBackwardPass16 ? from.scale : nullptr;
    ops_.fp8().Dequantize(*tokens.rows, std::int64_t{heads} * dim, {from.data, from.dtype, scale}, values,
                          rt_->stream);
    made.values = values;
  }
  Record(std::move(made));
}

template <typename ArgOf>
void Fp8Operands::Make(Fp8Reader pass, bool of_queries, const Tokens& keys, ArgOf&& arg_of) {
  // The arguments are those of tensors until all is made.
  for (const Fp8Row& row : table_) {
    if (!row.operand || !(row.readers & pass) || (row.of_queries() && !of_queries)) continue;
    // A schedule has put the tensor into the argument of its first operand.
    MakeOperand(row, pass, arg_of(*table_.Find(row.tensor)->operand), row.of_queries() ? queries_ : keys);
  }
}

template <typename ArgOf>
void Fp8Operands::Point(Fp8Reader pass, ArgOf&& arg_of) const {
  for (const Fp8Row& row : table_) {
    if (!row.operand || !(row.readers & pass)) continue;
    TensorRef& at = arg_of(*row.operand);
    const Fp8Form form = use_.FormOf(row, pass);
    if (form == Fp8Form::kTransposed) at.data = of(*row.operand).payload.get();
    if (form != Fp8Form::kValues) continue;
    at = {of(*row.operand).values.get(), Dtype::kBf16,
          row.axis || pass == kBackwardPass16 ? nullptr : at.scale};
  }
}

void Fp8Operands::Prepare(ForwardArgs& args) {
  const auto arg_of = [&](Operand operand) -> TensorRef& {
    return operand == Operand::kQ ? args.q : operand == Operand::kK ? args.k : args.v;
  };
  Make(kForwardPass, args.first, keys_.at(args.plan), arg_of);
  args.p_scale = table_.Find(Fp8Tensor::kP)->constant;
  Point(kForwardPass, arg_of);
}

namespace {

TensorRef& ArgOf(BackwardArgs& args, Operand operand) {
  switch (operand) {
    case Operand::kQ:
      return args.q;
    case Operand::kK:
      return args.k;
    case Operand::kV:
    case Operand::kVOfDp:
      return args.v;
    case Operand::kDout:
      return args.dout;
    case Operand::kQOfDk:
      return args.q_of_dk;
    case Operand::kKOfDq:
      return args.k_of_dq;
    case Operand::kDoutOfDv:
      return args.dout_of_dv;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such operand");
}

}  // namespace

void Fp8Operands::Prepare(BackwardArgs& args) {
  Make(BackwardPassOf(*use_.request.fp8), args.query.wanted && args.query.first, keys_.at(args.plan),
       [&](Operand operand) -> TensorRef& { return ArgOf(args, operand); });
  Use(args);
}

void Fp8Operands::Use(BackwardArgs& args) const {
  if (const Fp8Row* const ds = table_.Find(Fp8Tensor::kDs)) {
    args.casts.p_scale = table_.Find(Fp8Tensor::kP)->constant;
    args.casts.ds_blocks = ds->axis.has_value();
  }
  Point(BackwardPassOf(*use_.request.fp8),
        [&](Operand operand) -> TensorRef& { return ArgOf(args, operand); });
}

}  // namespace cppool::kernels
