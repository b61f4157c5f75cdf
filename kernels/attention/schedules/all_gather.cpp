#include "kernels/attention/schedules/all_gather.h"

#include <algorithm>

#include "kernels/attention/problem/transposed.h"

namespace cppool::kernels {

AllGatherUse::AllGatherUse(const AttentionSpec& spec, const AttentionFamily& family, int ranks, int rank)
    : moved(MovedDtypes(spec)),
      world_size(ranks),
      rows_q(spec.queries.rows / ranks),
      rows_kv(spec.keys.rows / ranks),
      bands(BandsOf(spec)) {
  std::vector<Layout> layouts;
  for (int r = 0; r < ranks; ++r) layouts.push_back(RankLayout(spec.format, spec.keys, ranks, r));
  own = layouts[static_cast<std::size_t>(rank)];
  all = Concatenate(layouts);
  others = all;
  std::erase_if(others.segments, [&](const Segment& s) { return s.row / rows_kv == rank; });

  block.request = RequestOf(spec);
  block.family = &family;
  block.queries = RankLayout(spec.format, spec.queries, ranks, rank);
  block.rows_kv = rows_kv * ranks;
  block.key_slots = std::max({SlotsOf(own), SlotsOf(others), SlotsOf(all)});
  block.several_forward = true;
  block.several_backward = !joint();
  block.keys_in_fp32 = true;
  block.softmax_offset = spec.softmax != SoftmaxType::kVanilla;
  block.offset_gradient = spec.training && spec.softmax == SoftmaxType::kLearnable;
  block.padded_queries = spec.queries.padded();
  block.padded_keys = spec.keys.padded();
  block.query_chunks = MxChunks(spec.queries, spec.mx_world_size);
  block.key_chunks = MxChunks(spec.keys, spec.mx_world_size);
}

void AllGatherBuffers::List(const AllGatherUse& use, MemoryList& list) {
  const KernelShape& shape = use.block.request.shape;
  const std::size_t k_elements = static_cast<std::size_t>(use.rows_kv) * shape.kv_heads * shape.dim_qk;
  const std::size_t v_elements = static_cast<std::size_t>(use.rows_kv) * shape.kv_heads * shape.dim_v;
  list.Add("k of all ranks", k_elements * use.world_size * SizeOf(use.moved.k), k);
  list.Add("v of all ranks", v_elements * use.world_size * SizeOf(use.moved.v), v);
  if (!use.block.request.training) return;
  list.Add("delta", sizeof(float) * static_cast<std::size_t>(use.rows_q) * shape.heads, delta);
  list.Add("dk of all ranks", sizeof(float) * k_elements * use.world_size, dk);
  list.Add("dv of all ranks", sizeof(float) * v_elements * use.world_size, dv);
  list.Add("dk in fp32", sizeof(float) * k_elements, dk_sum);
  list.Add("dv in fp32", sizeof(float) * v_elements, dv_sum);
}

void ListAllGather(const AttentionSpec& spec, const AllGatherUse& use, AllGatherBuffers& gather,
                   BlockBuffers& block, WholeBuffers& whole, MemoryList& list) {
  gather.List(use, list);
  block.List(use.block, list);
  whole.List(spec, use.block.request.shape, use.rows_q, list);
}

void ListAllGatherPlans(const AllGatherUse& use, MemoryList& list) {
  const auto plan = [&](const char* name, const Layout& keys) {
    list.AddTables(name, use.block.PlanBytes(keys));
  };
  plan("plan of own keys", use.own);
  plan("plan of others' keys", use.others);
  if (use.block.request.training) plan("plan of all keys", use.all);
}

AllGatherSchedule::AllGatherSchedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec,
                                     Group world)
    : rt_(runtime),
      kernels_(kernels),
      spec_(spec),
      world_(world),
      use_(spec, kernels.family, world.size, world.rank),
      comm_(runtime),
      attention_(runtime, kernels, use_.block),
      whole_(runtime, *kernels.ops, attention_, spec, use_.rows_q, world, comm_.get()),
      main_ready_(runtime),
      gathered_(runtime),
      gradients_ready_(runtime),
      reduced_(runtime),
      own_(attention_.Plan(use_.own, use_.bands)),
      others_(attention_.Plan(use_.others, use_.bands)) {
  if (spec.training) all_ = attention_.Plan(use_.all, use_.bands);
  MemoryList memory;
  ListAllGather(spec, use_, buffers_, attention_.buffers(), whole_.buffers(), memory);
  memory.Allocate(rt_);
  whole_.Prepare();
}

void AllGatherSchedule::StartGather(const char* name, const AttentionTensors& t) {
  main_ready_.Record(rt_->stream);
  main_ready_.Wait(comm_.get());
  const Stage stage(rt_, comm_.get(), name);
  const auto gather = [&](const TensorRef& from, const Buffer& to) {
    Check(rt_, rt_->all_gather(rt_, from.data, to.get(), to.bytes() / world_.size, world_.comm, comm_.get()));
  };
  gather(t.k, buffers_.k);
  gather(t.v, buffers_.v);
  gathered_.Record(comm_.get());
}

void AllGatherSchedule::Forward(const AttentionTensors& t) {
  Check(rt_, rt_->mark(rt_, rt_->stream, "forward/all_gather own keys"));
  StartGather("forward/all_gather: keys and values", t);
  ForwardArgs args;
  whole_.BeginForward(t, args);
  if (spec_.queries.padded()) {
    Zero(t.out.data, QueryElements(spec_.dim_v) * SizeOf(t.out.dtype));
    Zero(t.lse, QueryElements(1) * sizeof(float));
  }
  args.q = t.q;
  args.out = t.out;
  args.lse = t.lse;
  args.plan = own_.get();
  args.k = t.k;
  args.v = t.v;
  args.first = true;
  args.last = false;
  attention_.Forward(args);

  Check(rt_, rt_->mark(rt_, rt_->stream, "forward/all_gather others' keys"));
  gathered_.Wait(rt_->stream);
  args.plan = others_.get();
  args.k = {buffers_.k.get(), use_.moved.k, t.k.scale};  // the scales of all ranks are the same
  args.v = {buffers_.v.get(), use_.moved.v, t.v.scale};
  args.first = false;
  args.last = true;
  attention_.Forward(args);
  whole_.EndForward(t);
  Check(rt_, rt_->mark(rt_, rt_->stream, nullptr));
}

void AllGatherSchedule::UseOwn(const AttentionTensors& t, BackwardArgs& args) const {
  args.plan = own_.get();
  args.k = t.k;
  args.v = t.v;
}

void AllGatherSchedule::UseGathered(const AttentionTensors& t, BackwardArgs& args) const {
  args.plan = all_.get();
  args.k = {buffers_.k.get(), use_.moved.k, t.k.scale};  // the scales of all ranks are the same
  args.v = {buffers_.v.get(), use_.moved.v, t.v.scale};
}

void AllGatherSchedule::StartSums(const AttentionTensors& t) {
  gradients_ready_.Wait(comm_.get());
  {
    const Stage stage(rt_, comm_.get(), "backward/all_gather: gradients of keys and values");
    const auto sum = [&](const Buffer& from, const Buffer& to) {
      Check(rt_, rt_->reduce_scatter(rt_, from.get(), to.get(), to.bytes() / sizeof(float), CPPOOL_FLOAT32,
                                     CPPOOL_SUM, world_.comm, comm_.get()));
    };
    sum(buffers_.dk, buffers_.dk_sum);
    sum(buffers_.dv, buffers_.dv_sum);
    reduced_.Record(comm_.get());
  }
  whole_.StartSums(t);
}

void AllGatherSchedule::Backward(const AttentionTensors& t) {
  // Gathered again rather than kept, as a model with many layers would have to.
  Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather own keys"));
  StartGather("backward/all_gather: keys and values", t);
  if (!t.delta) {
    kernels_.ops->Delta(use_.rows_q * spec_.heads, spec_.dim_v, t.out, t.dout, buffers_.delta.get<float>(),
                        rt_->stream);
  }
  BackwardArgs args;
  args.q = t.q;
  args.dout = t.dout;
  args.out = t.out;
  args.lse = t.lse;
  args.delta = t.delta ? t.delta : buffers_.delta.get<float>();
  args.casts.ds_scale = t.ds_scale;
  args.casts.amax_ds = t.amax_ds;
  whole_.BeginBackward(t, args);
  if (spec_.queries.padded()) Zero(t.dq.data, QueryElements(spec_.dim_qk) * SizeOf(t.dq.dtype));
  if (spec_.keys.padded()) {
    Zero(buffers_.dk.get(), buffers_.dk.bytes());
    Zero(buffers_.dv.get(), buffers_.dv.bytes());
  }
  args.dq = t.dq;
  args.dk = {nullptr, shape().dtypes.dk};
  args.dv = {nullptr, shape().dtypes.dv};
  args.dk_accumulator = buffers_.dk.get<float>();
  args.dv_accumulator = buffers_.dv.get<float>();
  const bool joint = use_.joint();
  if (!joint) {  // dq of the own keys while the others' are on their way
    UseOwn(t, args);
    args.query = {true, true, false};
    args.key.wanted = false;
    attention_.Backward(args);
  }

  Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather all keys"));
  gathered_.Wait(rt_->stream);
  UseGathered(t, args);
  args.query = {joint, true, true};
  args.key = {true, true, false};
  attention_.Backward(args);
  gradients_ready_.Record(rt_->stream);
  whole_.AddBlock(t, args);
  StartSums(t);  // under the rest of dq
  if (!joint) {
    Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather others' keys"));
    args.plan = others_.get();
    args.query = {true, false, true};
    args.key.wanted = false;
    attention_.Backward(args);
  }

  Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather own gradients"));
  reduced_.Wait(rt_->stream);
  const auto round = [&](const Buffer& sum, const TensorOut& result) {
    kernels_.ops->Round(sum.get<float>(), result, static_cast<std::int64_t>(sum.bytes() / sizeof(float)),
                        rt_->stream);
  };
  round(buffers_.dk_sum, t.dk);
  round(buffers_.dv_sum, t.dv);
  whole_.EndBackward(t);
  Check(rt_, rt_->mark(rt_, rt_->stream, nullptr));
}

}  // namespace cppool::kernels
