#include "kernels/attention/families/table/family.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/attention/families/table/block_calls.h"
#include "kernels/attention/families/table/prepared_call.h"
#include "kernels/attention/families/table/scratch.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/attention/tensor_ops/row_tiles.h"
#include "kernels/runtime.h"

namespace cppool::kernels::table {
namespace {

constexpr float kLn2 = 0.693147180559945309f;

[[noreturn]] void Misused(const std::string& detail) {
  throw RuntimeError(CPPOOL_INTERNAL, "attention kernel 'table': " + detail);
}

// A call as it is, and with strides of its own where a trial may want that and the kernel takes it.
struct Prepared {
  std::shared_ptr<PreparedCall> call, strided;
};

class TablePlan : public BlockPlan {
 public:
  std::int64_t pairs() const override { return pairs_; }

  TablePlan(BlockCalls calls, std::int64_t pairs, const Layout& query, const Layout& key)
      : block(std::move(calls)),
        rows_q(query.rows),
        rows_kv(key.rows),
        q_step(query.row_step),
        pairs_(pairs) {}

  BlockCalls block;
  std::vector<Prepared> forward, backward;  // by form
  std::int64_t rows_q, rows_kv;
  std::int32_t q_step;
  std::unique_ptr<TokenRows> tokens;  // of the queries

 private:
  std::int64_t pairs_;
};

// The tensors of a call as a trial sees them.
std::vector<TrialTensor> TrialTensors(const CallForm& form, const CallData& data) {
  static constexpr const char* kNames[kCallTensors] = {"q",    "k",     "v",  "out", "lse",
                                                       "dout", "delta", "dq", "dk",  "dv"};
  std::vector<TrialTensor> tensors;
  for (std::size_t i = 0; i < kCallTensors; ++i) {
    const TensorForm& from = form.tensors[i];
    if (from.ndim == 0) continue;
    TrialTensor to;
    to.name = kNames[i];
    to.written = form.backward ? i >= kDq : i == kOut || i == kLse;
    to.data = data[i];
    to.batch = from.shape[0];
    const auto size = static_cast<std::int64_t>(SizeOf(from.dtype));
    const bool packed = from.ndim == 3 && from.strides[1] != 1;  // a row for each head
    const std::size_t rows = from.ndim == 4 || packed ? 1 : 2;
    to.rows = from.shape[rows];
    to.row_stride = from.strides[rows] * size;
    to.row_bytes = size * (from.ndim == 4 ? from.shape[2] * from.shape[3] : from.shape[packed ? 2 : 1]);
    to.batch_stride = from.strides[0] * size;
    tensors.push_back(to);
  }
  return tensors;
}

// Where element (row, head, 0) of [rows, heads, dim] is.
void* At(const void* data, Dtype dtype, std::int64_t row, int heads, int head, int dim) {
  if (!data) return nullptr;
  return const_cast<std::byte*>(static_cast<const std::byte*>(data)) +
         static_cast<std::size_t>((row * heads + head) * dim) * SizeOf(dtype);
}

class TableKernel : public AttentionKernel {
 public:
  TableKernel(cppool_runtime* rt, const TableFamily& family)
      : rt_(rt), family_(family), kernel_(family.kernel()), asker_(kernel_), ops_(MakeTensorOps(rt)) {}

  // Plans of the kernel on CUDA go after the work that uses them.
  ~TableKernel() override {
    if (rt_->device < 0 || std::uncaught_exceptions() > 0) return;
    rt_->stream_synchronize(rt_, rt_->stream);
  }

  bool takes_trials() const override { return true; }
  void AllowTrials() override { trials_ = true; }
  void SetTrial(CallTrial* trial) override { trial_ = trial; }

  void Load(const KernelRequest& request) override {
    if (const auto refusal = family_.Refusal(request)) throw RuntimeError(CPPOOL_UNSUPPORTED, *refusal);
    ops_->Load();
  }

  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream stream) override {
    Load(request);
    BlockCut cut = CutBlock(asker_, request, query, key, bands);
    if (cut.refusal) throw RuntimeError(CPPOOL_UNSUPPORTED, *cut.refusal);
    auto plan = std::make_unique<TablePlan>(std::move(cut.calls), CountPairs(query, key, bands), query, key);
    plan->forward = Prepare(plan->block.forward);
    plan->backward = Prepare(plan->block.backward);
    plan->tokens = ops_->Rows(query, stream);
    return plan;
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override;
  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override;
  void BackwardBias(const KernelShape&, const BackwardArgs&, const BiasGradient&, cppool_stream) override {
    Misused("a bias gradient");
  }

 private:
  bool Has(std::uint32_t feature) const { return (kernel_.features & feature) != 0; }
  // Whether the kernel's lse differs from ours in its base or its order.
  bool ConvertsLse() const {
    return Has(CPPOOL_ATTENTION_LSE_BASE2) || Has(CPPOOL_ATTENTION_LSE_HEADS_FIRST);
  }

  std::vector<Prepared> Prepare(const PassCalls& pass) {
    std::vector<Prepared> calls;
    for (const CallForm& form : pass.forms) {
      const auto known = std::find_if(prepared_.begin(), prepared_.end(),
                                      [&](const Prepared& each) { return each.call->form() == form; });
      if (known == prepared_.end()) {
        Prepared made{std::make_shared<PreparedCall>(rt_, kernel_, form), nullptr};
        const CallForm strided = Strided(form);
        if (trials_ && !asker_.Refusal(strided))
          made.strided = std::make_shared<PreparedCall>(rt_, kernel_, strided);
        const std::size_t bytes = made.call->workspace_bytes();
        if (bytes > workspace_.bytes()) GrowWorkspace(bytes);
        prepared_.push_back(made);
        calls.push_back(made);
      } else {
        calls.push_back(*known);
      }
    }
    return calls;
  }

  void Run(const Prepared& prepared, const CallData& data, cppool_stream stream) {
    if (!trial_) {
      prepared.call->Run(data, workspace_.get(), stream);
      return;
    }
    TrialCall call;
    call.kernel = kernel_.name;
    call.tensors = TrialTensors(prepared.call->form(), data);
    call.workspace_bytes = prepared.call->workspace_bytes();
    const auto run = [stream](const PreparedCall& of) -> TrialCall::Run {
      return [&of, stream](const std::vector<void*>& places, void* workspace) {
        CallData moved{};
        for (std::size_t i = 0, next = 0; i < kCallTensors; ++i) {
          if (of.form().tensors[i].ndim > 0) moved[i] = places[next++];
        }
        of.Run(moved, workspace, stream);
      };
    };
    call.run = run(*prepared.call);
    if (prepared.strided) {
      call.strided_tensors = TrialTensors(prepared.strided->form(), {});
      call.workspace_bytes = std::max(call.workspace_bytes, prepared.strided->workspace_bytes());
      call.run_strided = run(*prepared.strided);
    }
    trial_->Run(call, stream);
  }

  // One for all plans, whose calls are on one stream.
  void GrowWorkspace(std::size_t bytes) {
    try {
      workspace_ = Buffer(rt_, bytes, rt_->stream);
    } catch (const RuntimeError& error) {
      throw RuntimeError(error.status(), "kernel " + std::string(kernel_.name) + " asks for " +
                                             std::to_string(bytes) + " bytes of workspace: " + error.what());
    }
  }

  // Between the kernel's lse, or delta, of a call and rows of the block's.
  void CopyLse(const CallForm& form, CallTensor which, void* of_call, float* of_block, const TablePlan& plan,
               const KernelShape& shape, const BlockCall& call, bool to_call, float factor,
               cppool_stream stream) {
    StridedCopy copy;
    const auto& theirs = form.tensors[which].strides;
    const std::int64_t q_rows = call.where.batch > 1 ? call.where.q_stride : call.where.queries * plan.q_step;
    const std::int64_t ours[3] = {q_rows * shape.heads, 1, std::int64_t{plan.q_step} * shape.heads};
    for (std::size_t i = 0; i < 3; ++i) {
      copy.extent[i] = form.tensors[which].shape[i];
      copy.from_strides[i] = to_call ? ours[i] : theirs[i];
      copy.to_strides[i] = to_call ? theirs[i] : ours[i];
    }
    copy.from = to_call ? of_block : static_cast<float*>(of_call);
    copy.to = to_call ? static_cast<float*>(of_call) : of_block;
    copy.factor = factor;
    ops_->CopyStrided(copy, stream);
  }

  // Where a call's lse or delta is when the kernel has it in its own order or base: at the beginning of `scratch`, packed,
  // or where the rows of the block are.
  void* OwnLse(const BlockCall& call, const KernelShape& shape, float* scratch) const {
    return Has(CPPOOL_ATTENTION_LSE_HEADS_FIRST)
               ? scratch
               : At(scratch, Dtype::kFp32, call.where.q_row, shape.heads, call.group.head, 1);
  }

  void RunForward(const TablePlan& plan, const BlockCall& call, bool fp32, const KernelShape& shape,
                  const ForwardArgs& args, TensorOut out, float* lse, const Scratch& scratch,
                  cppool_stream stream);
  void RunBackward(const TablePlan& plan, const BlockCall& call, bool fp32, const KernelShape& shape,
                   const BackwardArgs& args, const TensorOut& dq, const TensorOut& dk, const TensorOut& dv,
                   const Scratch& scratch, cppool_stream stream);

  void Zero(void* data, std::int64_t elements, Dtype dtype, cppool_stream stream) {
    Check(rt_, rt_->fill(rt_, data, 0, static_cast<std::size_t>(elements) * SizeOf(dtype), stream));
  }

  cppool_runtime* rt_;
  const TableFamily& family_;
  const cppool_attention_kernel& kernel_;
  CallAsker asker_;
  std::unique_ptr<TensorOps> ops_;
  std::vector<Prepared> prepared_;
  Buffer workspace_;
  bool trials_ = false;
  CallTrial* trial_ = nullptr;
};

void TableKernel::RunForward(const TablePlan& plan, const BlockCall& call, bool fp32,
                             const KernelShape& shape, const ForwardArgs& args, TensorOut out, float* lse,
                             const Scratch& scratch, cppool_stream stream) {
  const Prepared& prepared = plan.forward[fp32 ? call.fp32_form : call.form];
  const Rectangle& r = call.where;
  const HeadGroup& g = call.group;
  CallData data{};
  data[kQ] = At(args.q.data, args.q.dtype, r.q_row, shape.heads, g.head, shape.dim_qk);
  data[kK] = At(args.k.data, args.k.dtype, r.k_row, shape.kv_heads, g.kv_head, shape.dim_qk);
  data[kV] = At(args.v.data, args.v.dtype, r.k_row, shape.kv_heads, g.kv_head, shape.dim_v);
  data[kOut] = At(out.data, out.dtype, r.q_row, shape.heads, g.head, shape.dim_v);
  auto* const lse_rows = static_cast<float*>(At(lse, Dtype::kFp32, r.q_row, shape.heads, g.head, 1));
  data[kLse] = ConvertsLse() ? OwnLse(call, shape, scratch.packed_lse) : lse_rows;
  Run(prepared, data, stream);
  if (ConvertsLse()) {
    CopyLse(prepared.call->form(), kLse, data[kLse], lse_rows, plan, shape, call, false,
            Has(CPPOOL_ATTENTION_LSE_BASE2) ? kLn2 : 1.0f, stream);
  }
}

void TableKernel::Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) {
  const auto& plan = static_cast<const TablePlan&>(*args.plan);
  const PassCalls& pass = plan.block.forward;
  if (pass.layers.empty() && !args.first && !args.last) return;
  KernelRequest request;
  request.shape = shape;
  request.training = false;
  const Scratch scratch(request, plan.rows_q, plan.rows_kv, args.workspace);
  if (args.first && args.last && !args.softmax_offset && pass.layers.size() == 1 &&
      pass.layers[0].every_query) {
    for (const BlockCall& call : pass.layers[0].calls)
      RunForward(plan, call, false, shape, args, args.out, args.lse, scratch, stream);
    return;
  }
  const TensorOut part{scratch.out, pass.fp32 ? Dtype::kFp32 : shape.dtypes.out};
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
    if (!layer || !layer->every_query)
      ops_->Fill(scratch.lse, -std::numeric_limits<float>::infinity(), plan.rows_q * shape.heads, stream);
    if (layer) {
      for (const BlockCall& call : layer->calls)
        RunForward(plan, call, pass.fp32, shape, args, part, scratch.lse, scratch, stream);
    }
    merge.first = args.first && i == 0;
    merge.last = args.last && i + 1 == layers;
    merge.softmax_offset = merge.last ? args.softmax_offset : nullptr;
    ops_->Merge(merge, stream);
  }
}

void TableKernel::RunBackward(const TablePlan& plan, const BlockCall& call, bool fp32,
                              const KernelShape& shape, const BackwardArgs& args, const TensorOut& dq,
                              const TensorOut& dk, const TensorOut& dv, const Scratch& scratch,
                              cppool_stream stream) {
  const Prepared& prepared = plan.backward[fp32 ? call.fp32_form : call.form];
  const Rectangle& r = call.where;
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
  if (ConvertsLse()) {
    void* const own = OwnLse(call, shape, scratch.packed_lse);
    CopyLse(prepared.call->form(), kLse, own, static_cast<float*>(data[kLse]), plan, shape, call, true,
            Has(CPPOOL_ATTENTION_LSE_BASE2) ? 1 / kLn2 : 1.0f, stream);
    data[kLse] = own;
  }
  if (Has(CPPOOL_ATTENTION_LSE_HEADS_FIRST)) {
    CopyLse(prepared.call->form(), kDelta, scratch.packed_delta, static_cast<float*>(data[kDelta]), plan,
            shape, call, true, 1.0f, stream);
    data[kDelta] = scratch.packed_delta;
  }
  Run(prepared, data, stream);
}

void TableKernel::Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) {
  const auto& plan = static_cast<const TablePlan&>(*args.plan);
  const PassCalls& pass = plan.block.backward;
  if (!args.query.wanted || !args.key.wanted) Misused("a backward pass of one side alone");
  KernelRequest request;
  request.shape = shape;
  const Scratch scratch(request, plan.rows_q, plan.rows_kv, args.workspace);
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
  // A kernel that writes fp32 does so for all three, unless none of them is a part.
  const bool fp32 = pass.fp32 && !(whole(args.query) && whole(args.key));
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
        RunBackward(plan, call, fp32, shape, args, gradients[0].part, gradients[1].part, gradients[2].part,
                    scratch, stream);
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
      if (g.how.last && i + 1 == layers) ops_->Round(sum, g.result, g.elements, stream);
    }
  }
}

class Asker : public BlockAsker {
 public:
  explicit Asker(const cppool_attention_kernel& kernel) : asker_(kernel) {}
  std::optional<std::string> Refusal(const KernelRequest& request, const Layout& query, const Layout& key,
                                     const std::vector<Band>& bands) override {
    return CutBlock(asker_, request, query, key, bands).refusal;
  }

 private:
  CallAsker asker_;
};

}  // namespace

std::optional<std::string> TableFamily::Refusal(const KernelRequest& request) const {
  const std::string name = kernel_.name;
  if (request.training && !kernel_.backward)
    return name + ": it has no backward pass, and is_training is true";
  if (request.deterministic && !(kernel_.features & CPPOOL_ATTENTION_DETERMINISTIC))
    return name + ": it does not claim to be deterministic";
  // What the table has no place for yet.
  if (request.bias != BiasType::kNone) return name + ": cppool/attention.h has no bias yet";
  if (request.max_logit) return name + ": cppool/attention.h has no max_logit yet";
  if (request.fp8) return name + ": cppool/attention.h has no fp8 yet";
  return std::nullopt;
}

std::unique_ptr<BlockAsker> TableFamily::AskBlocks() const { return std::make_unique<Asker>(kernel_); }

std::size_t TableFamily::WorkspaceBytes(const KernelRequest& request, std::int64_t rows_q,
                                        std::int64_t rows_kv) const {
  return Scratch(request, rows_q, rows_kv, nullptr).bytes();
}

std::size_t TableFamily::PlanBytes(const KernelRequest&, const Layout& query, const Layout&) const {
  return RowTilesBytes(query);
}

std::unique_ptr<AttentionKernel> TableFamily::Open(cppool_runtime* runtime) const {
  return std::make_unique<TableKernel>(runtime, *this);
}

}  // namespace cppool::kernels::table
