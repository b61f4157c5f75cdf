#include "head_ring.h"

#include <algorithm>

namespace cppool::kernels {
namespace {

std::int64_t LocalRows(std::int64_t batch, std::int64_t seqlen, int world_size) {
  return batch * seqlen / world_size;
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
      comm_(runtime),
      exchange_(runtime, kernels, groups.heads, comm_.get()),
      main_ready_(runtime),
      block_ready_(runtime),
      gradients_ready_(runtime),
      gradients_done_(runtime) {
  const int parts = groups.heads.size;
  const int steps = groups.ring.size;
  const int world = parts * steps;
  const HeadRange mine = heads_.query[groups.heads.rank];
  const HeadRange mine_kv = heads_.key[groups.heads.rank];
  shape_ = {spec.dtype,
            spec.dim_qk,
            spec.dim_v,
            mine.count,
            mine_kv.count,
            mine.begin,
            mine_kv.begin,
            spec.heads / spec.kv_heads,
            static_cast<float>(spec.scale)};
  kernels_.Load(shape_, spec.training);

  rows_q_ = LocalRows(spec.batch, spec.seqlen_q, world);
  rows_kv_ = LocalRows(spec.batch, spec.seqlen_kv, world);
  block_q_ = rows_q_ * parts;
  block_kv_ = rows_kv_ * parts;
  const std::size_t element = SizeOf(spec.dtype);
  k_bytes_ = element * block_kv_ * shape_.kv_heads * spec.dim_qk;
  v_bytes_ = element * block_kv_ * shape_.kv_heads * spec.dim_v;

  // Positions say everything: a block is the tokens of the members of one exchange group, wherever they are
  // in their sequences.
  const auto block_layout = [&](std::int64_t seqlen, int ring_member) {
    std::vector<Layout> members;
    for (int part = 0; part < parts; ++part) {
      members.push_back(RankLayout(spec.format, spec.batch, seqlen, world, ring_member * parts + part));
    }
    return Concatenate(members);
  };
  const Layout queries = block_layout(spec.seqlen_q, groups.ring.rank);
  const std::vector<Band> bands(spec.batch, BandOf(spec, spec.seqlen_q, spec.seqlen_kv));
  for (int step = 0; step < steps; ++step) {
    const Layout keys = block_layout(spec.seqlen_kv, (groups.ring.rank + steps - step) % steps);
    plans_.push_back(kernels_.Plan(shape_, queries, keys, bands, spec.training, rt_->stream));
    attended_.emplace_back(rt_);
  }

  const auto buffer = [&](std::size_t bytes) { return Buffer(rt_, bytes, rt_->stream); };
  const std::size_t q_elements = block_q_ * shape_.heads * spec.dim_qk;
  const std::size_t out_elements = block_q_ * shape_.heads * spec.dim_v;
  if (exchanges()) {
    // Packed gradients of replicated heads travel in fp32.
    const std::size_t packed = std::max(
        {HeadExchange::PackedElements(rows_q_, std::max(spec.dim_qk, spec.dim_v), heads_.query) * element,
         HeadExchange::PackedElements(rows_q_, 1, heads_.query) * sizeof(float),
         HeadExchange::PackedElements(rows_kv_, std::max(spec.dim_qk, spec.dim_v), heads_.key) *
             (heads_.replicated ? sizeof(float) : element)});
    scratch_ = buffer(packed);
    q_ = buffer(q_elements * element);
    k_ = buffer(k_bytes_);
    v_ = buffer(v_bytes_);
    out_ = buffer(out_elements * element);
    lse_ = buffer(block_q_ * shape_.heads * sizeof(float));
    if (spec.training) {
      dout_ = buffer(out_elements * element);
      dq_ = buffer(q_elements * element);
      if (!heads_.replicated) {
        dk_ = buffer(k_bytes_);
        dv_ = buffer(v_bytes_);
      }
    }
  }
  if (rings()) {
    accumulator_ = buffer(out_elements * sizeof(float));
    for (int i = 0; i < std::min(2, steps - 1); ++i) {
      k_ring_[i] = buffer(k_bytes_);
      v_ring_[i] = buffer(v_bytes_);
    }
  }
  if (spec.training) {
    delta_ = buffer(block_q_ * shape_.heads * sizeof(float));
    if (rings()) dq_accumulator_ = buffer(q_elements * sizeof(float));
    for (int i = 0; i < (rings() ? 2 : heads_.replicated ? 1 : 0); ++i) {
      dk_accumulator_[i] = buffer(sizeof(float) * block_kv_ * shape_.kv_heads * spec.dim_qk);
      dv_accumulator_[i] = buffer(sizeof(float) * block_kv_ * shape_.kv_heads * spec.dim_v);
    }
  }
}

std::string HeadRingSchedule::StepName(const char* pass, int step) const {
  return std::string(pass) + "/step " + std::to_string(step + 1) + " of " + std::to_string(groups_.ring.size);
}

void HeadRingSchedule::CommAfterMain() {
  main_ready_.Record(rt_->stream);
  main_ready_.Wait(comm_.get());
}

HeadRingSchedule::Block HeadRingSchedule::RingStep(const char* pass, int step, Block own) {
  const auto block_of = [&](int s) {
    const int slot = (s + 1) % 2;  // steps 1, 2, 3 ... arrive in slots 0, 1, 0 ...
    return s == 0 ? own : Block{k_ring_[slot].get(), v_ring_[slot].get()};
  };
  const Block current = block_of(step);
  if (step > 0) block_ready_.Wait(rt_->stream);
  if (step + 1 < groups_.ring.size) {
    const int slot = step % 2;
    // The slot's last block was read at the step before this one.
    if (step > 0) attended_[step - 1].Wait(comm_.get());
    const Stage stage(rt_, comm_.get(),
                      prefix_ + StepName(pass, step) + ": keys and values to rank " +
                          std::to_string(right()) + ", from rank " + std::to_string(left()) + " of the ring");
    GroupedCalls calls(rt_);
    Check(rt_, rt_->send(rt_, current.k, k_bytes_, right(), groups_.ring.comm, comm_.get()));
    Check(rt_, rt_->send(rt_, current.v, v_bytes_, right(), groups_.ring.comm, comm_.get()));
    Check(rt_, rt_->recv(rt_, k_ring_[slot].get(), k_bytes_, left(), groups_.ring.comm, comm_.get()));
    Check(rt_, rt_->recv(rt_, v_ring_[slot].get(), v_bytes_, left(), groups_.ring.comm, comm_.get()));
    calls.End();
    block_ready_.Record(comm_.get());
  }
  return current;
}

void HeadRingSchedule::Forward(const AttentionTensors& t) {
  ForwardArgs args;
  Block own{t.k, t.v};
  args.q = t.q;
  args.out = t.out;
  args.lse = t.lse;
  if (exchanges()) {
    Mark("forward/tokens to heads");
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
  const int steps = groups_.ring.size;
  for (int step = 0; step < steps; ++step) {
    Mark(StepName("forward", step));
    const Block block = RingStep("forward", step, own);
    args.plan = plans_[step].get();
    args.k = block.k;
    args.v = block.v;
    args.first = step == 0;
    args.last = step == steps - 1;
    kernels_.Forward(shape_, args, rt_->stream);
    attended_[step].Record(rt_->stream);
  }
  if (exchanges()) {
    Mark("forward/heads to tokens");
    exchange_.ToTokens(spec_.dtype, spec_.dtype, rows_q_, spec_.heads, spec_.dim_v, heads_.query, out_.get(),
                       scratch_.get(), t.out);
    exchange_.ToTokens(Dtype::kFp32, Dtype::kFp32, rows_q_, spec_.heads, 1, heads_.query, lse_.get(),
                       scratch_.get(), t.lse);
  }
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
    Mark("backward/tokens to heads");
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
  Mark("backward/delta");
  kernels_.Delta(shape_, block_q_, out, args.dout, delta_.get<float>(), rt_->stream);
  CommAfterMain();

  const int steps = groups_.ring.size;
  const std::size_t dk_bytes = sizeof(float) * block_kv_ * shape_.kv_heads * spec_.dim_qk;
  const std::size_t dv_bytes = sizeof(float) * block_kv_ * shape_.kv_heads * spec_.dim_v;
  args.delta = delta_.get<float>();
  args.dq_accumulator = dq_accumulator_.get<float>();
  for (int step = 0; step < steps; ++step) {
    const std::string name = StepName("backward", step);
    Mark(name);
    const Block block = RingStep("backward", step, own);
    args.plan = plans_[step].get();
    args.k = block.k;
    args.v = block.v;
    args.first = step == 0;
    args.last = step == steps - 1;
    kernels_.BackwardQuery(shape_, args, rt_->stream);

    // The block's gradients so far, from the rank that had it before, arrive under the dq kernel.
    const int slot = step % 2;
    if (step > 0) gradients_done_.Wait(rt_->stream);
    args.dk_accumulator = dk_accumulator_[slot].get<float>();
    args.dv_accumulator = dv_accumulator_[slot].get<float>();
    args.last = !rings() && !heads_.replicated;
    kernels_.BackwardKey(shape_, args, rt_->stream);
    attended_[step].Record(rt_->stream);

    if (rings()) {
      gradients_ready_.Record(rt_->stream);
      gradients_ready_.Wait(comm_.get());
      const Stage stage(rt_, comm_.get(),
                        prefix_ + name + ": gradients to rank " + std::to_string(right()) + ", from rank " +
                            std::to_string(left()) + " of the ring");
      GroupedCalls calls(rt_);
      Check(rt_, rt_->send(rt_, args.dk_accumulator, dk_bytes, right(), groups_.ring.comm, comm_.get()));
      Check(rt_, rt_->send(rt_, args.dv_accumulator, dv_bytes, right(), groups_.ring.comm, comm_.get()));
      Check(rt_, rt_->recv(rt_, dk_accumulator_[1 - slot].get(), dk_bytes, left(), groups_.ring.comm,
                           comm_.get()));
      Check(rt_, rt_->recv(rt_, dv_accumulator_[1 - slot].get(), dv_bytes, left(), groups_.ring.comm,
                           comm_.get()));
      calls.End();
      gradients_done_.Record(comm_.get());
    }
  }

  // After the last step the gradients of this rank's own block have come home.
  const int home = steps % 2;
  if (rings()) {
    Mark("backward/own gradients");
    gradients_done_.Wait(rt_->stream);
    if (!heads_.replicated) {
      kernels_.Round(dk_accumulator_[home].get<float>(), spec_.dtype, args.dk,
                     block_kv_ * shape_.kv_heads * spec_.dim_qk, rt_->stream);
      kernels_.Round(dv_accumulator_[home].get<float>(), spec_.dtype, args.dv,
                     block_kv_ * shape_.kv_heads * spec_.dim_v, rt_->stream);
    }
  }
  if (exchanges()) {
    Mark("backward/heads to tokens");
    const Dtype sum_dtype = heads_.replicated ? Dtype::kFp32 : spec_.dtype;
    const int slot = rings() ? home : 0;
    const void* dk = heads_.replicated ? dk_accumulator_[slot].get() : dk_.get();
    const void* dv = heads_.replicated ? dv_accumulator_[slot].get() : dv_.get();
    exchange_.ToTokens(spec_.dtype, spec_.dtype, rows_q_, spec_.heads, spec_.dim_qk, heads_.query, dq_.get(),
                       scratch_.get(), t.dq);
    exchange_.ToTokens(sum_dtype, spec_.dtype, rows_kv_, spec_.kv_heads, spec_.dim_qk, heads_.key, dk,
                       scratch_.get(), t.dk);
    exchange_.ToTokens(sum_dtype, spec_.dtype, rows_kv_, spec_.kv_heads, spec_.dim_v, heads_.key, dv,
                       scratch_.get(), t.dv);
  }
  EndMarks();
}

}  // namespace cppool::kernels
