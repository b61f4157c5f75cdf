#include "kernels/attention/schedules/block_attention.h"

#include <utility>

#include "kernels/attention/problem/row_tiles.h"

namespace cppool::kernels {

void BlockBuffers::List(const BlockUse& use, MemoryList& list) {
  const KernelShape& shape = use.request.shape;
  const Capabilities can = use.capabilities();
  const auto rows = static_cast<std::size_t>(use.queries.rows) * shape.heads;
  const auto keys = static_cast<std::size_t>(use.gradient_rows) * shape.kv_heads;
  if (use.several_forward) list.Add("output so far", rows * shape.dim_v * sizeof(float), accumulator);
  if (use.merges()) {
    list.Add("output of a block", rows * shape.dim_v * SizeOf(shape.dtypes.out), part);
    list.Add("lse of a block", rows * sizeof(float), part_lse);
  }
  list.Add("workspace of the kernel", use.family->WorkspaceBytes(use.request, use.queries.rows, use.rows_kv),
           workspace);
  if (use.needs_rows()) list.AddTables("rows of the queries", RowTilesBytes(use.queries));
  if (use.request.fp8) operands.List(use.operands(), list);
  if (!use.request.training) return;
  if (use.several_backward) list.Add("dq so far", rows * shape.dim_qk * sizeof(float), dq_accumulator);
  if (can.accumulates_gradients) return;
  if (use.several_backward) list.Add("dq of a block", rows * shape.dim_qk * SizeOf(shape.dtypes.dq), dq_part);
  if (use.keys_in_fp32) {
    list.Add("dk of a block", keys * shape.dim_qk * SizeOf(shape.dtypes.dk), dk_part);
    list.Add("dv of a block", keys * shape.dim_v * SizeOf(shape.dtypes.dv), dv_part);
  }
}

BlockAttention::BlockAttention(cppool_runtime* runtime, RankKernels& kernels, BlockUse use)
    : rt_(runtime), kernels_(kernels), use_(std::move(use)), capabilities_(use_.capabilities()) {
  kernels_.attention->Load(use_.request);
  kernels_.ops->Load();
  if (use_.needs_rows()) rows_ = kernels_.ops->Rows(use_.queries, rt_->stream);
  if (use_.request.fp8) operands_.emplace(runtime, *kernels.ops, use_.operands(), buffers_.operands);
}

std::unique_ptr<BlockPlan> BlockAttention::Plan(const Layout& keys, const std::vector<Band>& bands) {
  auto plan = kernels_.attention->Plan(use_.request, use_.queries, keys, bands, rt_->stream);
  if (operands_) operands_->AddKeys(plan.get(), keys);
  return plan;
}

void BlockAttention::Forward(ForwardArgs args) {
  args.accumulator = buffers_.accumulator.get<float>();
  args.workspace = buffers_.workspace.get();
  if (!args.last) args.softmax_offset = nullptr;
  if (operands_) operands_->Prepare(args);
  if (!use_.merges()) {
    kernels_.attention->Forward(shape(), args, rt_->stream);
    return;
  }
  // For a family whose kernels return a block's normalised out and lse alone, as most kernels do. Those of
  // today continue, the table's by scratch of its own; tests run the schedules with a family that cannot
  // (limited_family.h).
  MergeArgs merge;
  merge.rows = rows_.get();
  merge.heads = shape().heads;
  merge.dim = shape().dim_v;
  merge.part = {buffers_.part.get(), shape().dtypes.out};
  merge.part_lse = buffers_.part_lse.get<float>();
  merge.accumulator = args.accumulator;
  merge.lse = args.lse;
  merge.out = args.out;
  merge.softmax_offset = args.softmax_offset;
  merge.first = args.first;
  merge.last = args.last;
  args.out = {buffers_.part.get(), shape().dtypes.out};
  args.lse = buffers_.part_lse.get<float>();
  args.first = args.last = true;
  args.softmax_offset = nullptr;
  kernels_.attention->Forward(shape(), args, rt_->stream);
  kernels_.ops->Merge(merge, rt_->stream);
}

void BlockAttention::ClearPadding() {
  // The kernel does not write rows without a token, which differ from block to block, and what is added to a
  // sum there must be 0.
  const auto clear = [&](const Buffer& buffer) {
    if (buffer) Check(rt_, rt_->fill(rt_, buffer.get(), 0, buffer.bytes(), rt_->stream));
  };
  if (use_.padded_queries) clear(buffers_.dq_part);
  if (use_.padded_keys) {
    clear(buffers_.dk_part);
    clear(buffers_.dv_part);
  }
}

void BlockAttention::AddPart(const Buffer& part, std::int64_t count, const GradientPass& pass,
                             float* accumulator, TensorOut result) {
  kernels_.ops->Accumulate({part.get(), result.dtype}, accumulator, count, pass.first, rt_->stream);
  if (pass.last) kernels_.ops->RoundSum({accumulator}, result, count, rt_->stream);
}

void BlockAttention::Backward(BackwardArgs args, cppool_stream stream) {
  args.dq_accumulator = buffers_.dq_accumulator.get<float>();
  if (!args.beside) args.workspace = buffers_.workspace.get();
  if (operands_) operands_->Prepare(args);
  if (capabilities_.accumulates_gradients) {
    kernels_.attention->Backward(shape(), args, stream);
    return;
  }
  ClearPadding();
  const auto whole = [](const GradientPass& pass) { return pass.first && pass.last; };
  const TensorDtypes& dtypes = shape().dtypes;
  BackwardArgs call = args;
  call.query = {args.query.wanted, true, true};
  call.key = {args.key.wanted, true, true};
  call.dq_accumulator = call.dk_accumulator = call.dv_accumulator = nullptr;
  if (!whole(args.query)) call.dq = {buffers_.dq_part.get(), dtypes.dq};
  if (!whole(args.key)) {
    call.dk = {buffers_.dk_part.get(), dtypes.dk};
    call.dv = {buffers_.dv_part.get(), dtypes.dv};
  }
  kernels_.attention->Backward(shape(), call, rt_->stream);
  const std::int64_t queries = use_.queries.rows * shape().heads,
                     keys = use_.gradient_rows * shape().kv_heads;
  if (args.query.wanted && !whole(args.query))
    AddPart(buffers_.dq_part, queries * shape().dim_qk, args.query, args.dq_accumulator,
            {args.dq.data, dtypes.dq});
  if (args.key.wanted && !whole(args.key)) {
    AddPart(buffers_.dk_part, keys * shape().dim_qk, args.key, args.dk_accumulator,
            {args.dk.data, dtypes.dk});
    AddPart(buffers_.dv_part, keys * shape().dim_v, args.key, args.dv_accumulator, {args.dv.data, dtypes.dv});
  }
}

std::vector<QuantizedOperand> BlockAttention::quantized() const {
  return operands_ ? operands_->quantized() : std::vector<QuantizedOperand>{};
}

void BlockAttention::BackwardBias(BackwardArgs args, const BiasGradient& gradient) {
  args.workspace = buffers_.workspace.get();
  if (operands_) operands_->Use(args);
  kernels_.attention->BackwardBias(shape(), args, gradient, rt_->stream);
}

}  // namespace cppool::kernels
