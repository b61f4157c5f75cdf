#include "kernels/attention/schedules/head_ring.h"

#include <utility>

namespace cppool::kernels {

HeadRingSchedule::HeadRingSchedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec,
                                   HeadRingGroups groups, std::string stage_prefix)
    : HeadRingSchedule(runtime, kernels, spec, groups, RingSteps(spec, groups.heads.size, groups.ring.size),
                       std::move(stage_prefix)) {}

HeadRingSchedule::HeadRingSchedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec,
                                   HeadRingGroups groups, const RingSteps& ring, std::string stage_prefix)
    : rt_(runtime),
      kernels_(kernels),
      spec_(spec),
      groups_(groups),
      prefix_(std::move(stage_prefix)),
      use_(spec, kernels.family, ring, groups.heads.rank, groups.ring.rank),
      comm_(runtime),
      attention_(runtime, kernels, use_.block),
      exchange_(runtime, *kernels.ops, groups.heads, comm_.get()),
      whole_(runtime, *kernels.ops, attention_, spec, use_.block_q, groups.world, comm_.get()),
      main_done_(runtime),
      comm_done_(runtime),
      slot_read_{Event(runtime), Event(runtime)} {
  for (const RingSteps::Step& all : ring.steps) {
    Step step{all.distance, ring.Serves(all, groups.ring.rank), nullptr, Event(rt_), Event(rt_)};
    if (all.attends[groups.ring.rank]) step.plan = attention_.Plan(ring.keys[Before(step)], ring.bands);
    steps_.push_back(std::move(step));
  }
  MemoryList memory;
  ListHeadRing(spec, use_, buffers_, attention_.buffers(), whole_.buffers(), memory);
  memory.Allocate(rt_);
  whole_.Prepare();
}

int HeadRingSchedule::Before(const Step& step) const {
  return (groups_.ring.rank + groups_.ring.size - step.distance) % groups_.ring.size;
}
int HeadRingSchedule::After(const Step& step) const {
  return (groups_.ring.rank + step.distance) % groups_.ring.size;
}

std::string HeadRingSchedule::StageName(const char* pass, const std::string& what) const {
  const char* schedule = groups_.heads.size > 1  ? groups_.ring.size > 1 ? "a2a+p2p " : "a2a "
                         : groups_.ring.size > 1 ? "p2p "
                                                 : "";
  return prefix_ + pass + "/" + schedule + what;
}

std::string HeadRingSchedule::StepName(const Step& step) const {
  return "step " + std::to_string(step.distance + 1) + " of " + std::to_string(groups_.ring.size);
}

void HeadRingSchedule::CommAfterMain() {
  main_done_.Record(rt_->stream);
  main_done_.Wait(comm_.get());
}
void HeadRingSchedule::MainAfterComm() {
  comm_done_.Record(comm_.get());
  comm_done_.Wait(rt_->stream);
}

HeadRingSchedule::Block HeadRingSchedule::BlockOf(std::size_t index, Block own) const {
  if (index == 0) return own;
  const std::size_t slot = (index - 1) % 2;
  return {{buffers_.k_slot[slot].get(), own.k.dtype, SlotScale(slot, 0)},
          {buffers_.v_slot[slot].get(), own.v.dtype, SlotScale(slot, 1)}};
}

float* HeadRingSchedule::SlotScale(std::size_t slot, std::size_t of_v) const {
  return buffers_.slot_scales ? buffers_.slot_scales.get<float>() + 2 * slot + of_v : nullptr;
}

void HeadRingSchedule::FetchNext(const char* pass, std::size_t index, Block own) {
  const std::size_t next = index + 1;
  if (next == steps_.size()) return;
  Step& step = steps_[next];
  if (!step.attends() && !step.serves) return;
  const std::size_t slot = (next - 1) % 2;
  if (step.attends()) slot_read_[slot].Wait(comm_.get());
  const int to = After(step), from = Before(step);
  const std::size_t k_bytes = use_.KeyElements(spec_.dim_qk) * SizeOf(own.k.dtype);
  const std::size_t v_bytes = use_.KeyElements(spec_.dim_v) * SizeOf(own.v.dtype);
  const Stage stage(rt_, comm_.get(), StageName(pass, StepName(step) + ": keys and values"));
  GroupedCalls calls(rt_);
  if (step.serves) {
    Check(rt_, rt_->send(rt_, own.k.data, k_bytes, to, groups_.ring.comm, comm_.get()));
    Check(rt_, rt_->send(rt_, own.v.data, v_bytes, to, groups_.ring.comm, comm_.get()));
    for (const float* scale : {own.k.scale, own.v.scale}) {
      if (scale) Check(rt_, rt_->send(rt_, scale, sizeof(float), to, groups_.ring.comm, comm_.get()));
    }
  }
  if (step.attends()) {
    Check(rt_, rt_->recv(rt_, buffers_.k_slot[slot].get(), k_bytes, from, groups_.ring.comm, comm_.get()));
    Check(rt_, rt_->recv(rt_, buffers_.v_slot[slot].get(), v_bytes, from, groups_.ring.comm, comm_.get()));
    for (const std::size_t of_v : {0, 1}) {
      if (float* scale = SlotScale(slot, of_v))
        Check(rt_, rt_->recv(rt_, scale, sizeof(float), from, groups_.ring.comm, comm_.get()));
    }
  }
  calls.End();
  step.arrived.Record(comm_.get());
}

void HeadRingSchedule::ReturnGradients(std::size_t index) {
  Step& step = steps_[index];
  if (!step.attends() && !step.serves) return;
  CommAfterMain();  // the part is complete, and what was taken at the step before is added
  const int to = Before(step), from = After(step);
  const Stage stage(rt_, comm_.get(),
                    StageName("backward", StepName(step) + ": gradients of keys and values"));
  const std::size_t slot = (index - 1) % 2;
  GroupedCalls calls(rt_);
  if (step.attends()) {
    for (const Buffer* part : {&buffers_.dk_part[slot], &buffers_.dv_part[slot]}) {
      Check(rt_, rt_->send(rt_, part->get(), part->bytes(), to, groups_.ring.comm, comm_.get()));
    }
  }
  if (step.serves) {
    for (const Buffer* taken : {&buffers_.dk_taken, &buffers_.dv_taken}) {
      Check(rt_, rt_->recv(rt_, taken->get(), taken->bytes(), from, groups_.ring.comm, comm_.get()));
    }
  }
  calls.End();
  step.returned.Record(comm_.get());
}

void HeadRingSchedule::CollectGradients(std::size_t index) {
  const Step& step = steps_[index];
  if (index == 0 || (!step.attends() && !step.serves)) return;
  step.returned.Wait(rt_->stream);  // also frees the part for the step after the next
  if (!step.serves) return;
  const auto add = [&](const Buffer& taken, const Buffer& sum, int dim) {
    kernels_.ops->Accumulate({taken.get(), Dtype::kFp32}, sum.get<float>(),
                             static_cast<std::int64_t>(use_.KeyElements(dim)), false, rt_->stream);
  };
  add(buffers_.dk_taken, buffers_.dk_sum, spec_.dim_qk);
  add(buffers_.dv_taken, buffers_.dv_sum, spec_.dim_v);
}

void HeadRingSchedule::Forward(const AttentionTensors& t) {
  ForwardArgs args;
  Block own{t.k, t.v};
  args.q = t.q;
  args.out = t.out;
  args.lse = t.lse;
  const TensorDtypes& dtypes = use_.moved;
  if (exchanges()) {
    Mark("forward", "tokens to heads");
    void* const scratch = buffers_.scratch.get();
    exchange_.ToHeads(use_.rows_q, spec_.heads, spec_.dim_qk, use_.heads.query, t.q, scratch,
                      buffers_.q.get());
    exchange_.ToHeads(use_.rows_kv, spec_.kv_heads, spec_.dim_qk, use_.heads.key, t.k, scratch,
                      buffers_.k.get());
    exchange_.ToHeads(use_.rows_kv, spec_.kv_heads, spec_.dim_v, use_.heads.key, t.v, scratch,
                      buffers_.v.get());
    own = {{buffers_.k.get(), dtypes.k, t.k.scale}, {buffers_.v.get(), dtypes.v, t.v.scale}};
    args.q = {buffers_.q.get(), dtypes.q, t.q.scale};
    args.out = {buffers_.out.get(), dtypes.out};
    args.lse = buffers_.lse.get<float>();
  }
  CommAfterMain();
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    if (step.attends()) Mark("forward", StepName(step));
    FetchNext("forward", i, own);
    if (!step.attends()) continue;
    if (i == 0) {
      whole_.BeginForward(t, args);
      if (spec_.queries.padded()) {
        Zero(args.out.data, use_.QueryElements(spec_.dim_v) * SizeOf(args.out.dtype));
        Zero(args.lse, use_.QueryElements(1) * sizeof(float));
      }
    } else {
      step.arrived.Wait(rt_->stream);
    }
    const Block block = BlockOf(i, own);
    args.plan = step.plan.get();
    args.k = block.k;
    args.v = block.v;
    args.first = i == 0;
    args.last = i == use_.last_attended;
    attention_.Forward(args);
    if (i > 0) slot_read_[(i - 1) % 2].Record(rt_->stream);
  }
  whole_.EndForward(t);
  if (exchanges()) {
    Mark("forward", "heads to tokens");
    exchange_.ToTokens(use_.rows_q, spec_.heads, spec_.dim_v, use_.heads.query, args.out,
                       buffers_.scratch.get(), t.out);
    exchange_.ToTokens(use_.rows_q, spec_.heads, 1, use_.heads.query, {args.lse, Dtype::kFp32},
                       buffers_.scratch.get(), {t.lse, Dtype::kFp32});
  }
  MainAfterComm();
  EndMarks();
}

void HeadRingSchedule::Backward(const AttentionTensors& t) {
  BackwardArgs args;
  Block own{t.k, t.v};
  TensorRef out = t.out;
  args.q = t.q;
  args.dout = t.dout;
  args.lse = t.lse;
  args.dq = t.dq;
  args.dk = t.dk;
  args.dv = t.dv;
  const TensorDtypes& dtypes = use_.moved;
  if (exchanges()) {  // q, k, v, out and lse are kept from the forward pass
    Mark("backward", "tokens to heads");
    exchange_.ToHeads(use_.rows_q, spec_.heads, spec_.dim_v, use_.heads.query, t.dout, buffers_.scratch.get(),
                      buffers_.dout.get());
    own = {{buffers_.k.get(), dtypes.k, t.k.scale}, {buffers_.v.get(), dtypes.v, t.v.scale}};
    out = {buffers_.out.get(), dtypes.out};
    args.q = {buffers_.q.get(), dtypes.q, t.q.scale};
    args.dout = {buffers_.dout.get(), dtypes.dout, t.dout.scale};
    args.lse = buffers_.lse.get<float>();
    args.dq = {buffers_.dq.get(), dtypes.dq};
    args.dk = {buffers_.dk.get(), dtypes.dk};
    args.dv = {buffers_.dv.get(), dtypes.dv};
  }
  args.out = out;
  args.delta = t.delta;
  args.casts.ds_scale = t.ds_scale;
  args.casts.amax_ds = t.amax_ds;
  if (t.delta && exchanges()) {
    exchange_.ToHeads(use_.rows_q, spec_.heads, 1, use_.heads.query, {t.delta, Dtype::kFp32},
                      buffers_.scratch.get(), buffers_.delta.get());
    args.delta = buffers_.delta.get<float>();
  }
  CommAfterMain();
  if (!t.delta) {
    Mark("backward", "delta");
    kernels_.ops->Delta(use_.block_q * shape().heads, spec_.dim_v, out, args.dout,
                        buffers_.delta.get<float>(), rt_->stream);
    args.delta = buffers_.delta.get<float>();
  }
  whole_.BeginBackward(t, args);
  if (spec_.queries.padded()) Zero(args.dq.data, use_.QueryElements(spec_.dim_qk) * SizeOf(args.dq.dtype));

  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    if (step.attends()) Mark("backward", StepName(step));
    FetchNext("backward", i, own);
    if (step.attends()) {
      if (i > 0) step.arrived.Wait(rt_->stream);
      const Block block = BlockOf(i, own);
      args.plan = step.plan.get();
      args.k = block.k;
      args.v = block.v;
      args.query = {true, i == 0, i == use_.last_attended};
      // Another rank's block is a part of a sum. The own block is all of it where no other rank adds to it.
      args.key = {true, true, i == 0 && !use_.sums_gradients};
      const Buffer& dk = i == 0 ? buffers_.dk_sum : buffers_.dk_part[(i - 1) % 2];
      const Buffer& dv = i == 0 ? buffers_.dv_sum : buffers_.dv_part[(i - 1) % 2];
      args.dk_accumulator = dk.get<float>();
      args.dv_accumulator = dv.get<float>();
      if (spec_.keys.padded()) {
        const auto zero = [&](const TensorOut& result, const Buffer& sum, int dim) {
          Zero(args.key.last ? result.data : sum.get(),
               use_.KeyElements(dim) * (args.key.last ? SizeOf(result.dtype) : sizeof(float)));
        };
        zero(args.dk, dk, spec_.dim_qk);
        zero(args.dv, dv, spec_.dim_v);
      }
      attention_.Backward(args);
      whole_.AddBlock(t, args);
      if (i > 0) slot_read_[(i - 1) % 2].Record(rt_->stream);
    }
    if (i > 0) {
      CollectGradients(i - 1);  // they came under this step's work
      ReturnGradients(i);
    }
  }
  if (use_.serves) {
    Mark("backward", "own gradients");
    CollectGradients(steps_.size() - 1);
    if (!use_.heads.replicated) {
      const auto round = [&](const Buffer& sum, const TensorOut& result, int dim) {
        kernels_.ops->Round(sum.get<float>(), result, static_cast<std::int64_t>(use_.KeyElements(dim)),
                            rt_->stream);
      };
      round(buffers_.dk_sum, args.dk, spec_.dim_qk);
      round(buffers_.dv_sum, args.dv, spec_.dim_v);
    }
  }
  whole_.StartSums(t);
  if (exchanges()) {
    Mark("backward", "heads to tokens");
    void* const scratch = buffers_.scratch.get();
    const auto source = [&](const Buffer& sum, const TensorOut& result) -> TensorRef {
      return use_.heads.replicated ? TensorRef{sum.get(), Dtype::kFp32} : TensorRef(result);
    };
    exchange_.ToTokens(use_.rows_q, spec_.heads, spec_.dim_qk, use_.heads.query, args.dq, scratch, t.dq);
    exchange_.ToTokens(use_.rows_kv, spec_.kv_heads, spec_.dim_qk, use_.heads.key,
                       source(buffers_.dk_sum, args.dk), scratch, t.dk);
    exchange_.ToTokens(use_.rows_kv, spec_.kv_heads, spec_.dim_v, use_.heads.key,
                       source(buffers_.dv_sum, args.dv), scratch, t.dv);
  }
  whole_.EndBackward(t);
  MainAfterComm();
  EndMarks();
}

}  // namespace cppool::kernels
