// The passes of a block: its calls one after another, and what merges and adds up their results.
#include <algorithm>
#include <limits>
#include <string>

#include "kernels/attention/families/table/kernel.h"

namespace cppool::kernels::table {
namespace {

constexpr float kLn2 = 0.693147180559945309f;

[[noreturn]] void Misused(const std::string& detail) {
  throw RuntimeError(CPPOOL_INTERNAL, "attention kernel 'table': " + detail);
}

// Where element (row, head, 0) of [rows, heads, dim] is.
void* At(const void* data, Dtype dtype, std::int64_t row, int heads, int head, int dim) {
  if (!data) return nullptr;
  return const_cast<std::byte*>(static_cast<const std::byte*>(data)) +
         static_cast<std::size_t>((row * heads + head) * dim) * SizeOf(dtype);
}

// Where the call's first element is, of a bias or its gradient.
std::int64_t BiasOffset(const BlockCall& call, std::int64_t batch_stride, std::int64_t head_stride,
                        std::int64_t query_stride) {
  const Rectangle& r = call.area.where;
  return r.sequence * batch_stride + call.group.head * head_stride + r.q_position * query_stride +
         r.k_position;
}

void* DataOf(const float* scale) { return const_cast<float*>(scale); }

// What is added to the logits, and the tables of packed sequences.
void SetExtras(const CallForm& form, const BlockCall& call, const BiasArgs& bias, const Buffer& tables,
               CallData& data) {
  if (form.tensors[kBias].ndim > 0) {
    data[kBias] = At(bias.tensor.data, bias.tensor.dtype,
                     BiasOffset(call, bias.batch_stride, bias.head_stride, bias.query_stride), 1, 0, 1);
  }
  if (form.tensors[kAlibiSlopes].ndim > 0)
    data[kAlibiSlopes] = const_cast<float*>(bias.alibi_slopes + call.group.head);
  std::int32_t* table = tables.get<std::int32_t>() + call.tables;
  for (const CallTensor which : {kCuSeqlensQ, kCuSeqlensKv, kSeqlensQ, kSeqlensKv}) {
    if (form.tensors[which].ndim == 0) continue;
    data[which] = table;
    table += form.tensors[which].shape[0];
  }
}

}  // namespace

void* TableKernel::OwnLse(const BlockCall& call, const KernelShape& shape, float* scratch) const {
  return Has(CPPOOL_ATTENTION_LSE_HEADS_FIRST)
             ? scratch
             : At(scratch, Dtype::kFp32, call.area.where.q_row, shape.heads, call.group.head, 1);
}

void TableKernel::CopyValues(const RowValues& values, bool to_call, const TablePlan& plan,
                             const CallForm& form, const BlockCall& call, cppool_stream stream) {
  const TensorForm& tensor = form.tensors[values.which];
  const Rectangle& whole = call.area.where;
  const std::int64_t q_rows = whole.batch > 1 ? whole.q_stride : whole.queries * plan.q_step;
  const std::int64_t heads = plan.request.shape.heads;
  const std::int64_t ours[3] = {q_rows * heads, 1, plan.q_step * heads};
  const bool gaps = form.tensors[kSeqlensQ].ndim > 0;
  for (const Rectangle& rows : gaps ? call.area.sequences : std::vector<Rectangle>{whole}) {
    const std::int64_t first = (rows.q_row - whole.q_row) / plan.q_step;
    float* const of_call = static_cast<float*>(values.of_call) + first * tensor.strides[2];
    float* const of_block = values.of_block + first * ours[2];
    StridedCopy copy;
    copy.extent[0] = tensor.shape[0];
    copy.extent[1] = tensor.shape[1];
    copy.extent[2] = rows.queries;
    for (std::size_t i = 0; i < 3; ++i) {
      copy.from_strides[i] = to_call ? ours[i] : tensor.strides[i];
      copy.to_strides[i] = to_call ? tensor.strides[i] : ours[i];
    }
    copy.from = to_call ? of_block : of_call;
    copy.to = to_call ? of_call : of_block;
    copy.factor = values.factor;
    ops_->CopyStrided(copy, stream);
  }
}

void TableKernel::RunForward(const TablePlan& plan, const BlockCall& call, bool fp32, const ForwardArgs& args,
                             TensorOut out, float* lse, const Scratch& scratch, cppool_stream stream) {
  const Prepared& prepared = plan.forward[fp32 ? call.fp32_form : call.form];
  const CallForm& form = prepared.call->form();
  const KernelShape& shape = plan.request.shape;
  const Rectangle& r = call.area.where;
  const HeadGroup& g = call.group;
  const auto rows_of = [&](float* values) {
    return static_cast<float*>(At(values, Dtype::kFp32, r.q_row, shape.heads, g.head, 1));
  };
  CallData data{};
  data[kQ] = At(args.q.data, args.q.dtype, r.q_row, shape.heads, g.head, shape.dim_qk);
  data[kK] = At(args.k.data, args.k.dtype, r.k_row, shape.kv_heads, g.kv_head, shape.dim_qk);
  data[kV] = At(args.v.data, args.v.dtype, r.k_row, shape.kv_heads, g.kv_head, shape.dim_v);
  data[kOut] = At(out.data, out.dtype, r.q_row, shape.heads, g.head, shape.dim_v);
  if (args.p_scale != 0) {
    data[kQScale] = DataOf(args.q.scale);
    data[kKScale] = DataOf(args.k.scale);
    data[kVScale] = DataOf(args.v.scale);
  }
  SetExtras(form, call, args.bias, plan.forward_tables, data);
  data[kLse] = ConvertsLse() ? OwnLse(call, shape, scratch.packed_lse) : rows_of(lse);
  const bool packs_max = args.max_logit && Has(CPPOOL_ATTENTION_LSE_HEADS_FIRST);
  if (args.max_logit) data[kMaxLogit] = packs_max ? scratch.packed_max : rows_of(scratch.row_max);
  Run(prepared, call.area, data, stream);
  if (ConvertsLse()) {
    const float factor = Has(CPPOOL_ATTENTION_LSE_BASE2) ? kLn2 : 1.0f;
    CopyValues({kLse, data[kLse], rows_of(lse), factor}, false, plan, form, call, stream);
  }
  if (packs_max)
    CopyValues({kMaxLogit, data[kMaxLogit], rows_of(scratch.row_max)}, false, plan, form, call, stream);
}

void TableKernel::RunForward(const TablePlan& plan, const Layer& layer, bool fp32, const ForwardArgs& args,
                             TensorOut out, float* lse, const Scratch& scratch, cppool_stream stream) {
  const bool payload = WritesPayload(args);
  const TensorOut written = payload ? TensorOut{scratch.out_payload, Dtype::kE4M3} : out;
  for (const BlockCall& call : layer.calls) RunForward(plan, call, fp32, args, written, lse, scratch, stream);
  const KernelShape& shape = plan.request.shape;
  if (payload)
    ops_->fp8().Dequantize(*plan.tokens, std::int64_t{shape.heads} * shape.dim_v,
                           {written.data, written.dtype, args.v.scale}, out, stream);
}

void TableKernel::Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) {
  const auto& plan = static_cast<const TablePlan&>(*args.plan);
  const PassCalls& pass = plan.block.forward;
  if (pass.layers.empty() && !args.first && !args.last) return;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const Scratch scratch(plan.request, plan.rows_q, plan.rows_kv, args.workspace);
  if (args.max_logit) ops_->Fill(scratch.row_max, kNone, plan.rows_q * shape.heads, stream);
  const auto raise_max_logit = [&] {
    if (args.max_logit) ops_->MaxRows(scratch.row_max, plan.rows_q, shape.heads, args.max_logit, stream);
  };
  if (args.first && args.last && !args.softmax_offset && pass.layers.size() == 1 &&
      pass.layers[0].every_query) {
    RunForward(plan, pass.layers[0], false, args, args.out, args.lse, scratch, stream);
    raise_max_logit();
    return;
  }
  const TensorOut part{scratch.out, pass.fp32 && !WritesPayload(args) ? Dtype::kFp32 : shape.dtypes.out};
  MergeArgs merge;
  merge.rows = plan.tokens.get();
  merge.heads = shape.heads;
  merge.dim = shape.dim_v;
  merge.part = part;
  merge.part_lse = scratch.lse;
  merge.accumulator = args.accumulator ? args.accumulator : scratch.out_sum;
  merge.lse = args.lse;
  merge.out = args.out;
  const std::size_t layers = std::max<std::size_t>(1, pass.layers.size());
  for (std::size_t i = 0; i < layers; ++i) {
    const Layer* layer = i < pass.layers.size() ? &pass.layers[i] : nullptr;
    if (!layer || !layer->every_query) ops_->Fill(scratch.lse, kNone, plan.rows_q * shape.heads, stream);
    if (layer) {
      RunForward(plan, *layer, pass.fp32, args, part, scratch.lse, scratch, stream);
      raise_max_logit();  // the next layer writes the same rows
    }
    merge.first = args.first && i == 0;
    merge.last = args.last && i + 1 == layers;
    merge.softmax_offset = merge.last ? args.softmax_offset : nullptr;
    ops_->Merge(merge, stream);
  }
}

void TableKernel::RunBackward(const TablePlan& plan, const BlockCall& call, bool fp32,
                              const BackwardArgs& args, const TensorOut& dq, const TensorOut& dk,
                              const TensorOut& dv, const Scratch& scratch, cppool_stream stream) {
  const Prepared& prepared = plan.backward[fp32 ? call.fp32_form : call.form];
  const CallForm& form = prepared.call->form();
  const KernelShape& shape = plan.request.shape;
  const Rectangle& r = call.area.where;
  const HeadGroup& g = call.group;
  const auto of_queries = [&](const void* data, Dtype dtype, int dim) {
    return At(data, dtype, r.q_row, shape.heads, g.head, dim);
  };
  const auto of_keys = [&](const void* data, Dtype dtype, int dim) {
    return At(data, dtype, r.k_row, shape.kv_heads, g.kv_head, dim);
  };
  CallData data{};
  data[kQ] = of_queries(args.q.data, args.q.dtype, shape.dim_qk);
  data[kK] = of_keys(args.k.data, args.k.dtype, shape.dim_qk);
  data[kV] = of_keys(args.v.data, args.v.dtype, shape.dim_v);
  data[kOut] = of_queries(args.out.data, args.out.dtype, shape.dim_v);
  data[kDout] = of_queries(args.dout.data, args.dout.dtype, shape.dim_v);
  data[kDq] = of_queries(dq.data, dq.dtype, shape.dim_qk);
  data[kDk] = of_keys(dk.data, dk.dtype, shape.dim_qk);
  data[kDv] = of_keys(dv.data, dv.dtype, shape.dim_v);
  data[kLse] = of_queries(args.lse, Dtype::kFp32, 1);
  data[kDelta] = of_queries(args.delta, Dtype::kFp32, 1);
  if (args.casts.p_scale != 0) {
    data[kQScale] = DataOf(args.q.scale);
    data[kKScale] = DataOf(args.k.scale);
    data[kVScale] = DataOf(args.v.scale);
    data[kDoutScale] = DataOf(args.dout.scale);
    data[kDsScale] = DataOf(args.casts.ds_scale);
    data[kAmaxDs] = scratch.amax_ds;
  }
  SetExtras(form, call, args.bias, plan.backward_tables, data);
  if (form.tensors[kDbias].ndim > 0) data[kDbias] = scratch.dbias;
  if (ConvertsLse()) {
    void* const own = OwnLse(call, shape, scratch.packed_lse);
    const float factor = Has(CPPOOL_ATTENTION_LSE_BASE2) ? 1 / kLn2 : 1.0f;
    CopyValues({kLse, own, static_cast<float*>(data[kLse]), factor}, true, plan, form, call, stream);
    data[kLse] = own;
  }
  if (Has(CPPOOL_ATTENTION_LSE_HEADS_FIRST)) {
    CopyValues({kDelta, scratch.packed_delta, static_cast<float*>(data[kDelta])}, true, plan, form, call,
               stream);
    data[kDelta] = scratch.packed_delta;
  }
  Run(prepared, call.area, data, stream);
  if (args.casts.amax_ds) ops_->MaxRows(scratch.amax_ds, 1, 1, args.casts.amax_ds, stream);
  if (args.dbias.sum && form.tensors[kDbias].ndim > 0) AddBias(form, call, args.dbias, scratch, stream);
}

void TableKernel::AddBias(const CallForm& form, const BlockCall& call, const BiasGradient& gradient,
                          const Scratch& scratch, cppool_stream stream) {
  const TensorForm& part = form.tensors[kDbias];
  StridedSum sum;
  std::copy_n(part.shape.begin(), 4, sum.extent);
  std::copy_n(part.strides.begin(), 4, sum.from_strides);
  sum.from = {scratch.dbias, part.dtype};
  sum.to =
      gradient.sum + BiasOffset(call, gradient.batch_stride, gradient.head_stride, gradient.query_stride);
  const std::int64_t strides[4] = {call.area.where.sequence_stride * gradient.batch_stride,
                                   gradient.head_stride, gradient.query_stride, 1};
  std::copy_n(strides, 4, sum.to_strides);
  ops_->AddStrided(sum, stream);
}

void TableKernel::Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) {
  const auto& plan = static_cast<const TablePlan&>(*args.plan);
  const PassCalls& pass = plan.block.backward;
  if (!args.query.wanted || !args.key.wanted) Misused("a backward pass of one side alone");
  const Scratch scratch(plan.request, plan.rows_q, plan.rows_kv, args.workspace);
  const std::size_t layers = std::max<std::size_t>(1, pass.layers.size());

  // One gradient on its way: the kernel writes it where it belongs, or parts that are added up.
  struct Gradient {
    GradientPass how;
    std::int64_t elements;
    TensorOut result;
    float* sum;
    TensorOut part;  // what the kernel writes
    bool direct;
  };
  const auto gradient = [&](const GradientPass& how, std::int64_t elements, TensorOut result, float* sum,
                            float* own_sum, void* part, bool direct) {
    return Gradient{how,
                    elements,
                    result,
                    sum ? sum : own_sum,
                    direct ? result : TensorOut{part, pass.fp32 ? Dtype::kFp32 : result.dtype},
                    direct};
  };
  const auto whole = [&](const GradientPass& how) { return how.first && how.last && layers == 1; };
  // A kernel that writes fp32 does so for all of them, unless none is a part; dbias always is.
  const bool fp32 = pass.fp32 && (args.dbias.sum || !(whole(args.query) && whole(args.key)));
  const bool direct_q = whole(args.query) && !fp32, direct_k = whole(args.key) && !fp32;
  const std::int64_t vectors_q = plan.rows_q * shape.heads, vectors_kv = plan.rows_kv * shape.kv_heads;
  const TensorDtypes& dtypes = shape.dtypes;
  const Gradient gradients[3] = {gradient(args.query, vectors_q * shape.dim_qk, {args.dq.data, dtypes.dq},
                                          args.dq_accumulator, scratch.dq_sum, scratch.dq, direct_q),
                                 gradient(args.key, vectors_kv * shape.dim_qk, {args.dk.data, dtypes.dk},
                                          args.dk_accumulator, scratch.dk_sum, scratch.dk, direct_k),
                                 gradient(args.key, vectors_kv * shape.dim_v, {args.dv.data, dtypes.dv},
                                          args.dv_accumulator, scratch.dv_sum, scratch.dv, direct_k)};

  for (std::size_t i = 0; i < layers; ++i) {
    const Layer* layer = i < pass.layers.size() ? &pass.layers[i] : nullptr;
    for (std::size_t g = 0; g < 3; ++g) {
      // Rows that no call writes are zero in the sum; padding, which no call writes either, may be anything.
      const bool every_row = layer && (g == 0 ? layer->every_q_row : layer->every_k_row);
      if (!every_row) Zero(gradients[g].part.data, gradients[g].elements, gradients[g].part.dtype, stream);
    }
    if (layer) {
      for (const BlockCall& call : layer->calls) {
        RunBackward(plan, call, fp32, args, gradients[0].part, gradients[1].part, gradients[2].part, scratch,
                    stream);
      }
    }
    for (const Gradient& g : gradients) {
      if (g.direct) continue;
      const float* sum = g.sum;
      if (whole(g.how)) {  // then the part is fp32
        sum = static_cast<const float*>(g.part.data);
      } else {
        ops_->Accumulate(g.part, g.sum, g.elements, g.how.first && i == 0, stream);
      }
      if (g.how.last && i + 1 == layers) ops_->RoundSum({sum}, g.result, g.elements, stream);
    }
  }
}

void TableKernel::BackwardBias(const KernelShape&, const BackwardArgs&, const BiasGradient&, cppool_stream) {
  Misused("a bias gradient without the others");
}

}  // namespace cppool::kernels::table
