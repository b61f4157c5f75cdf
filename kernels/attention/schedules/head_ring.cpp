#include "kernels/attention/schedules/head_ring.h"

#include <algorithm>

namespace cppool::kernels {
namespace {

KernelShape ShapeOf(const AttentionSpec& spec, HeadRange query, HeadRange key) {
  return {spec.dtype,
          spec.dim_qk,
          spec.dim_v,
          query.count,
          key.count,
          query.begin,
          key.begin,
          spec.heads / spec.kv_heads,
          static_cast<float>(spec.scale)};
}

}  // namespace

HeadRingSchedule::HeadRingSchedule(cppool_runtime* runtime, AttentionKernels& kernels,
                                   const AttentionSpec& spec, HeadRingGroups groups, std::string stage_prefix)
    : rt_(runtime),
      kernels_(kernels),
      spec_(spec),
      groups_(groups),
      prefix_(std::move(stage_prefix)),
      heads_(DealHeads(spec.heads, spec.kv_heads, groups.heads.size)),
      shape_(ShapeOf(spec, heads_.query[groups.heads.rank], heads_.key[groups.heads.rank])),
      rows_q_(spec.queries.rows / groups.world.size),
      rows_kv_(spec.keys.rows / groups.world.size),
      block_q_(rows_q_ * groups.heads.size),
      block_kv_(rows_kv_ * groups.heads.size),
      comm_(runtime),
      exchange_(runtime, kernels, groups.heads, comm_.get()),
      whole_(runtime, kernels, spec, shape_, block_q_, groups.world, comm_.get()),
      main_done_(runtime),
      comm_done_(runtime),
      slot_read_{Event(runtime), Event(runtime)} {
  kernels_.Load(shape_, spec.training);
  PlanSteps();
  AllocateBuffers();
}

void HeadRingSchedule::PlanSteps() {
  const int parts = groups_.heads.size;
  const int members = groups_.ring.size;
  const int me = groups_.ring.rank;
  // Positions say everything: a block is the tokens of the members of one exchange group, wherever they are
  // in their sequences.
  const auto blocks = [&](const Sequences& sequences) {
    std::vector<Layout> blocks;
    for (int member = 0; member < members; ++member) {
      std::vector<Layout> ranks;
      for (int part = 0; part < parts; ++part) {
        ranks.push_back(RankLayout(spec_.format, sequences, groups_.world.size, member * parts + part));
      }
      blocks.push_back(Concatenate(ranks));
    }
    return blocks;
  };
  const std::vector<Layout> queries = blocks(spec_.queries), keys = blocks(spec_.keys);
  const std::vector<Band> bands = BandsOf(spec_);
  for (int distance = 0; distance < members; ++distance) {
    std::vector<bool> attends(members);
    for (int member = 0; member < members; ++member) {
      const int owner = (member + members - distance) % members;
      attends[member] = distance == 0 || CountPairs(queries[member], keys[owner], bands) > 0;
    }
    if (std::find(attends.begin(), attends.end(), true) == attends.end()) continue;
    Step step{distance, distance > 0 && attends[(me + distance) % members], nullptr, Event(rt_), Event(rt_)};
    if (attends[me]) {
      step.plan = kernels_.Plan(shape_, queries[me], keys[Before(step)], bands, spec_.training, rt_->stream);
      last_attended_ = steps_.size();
    }
    serves_ = serves_ || step.serves;
    steps_.push_back(std::move(step));
  }
  sums_gradients_ = serves_ || heads_.replicated;
}

void HeadRingSchedule::AllocateBuffers() {
  const auto buffer = [&](std::size_t bytes) { return Buffer(rt_, bytes, rt_->stream); };
  const std::size_t element = SizeOf(spec_.dtype);
  const std::size_t k_elements = KeyElements(spec_.dim_qk), v_elements = KeyElements(spec_.dim_v);
  if (exchanges()) {
    // Packed gradients of replicated heads travel in fp32.
    const int dim = std::max(spec_.dim_qk, spec_.dim_v);
    const std::size_t packed =
        std::max({HeadExchange::PackedElements(rows_q_, dim, heads_.query) * element,
                  HeadExchange::PackedElements(rows_q_, 1, heads_.query) * sizeof(float),
                  HeadExchange::PackedElements(rows_kv_, dim, heads_.key) *
                      (heads_.replicated ? sizeof(float) : element)});
    scratch_ = buffer(packed);
    q_ = buffer(QueryElements(spec_.dim_qk) * element);
    k_ = buffer(k_elements * element);
    v_ = buffer(v_elements * element);
    out_ = buffer(QueryElements(spec_.dim_v) * element);
    lse_ = buffer(QueryElements(1) * sizeof(float));
    if (spec_.training) {
      dout_ = buffer(QueryElements(spec_.dim_v) * element);
      dq_ = buffer(QueryElements(spec_.dim_qk) * element);
      if (!heads_.replicated) {
        dk_ = buffer(k_elements * element);
        dv_ = buffer(v_elements * element);
      }
    }
  }
  const std::size_t slots = std::min<std::size_t>(2, steps_.size() - 1);
  for (std::size_t i = 0; i < slots; ++i) {
    k_slot_[i] = buffer(k_elements * element);
    v_slot_[i] = buffer(v_elements * element);
  }
  if (last_attended_ > 0) accumulator_ = buffer(QueryElements(spec_.dim_v) * sizeof(float));
  if (!spec_.training) return;
  delta_ = buffer(QueryElements(1) * sizeof(float));
  if (last_attended_ > 0) dq_accumulator_ = buffer(QueryElements(spec_.dim_qk) * sizeof(float));
  const auto key_gradients = [&](Buffer& dk, Buffer& dv) {
    dk = buffer(k_elements * sizeof(float));
    dv = buffer(v_elements * sizeof(float));
  };
  if (sums_gradients_) key_gradients(dk_sum_, dv_sum_);
  if (serves_) key_gradients(dk_taken_, dv_taken_);
  if (last_attended_ > 0) {
    for (std::size_t i = 0; i < slots; ++i) key_gradients(dk_part_[i], dv_part_[i]);
  }
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
  return {k_slot_[slot].get(), v_slot_[slot].get()};
}

void HeadRingSchedule::FetchNext(const char* pass, std::size_t index, Block own) {
  const std::size_t next = index + 1;
  if (next == steps_.size()) return;
  Step& step = steps_[next];
  if (!step.attends() && !step.serves) return;
  const std::size_t slot = (next - 1) % 2;
  if (step.attends()) slot_read_[slot].Wait(comm_.get());
  const int to = After(step), from = Before(step);
  const std::size_t element = SizeOf(spec_.dtype);
  const std::size_t k_bytes = KeyElements(spec_.dim_qk) * element;
  const std::size_t v_bytes = KeyElements(spec_.dim_v) * element;
  const Stage stage(rt_, comm_.get(), StageName(pass, StepName(step) + ": keys and values"));
  GroupedCalls calls(rt_);
  if (step.serves) {
    Check(rt_, rt_->send(rt_, own.k, k_bytes, to, groups_.ring.comm, comm_.get()));
    Check(rt_, rt_->send(rt_, own.v, v_bytes, to, groups_.ring.comm, comm_.get()));
  }
  if (step.attends()) {
    Check(rt_, rt_->recv(rt_, k_slot_[slot].get(), k_bytes, from, groups_.ring.comm, comm_.get()));
    Check(rt_, rt_->recv(rt_, v_slot_[slot].get(), v_bytes, from, groups_.ring.comm, comm_.get()));
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
    for (const Buffer* part : {&dk_part_[slot], &dv_part_[slot]}) {
      Check(rt_, rt_->send(rt_, part->get(), part->bytes(), to, groups_.ring.comm, comm_.get()));
    }
  }
  if (step.serves) {
    for (const Buffer* taken : {&dk_taken_, &dv_taken_}) {
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
  kernels_.Add(dk_taken_.get<float>(), dk_sum_.get<float>(), KeyElements(spec_.dim_qk), rt_->stream);
  kernels_.Add(dv_taken_.get<float>(), dv_sum_.get<float>(), KeyElements(spec_.dim_v), rt_->stream);
}

void HeadRingSchedule::Forward(const AttentionTensors& t) {
  ForwardArgs args;
  Block own{t.k, t.v};
  args.q = t.q;
  args.out = t.out;
  args.lse = t.lse;
  if (exchanges()) {
    Mark("forward", "tokens to heads");
    exchange_.ToHeads(spec_.dtype, rows_q_, spec_.heads, spec_.dim_qk, heads_.query, t.q, scratch_.get(),
                      q_.get());
    exchange_.ToHeads(spec_.dtype, rows_kv_, spec_.kv_heads, spec_.dim_qk, heads_.key, t.k, scratch_.get(),
                      k_.get());
    exchange_.ToHeads(spec_.dtype, rows_kv_, spec_.kv_heads, spec_.dim_v, heads_.key, t.v, scratch_.get(),
                      v_.get());
    own = {k_.get(), v_.get()};
    args.q = q_.get();
    args.out = out_.get();
    args.lse = lse_.get<float>();
  }
  CommAfterMain();
  args.accumulator = accumulator_.get<float>();
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    if (step.attends()) Mark("forward", StepName(step));
    FetchNext("forward", i, own);
    if (!step.attends()) continue;
    if (i == 0) {
      whole_.BeginForward(t, args);
      if (spec_.queries.padded()) {
        Zero(args.out, QueryElements(spec_.dim_v) * SizeOf(spec_.dtype));
        Zero(args.lse, QueryElements(1) * sizeof(float));
      }
    } else {
      step.arrived.Wait(rt_->stream);
    }
    const Block block = BlockOf(i, own);
    args.plan = step.plan.get();
    args.k = block.k;
    args.v = block.v;
    args.first = i == 0;
    args.last = i == last_attended_;
    args.softmax_offset = args.last ? whole_.offset(t) : nullptr;
    kernels_.Forward(shape_, args, rt_->stream);
    if (i > 0) slot_read_[(i - 1) % 2].Record(rt_->stream);
  }
  whole_.EndForward(t);
  if (exchanges()) {
    Mark("forward", "heads to tokens");
    exchange_.ToTokens(spec_.dtype, spec_.dtype, rows_q_, spec_.heads, spec_.dim_v, heads_.query, out_.get(),
                       scratch_.get(), t.out);
    exchange_.ToTokens(Dtype::kFp32, Dtype::kFp32, rows_q_, spec_.heads, 1, heads_.query, lse_.get(),
                       scratch_.get(), t.lse);
  }
  MainAfterComm();
  EndMarks();
}

void HeadRingSchedule::Backward(const AttentionTensors& t) {
  BackwardArgs args;
  Block own{t.k, t.v};
  const void* out = t.out;
  args.q = t.q;
  args.dout = t.dout;
  args.lse = t.lse;
  args.dq = t.dq;
  args.dk = t.dk;
  args.dv = t.dv;
  if (exchanges()) {  // q, k, v, out and lse are kept from the forward pass
    Mark("backward", "tokens to heads");
    exchange_.ToHeads(spec_.dtype, rows_q_, spec_.heads, spec_.dim_v, heads_.query, t.dout, scratch_.get(),
                      dout_.get());
    own = {k_.get(), v_.get()};
    out = out_.get();
    args.q = q_.get();
    args.dout = dout_.get();
    args.lse = lse_.get<float>();
    args.dq = dq_.get();
    args.dk = dk_.get();
    args.dv = dv_.get();
  }
  CommAfterMain();
  Mark("backward", "delta");
  kernels_.Delta(shape_, block_q_, out, args.dout, delta_.get<float>(), rt_->stream);
  args.delta = delta_.get<float>();
  whole_.BeginBackward(t, *steps_[0].plan, args);
  args.dq_accumulator = dq_accumulator_.get<float>();
  const std::size_t element = SizeOf(spec_.dtype);
  if (spec_.queries.padded()) Zero(args.dq, QueryElements(spec_.dim_qk) * element);

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
      args.first = i == 0;
      args.last = i == last_attended_;
      kernels_.BackwardQuery(shape_, args, rt_->stream);

      // A part, or the first and maybe only one of the own block's.
      const Buffer& dk = i == 0 ? dk_sum_ : dk_part_[(i - 1) % 2];
      const Buffer& dv = i == 0 ? dv_sum_ : dv_part_[(i - 1) % 2];
      args.dk_accumulator = dk.get<float>();
      args.dv_accumulator = dv.get<float>();
      args.first = true;
      args.last = i == 0 && !sums_gradients_;
      if (spec_.keys.padded()) {
        Zero(args.last ? args.dk : dk.get(),
             KeyElements(spec_.dim_qk) * (args.last ? element : sizeof(float)));
        Zero(args.last ? args.dv : dv.get(),
             KeyElements(spec_.dim_v) * (args.last ? element : sizeof(float)));
      }
      kernels_.BackwardKey(shape_, args, rt_->stream);
      whole_.AddBlock(t, args);
      if (i > 0) slot_read_[(i - 1) % 2].Record(rt_->stream);
    }
    if (i > 0) {
      CollectGradients(i - 1);  // they came under this step's work
      ReturnGradients(i);
    }
  }
  if (serves_) {
    Mark("backward", "own gradients");
    CollectGradients(steps_.size() - 1);
    if (!heads_.replicated) {
      kernels_.Round(dk_sum_.get<float>(), spec_.dtype, args.dk, KeyElements(spec_.dim_qk), rt_->stream);
      kernels_.Round(dv_sum_.get<float>(), spec_.dtype, args.dv, KeyElements(spec_.dim_v), rt_->stream);
    }
  }
  whole_.StartSums(t);
  if (exchanges()) {
    Mark("backward", "heads to tokens");
    const Dtype sum_dtype = heads_.replicated ? Dtype::kFp32 : spec_.dtype;
    const void* dk = heads_.replicated ? dk_sum_.get() : dk_.get();
    const void* dv = heads_.replicated ? dv_sum_.get() : dv_.get();
    exchange_.ToTokens(spec_.dtype, spec_.dtype, rows_q_, spec_.heads, spec_.dim_qk, heads_.query, dq_.get(),
                       scratch_.get(), t.dq);
    exchange_.ToTokens(sum_dtype, spec_.dtype, rows_kv_, spec_.kv_heads, spec_.dim_qk, heads_.key, dk,
                       scratch_.get(), t.dk);
    exchange_.ToTokens(sum_dtype, spec_.dtype, rows_kv_, spec_.kv_heads, spec_.dim_v, heads_.key, dv,
                       scratch_.get(), t.dv);
  }
  whole_.EndBackward(t);
  MainAfterComm();
  EndMarks();
}

}  // namespace cppool::kernels
