#include "kernels/attention/schedules/all_gather.h"

#include <algorithm>
#include <vector>

namespace cppool::kernels {

AllGatherSchedule::AllGatherSchedule(cppool_runtime* runtime, AttentionKernels& kernels,
                                     const AttentionSpec& spec, Group world)
    : rt_(runtime),
      kernels_(kernels),
      spec_(spec),
      world_(world),
      shape_{spec.dtype,
             spec.dim_qk,
             spec.dim_v,
             spec.heads,
             spec.kv_heads,
             0,
             0,
             spec.heads / spec.kv_heads,
             static_cast<float>(spec.scale)},
      rows_q_(spec.queries.rows / world.size),
      rows_kv_(spec.keys.rows / world.size),
      comm_(runtime),
      whole_(runtime, kernels, spec, shape_, rows_q_, world, comm_.get()),
      main_ready_(runtime),
      gathered_(runtime),
      gradients_ready_(runtime),
      reduced_(runtime) {
  kernels_.Load(shape_, spec.training);

  std::vector<Layout> parts;
  for (int rank = 0; rank < world.size; ++rank) {
    parts.push_back(RankLayout(spec.format, spec.keys, world.size, rank));
  }
  const Layout queries = RankLayout(spec.format, spec.queries, world.size, world.rank);
  const Layout gathered = Concatenate(parts);
  Layout others = gathered;
  std::erase_if(others.segments, [&](const Segment& s) { return s.row / rows_kv_ == world.rank; });
  const std::vector<Band> bands = BandsOf(spec);
  const auto plan = [&](const Layout& keys) {
    return kernels_.Plan(shape_, queries, keys, bands, spec.training, rt_->stream);
  };
  own_ = plan(parts[world.rank]);
  others_ = plan(others);
  if (spec.training) all_ = plan(gathered);

  const auto buffer = [&](std::size_t bytes) { return Buffer(rt_, bytes, rt_->stream); };
  const std::size_t k_elements = static_cast<std::size_t>(rows_kv_) * spec.kv_heads * spec.dim_qk;
  const std::size_t v_elements = static_cast<std::size_t>(rows_kv_) * spec.kv_heads * spec.dim_v;
  const std::size_t element = SizeOf(spec.dtype);
  k_ = buffer(k_elements * world.size * element);
  v_ = buffer(v_elements * world.size * element);
  accumulator_ = buffer(sizeof(float) * QueryElements(spec.dim_v));
  if (spec.training) {
    delta_ = buffer(sizeof(float) * QueryElements(1));
    dq_accumulator_ = buffer(sizeof(float) * QueryElements(spec.dim_qk));
    dk_ = buffer(sizeof(float) * k_elements * world.size);
    dv_ = buffer(sizeof(float) * v_elements * world.size);
    dk_sum_ = buffer(sizeof(float) * k_elements);
    dv_sum_ = buffer(sizeof(float) * v_elements);
  }
}

void AllGatherSchedule::StartGather(const char* name, const AttentionTensors& t) {
  main_ready_.Record(rt_->stream);
  main_ready_.Wait(comm_.get());
  const Stage stage(rt_, comm_.get(), name);
  Check(rt_, rt_->all_gather(rt_, t.k, k_.get(), k_.bytes() / world_.size, world_.comm, comm_.get()));
  Check(rt_, rt_->all_gather(rt_, t.v, v_.get(), v_.bytes() / world_.size, world_.comm, comm_.get()));
  gathered_.Record(comm_.get());
}

void AllGatherSchedule::Forward(const AttentionTensors& t) {
  Check(rt_, rt_->mark(rt_, rt_->stream, "forward/all_gather own keys"));
  StartGather("forward/all_gather: keys and values", t);
  ForwardArgs args;
  whole_.BeginForward(t, args);
  if (spec_.queries.padded()) {
    Zero(t.out, QueryElements(spec_.dim_v) * SizeOf(spec_.dtype));
    Zero(t.lse, QueryElements(1) * sizeof(float));
  }
  args.q = t.q;
  args.out = t.out;
  args.lse = t.lse;
  args.accumulator = accumulator_.get<float>();
  args.plan = own_.get();
  args.k = t.k;
  args.v = t.v;
  args.first = true;
  args.last = false;
  kernels_.Forward(shape_, args, rt_->stream);

  Check(rt_, rt_->mark(rt_, rt_->stream, "forward/all_gather others' keys"));
  gathered_.Wait(rt_->stream);
  args.plan = others_.get();
  args.k = k_.get();
  args.v = v_.get();
  args.first = false;
  args.last = true;
  args.softmax_offset = whole_.offset(t);
  kernels_.Forward(shape_, args, rt_->stream);
  whole_.EndForward(t);
  Check(rt_, rt_->mark(rt_, rt_->stream, nullptr));
}

void AllGatherSchedule::Backward(const AttentionTensors& t) {
  // Gathered again rather than kept, as a model with many layers would have to.
  Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather own keys"));
  StartGather("backward/all_gather: keys and values", t);
  kernels_.Delta(shape_, rows_q_, t.out, t.dout, delta_.get<float>(), rt_->stream);
  BackwardArgs args;
  args.q = t.q;
  args.dout = t.dout;
  args.lse = t.lse;
  args.delta = delta_.get<float>();
  whole_.BeginBackward(t, *own_, args);
  if (spec_.queries.padded()) Zero(t.dq, QueryElements(spec_.dim_qk) * SizeOf(spec_.dtype));
  if (spec_.keys.padded()) {
    Zero(dk_.get(), dk_.bytes());
    Zero(dv_.get(), dv_.bytes());
  }
  args.dq = t.dq;
  args.dq_accumulator = dq_accumulator_.get<float>();
  args.plan = own_.get();
  args.k = t.k;
  args.v = t.v;
  args.first = true;
  args.last = false;
  kernels_.BackwardQuery(shape_, args, rt_->stream);

  Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather all keys"));
  gathered_.Wait(rt_->stream);
  args.k = k_.get();
  args.v = v_.get();
  args.plan = all_.get();
  args.dk_accumulator = dk_.get<float>();
  args.dv_accumulator = dv_.get<float>();
  kernels_.BackwardKey(shape_, args, rt_->stream);
  gradients_ready_.Record(rt_->stream);
  whole_.AddBlock(t, args);

  // Keys' gradients, and then dbias, are summed over the ranks under the rest of dq.
  gradients_ready_.Wait(comm_.get());
  {
    const Stage stage(rt_, comm_.get(), "backward/all_gather: gradients of keys and values");
    Check(rt_, rt_->reduce_scatter(rt_, dk_.get(), dk_sum_.get(), dk_sum_.bytes() / sizeof(float),
                                   CPPOOL_FLOAT32, CPPOOL_SUM, world_.comm, comm_.get()));
    Check(rt_, rt_->reduce_scatter(rt_, dv_.get(), dv_sum_.get(), dv_sum_.bytes() / sizeof(float),
                                   CPPOOL_FLOAT32, CPPOOL_SUM, world_.comm, comm_.get()));
    reduced_.Record(comm_.get());
  }
  whole_.StartSums(t);
  Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather others' keys"));
  args.plan = others_.get();
  args.first = false;
  args.last = true;
  kernels_.BackwardQuery(shape_, args, rt_->stream);

  Check(rt_, rt_->mark(rt_, rt_->stream, "backward/all_gather own gradients"));
  reduced_.Wait(rt_->stream);
  kernels_.Round(dk_sum_.get<float>(), spec_.dtype, t.dk, dk_sum_.bytes() / sizeof(float), rt_->stream);
  kernels_.Round(dv_sum_.get<float>(), spec_.dtype, t.dv, dv_sum_.bytes() / sizeof(float), rt_->stream);
  whole_.EndBackward(t);
  Check(rt_, rt_->mark(rt_, rt_->stream, nullptr));
}

}  // namespace cppool::kernels
