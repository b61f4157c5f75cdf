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
      ready_(runtime),
      comm_done_(runtime) {
  const std::size_t position = static_cast<std::size_t>(groups_.ring.rank);
  std::size_t taken = 0;
  for (const RingSteps::Step& all : ring.steps) {
    Step step{all.distance,
              ring.Serves(all, groups.ring.rank),
              all.attends[position],
              nullptr,
              Event(rt_),
              Event(rt_),
              0};
    if (step.serves) step.taken = taken++;
    const bool alone = spec.training || (!use_.one_launch && (all.distance == 0 || !ring.gathers));
    if (step.attends && alone)
      step.plan = attention_.Plan(ring.keys[static_cast<std::size_t>(Before(step))], ring.bands);
    steps_.push_back(std::move(step));
  }
  if (use_.one_launch)
    arriving_ = attention_.Plan(ring.Arriving(groups_.ring.rank), ring.bands);
  else if (ring.gathers && use_.last_attended > 0)
    gathered_ = attention_.Plan(ring.Gathered(groups.ring.rank), ring.bands);
  if (spec.training && use_.splits_own()) {
    later_ = attention_.Plan(use_.later_keys, ring.bands);
    earlier_ = attention_.Plan(use_.earlier_keys, ring.bands);
    // Beside a second call there are no multiprocessors left for a communicator's kernels.
    const std::size_t overlapping = attention_.capabilities().overlapping_keys;
    if (overlapping > 0 && use_.KeyElements(1) >= overlapping && !spec.deterministic &&
        spec.bias != BiasType::kPostScale && !groups.ring_by_kernels)
      beside_ = std::make_unique<Stream>(runtime);
  }
  for (std::size_t i = 0; i < use_.slots; ++i) slot_read_.emplace_back(rt_);
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
  const bool ring = groups_.ring.size > 1;
  const char* schedule = spec_.comm == CpCommType::kAllGather && ring ? "all_gather "
                         : groups_.heads.size > 1                     ? ring ? "a2a+p2p " : "a2a "
                         : ring                                       ? "p2p "
                                                                      : "";
  return prefix_ + pass + "/" + schedule + what;
}

std::string HeadRingSchedule::StepName(const Step& step) const {
  return "step " + std::to_string(step.distance + 1) + " of " + std::to_string(groups_.ring.size);
}

void HeadRingSchedule::CommAfter(cppool_stream stream) {
  ready_.Record(stream);
  ready_.Wait(comm_.get());
}
void HeadRingSchedule::MainAfterComm() {
  comm_done_.Record(comm_.get());
  comm_done_.Wait(rt_->stream);
}

HeadRingSchedule::Block HeadRingSchedule::BlockOf(std::size_t index, Block own) const {
  if (index == 0) return own;
  const std::size_t slot = SlotOf(index);
  return {{buffers_.k_slots.at(slot * use_.KeyElements(spec_.dim_qk) * SizeOf(own.k.dtype)), own.k.dtype,
           SlotScale(slot, 0)},
          {buffers_.v_slots.at(slot * use_.KeyElements(spec_.dim_v) * SizeOf(own.v.dtype)), own.v.dtype,
           SlotScale(slot, 1)}};
}

float* HeadRingSchedule::SlotScale(std::size_t slot, std::size_t of_v) const {
  return buffers_.slot_scales ? buffers_.slot_scales.get<float>() + 2 * slot + of_v : nullptr;
}

void HeadRingSchedule::FetchAhead(const char* pass, std::size_t index, Block own) {
  if (gathers()) {
    for (std::size_t next = 1; index == 0 && next < steps_.size(); ++next) Fetch(pass, next, own);
  } else if (index + 1 < steps_.size()) {
    Fetch(pass, index + 1, own);
  }
}

void HeadRingSchedule::Fetch(const char* pass, std::size_t index, Block own) {
  Step& step = steps_[index];
  if (!step.moves()) return;
  const Block block = BlockOf(index, own);
  if (step.attends) slot_read_[SlotOf(index)].Wait(comm_.get());
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
  if (step.attends) {
    const auto receive = [&](const void* into, std::size_t bytes) {
      Check(rt_, rt_->recv(rt_, const_cast<void*>(into), bytes, from, groups_.ring.comm, comm_.get()));
    };
    receive(block.k.data, k_bytes);
    receive(block.v.data, v_bytes);
    for (const float* scale : {block.k.scale, block.v.scale}) {
      if (scale) receive(scale, sizeof(float));
    }
  }
  calls.End();
  step.arrived.Record(comm_.get());
}

ArrivingKeys HeadRingSchedule::StartArrivals(Block own) {
  const int heads = shape().kv_heads, at_once = use_.heads_per_piece;
  ArrivingKeys keys;
  const Block slots = BlockOf(1, own);
  keys.k = slots.k;
  keys.v = slots.v;
  keys.block_rows = use_.block_kv;
  keys.blocks = static_cast<int>(steps_.size());
  keys.heads_per_piece = at_once;
  RingTransfers transfers;
  transfers.into = {buffers_.k_slots.at(0), buffers_.v_slots.at(0)};
  for (int head = 0; head < heads; head += at_once) {
    const int count = std::min(at_once, heads - head);
    const std::string last = std::to_string(head + count - 1);
    const std::string what =
        (count == 1 ? "head " : "heads " + std::to_string(head) + " to ") + last + " of keys and values";
    // Rows of some heads, in the step's slot at the receiver.
    const auto rows = [&](std::size_t index, std::size_t buffer, const TensorRef& tensor, int dim) {
      const std::size_t width = static_cast<std::size_t>(dim) * SizeOf(tensor.dtype);
      const std::size_t pitch = width * static_cast<std::size_t>(heads),
                        first = width * static_cast<std::size_t>(head);
      const auto count_rows = static_cast<std::size_t>(use_.block_kv);
      return RingPiece::Rows{static_cast<const std::byte*>(tensor.data) + first,
                             buffer,
                             (index - 1) * count_rows * pitch + first,
                             pitch,
                             width * static_cast<std::size_t>(count),
                             count_rows};
    };
    for (std::size_t i = 1; i < steps_.size(); ++i) {
      transfers.arriving.push_back({Before(steps_[i]), what});
      if (!steps_[i].serves) continue;
      transfers.leaving.push_back({After(steps_[i]),
                                   keys.Piece(static_cast<std::int64_t>(i), head),
                                   {rows(i, 0, own.k, spec_.dim_qk), rows(i, 1, own.v, spec_.dim_v)},
                                   StageName("forward", StepName(steps_[i]) + ": keys and values")});
    }
  }
  keys.arrivals = StartRing(rt_, std::move(transfers), groups_.ring.comm, comm_.get());
  return keys;
}

void HeadRingSchedule::ReturnGradients(std::size_t index, cppool_stream stream) {
  Step& step = steps_[index];
  if (!step.moves()) return;
  CommAfter(stream);  // the part is complete
  const int to = Before(step), from = After(step);
  const Stage stage(rt_, comm_.get(),
                    StageName("backward", StepName(step) + ": gradients of keys and values"));
  const std::size_t slot = (index - 1) % 2;
  GroupedCalls calls(rt_);
  if (step.attends) {
    for (const Buffer* part : {&buffers_.dk_part[slot], &buffers_.dv_part[slot]}) {
      Check(rt_, rt_->send(rt_, part->get(), part->bytes(), to, groups_.ring.comm, comm_.get()));
    }
  }
  if (step.serves) {
    for (const Buffer* taken : {&buffers_.dk_taken, &buffers_.dv_taken}) {
      const std::size_t bytes = taken->bytes() / use_.serves;
      Check(rt_, rt_->recv(rt_, taken->at(step.taken * bytes), bytes, from, groups_.ring.comm, comm_.get()));
    }
  }
  calls.End();
  step.returned.Record(comm_.get());
}

void HeadRingSchedule::SumGradients(const Buffer& own, const Buffer& taken, int dim,
                                    const TensorOut& result) {
  const std::size_t count = use_.KeyElements(dim);
  std::vector<const float*> parts(static_cast<std::size_t>(groups_.ring.size), nullptr);
  parts[static_cast<std::size_t>(groups_.ring.rank)] = own.get<float>();
  for (const Step& step : steps_) {
    if (step.serves) parts[static_cast<std::size_t>(After(step))] = taken.get<float>() + step.taken * count;
  }
  std::erase(parts, nullptr);
  kernels_.ops->RoundSum(parts, result, static_cast<std::int64_t>(count), rt_->stream);
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
  if (arriving_) Mark("forward", "all steps");
  CommAfter(rt_->stream);
  const auto attend = [&](const BlockPlan& plan, const Block& block, bool first, bool last) {
    args.plan = &plan;
    args.k = block.k;
    args.v = block.v;
    args.first = first;
    args.last = last;
    attention_.Forward(args);
  };
  const auto begin = [&] {
    whole_.BeginForward(t, args);
    if (spec_.queries.padded()) {
      Zero(args.out.data, use_.QueryElements(spec_.dim_v) * SizeOf(args.out.dtype));
      Zero(args.lse, use_.QueryElements(1) * sizeof(float));
    }
  };
  if (arriving_) {
    args.arriving = StartArrivals(own);
    begin();
    attend(*arriving_, own, true, true);
  }
  for (std::size_t i = 0; i < steps_.size() && !arriving_; ++i) {
    const Step& step = steps_[i];
    if (i > 0 && gathers()) break;
    if (step.attends) Mark("forward", StepName(step));
    FetchAhead("forward", i, own);
    if (!step.attends) continue;
    if (i == 0) {
      begin();
    } else {
      step.arrived.Wait(rt_->stream);
    }
    args.beside_transfers = groups_.ring_by_kernels && use_.MovesUnderForward(i);
    attend(*step.plan, BlockOf(i, own), i == 0, i == use_.last_attended);
    if (i > 0) slot_read_[SlotOf(i)].Record(rt_->stream);
  }
  if (gathered_) {
    Mark("forward", "others' keys");
    for (std::size_t i = 1; i < steps_.size(); ++i) {
      if (steps_[i].attends) steps_[i].arrived.Wait(rt_->stream);
    }
    args.beside_transfers = false;  // all keys are here
    Block block = BlockOf(1, own);
    block.k.scale = own.k.scale;  // the scales of all ranks are the same
    block.v.scale = own.v.scale;
    attend(*gathered_, block, false, true);
  }
  if (exchanges()) {
    Mark("forward", "heads to tokens");
    exchange_.ToTokens(use_.rows_q, spec_.heads, spec_.dim_v, use_.heads.query, args.out,
                       buffers_.scratch.get(), t.out);
    exchange_.ToTokens(use_.rows_q, spec_.heads, 1, use_.heads.query, {args.lse, Dtype::kFp32},
                       buffers_.scratch.get(), {t.lse, Dtype::kFp32});
  }
  MainAfterComm();
  whole_.EndForward(t);
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
  CommAfter(rt_->stream);
  if (!t.delta) {
    Mark("backward", "delta");
    kernels_.ops->Delta(use_.block_q * shape().heads, spec_.dim_v, out, args.dout,
                        buffers_.delta.get<float>(), rt_->stream);
    args.delta = buffers_.delta.get<float>();
  }
  whole_.BeginBackward(t, args);
  if (spec_.queries.padded()) Zero(args.dq.data, use_.QueryElements(spec_.dim_qk) * SizeOf(args.dq.dtype));

  if (spec_.keys.padded()) {
    const auto zero = [&](const TensorOut& result, const Buffer& sum, int dim) {
      Zero(use_.sums_gradients ? sum.get() : result.data,
           use_.KeyElements(dim) * (use_.sums_gradients ? sizeof(float) : SizeOf(result.dtype)));
    };
    zero(args.dk, buffers_.dk_sum, spec_.dim_qk);
    zero(args.dv, buffers_.dv_sum, spec_.dim_v);
  }
  if (beside_) args.beside = beside_->get();
  const auto add_own = [&](const BlockPlan& plan, bool first, bool last) {
    args.beside_transfers = groups_.ring_by_kernels && use_.MovesUnderBackward(0);
    AddGradients(t, args,
                 {&plan,
                  own,
                  {true, first, last},
                  // Where no other rank adds to it this is all of the block's gradient.
                  {true, true, !use_.sums_gradients},
                  buffers_.dk_sum.get<float>(),
                  buffers_.dv_sum.get<float>(),
                  rt_->stream});
  };
  cppool_stream stream = rt_->stream;  // of the latest call
  const Event* sent[2] = {};           // of dk_part and dv_part: their last way home is over
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.attends && i > 0 && beside_) stream = stream == rt_->stream ? beside_->get() : rt_->stream;
    if (step.attends) Mark("backward", StepName(step), stream);
    FetchAhead("backward", i, own);
    if (i == 0) {
      add_own(later_ ? *later_ : *step.plan, true, use_.last_attended == 0);
      continue;
    }
    if (step.attends) {
      step.arrived.Wait(stream);
      const std::size_t slot = (i - 1) % 2;
      if (sent[slot]) sent[slot]->Wait(stream);
      sent[slot] = &step.returned;
      if (spec_.keys.padded()) {
        for (const Buffer* part : {&buffers_.dk_part[slot], &buffers_.dv_part[slot]})
          Zero(part->get(), part->bytes(), stream);
      }
      args.beside_transfers = groups_.ring_by_kernels && use_.MovesUnderBackward(i);
      AddGradients(t, args,
                   {step.plan.get(),
                    BlockOf(i, own),
                    {true, false, !later_ && i == use_.last_attended},
                    {true, true, false},  // a part of the sum at the block's owner
                    buffers_.dk_part[slot].get<float>(),
                    buffers_.dv_part[slot].get<float>(),
                    stream});
      slot_read_[SlotOf(i)].Record(stream);
      if (stream != rt_->stream) EndMarks(stream);
    }
    ReturnGradients(i, stream);
  }
  if (earlier_) {  // under it the last gradients return
    Mark("backward", "rest of " + StepName(steps_[0]));
    add_own(*earlier_, false, true);
  }
  if (use_.serves > 0) {
    Mark("backward", "own gradients");
    for (std::size_t i = 1; i < steps_.size(); ++i) {
      if (steps_[i].moves()) steps_[i].returned.Wait(rt_->stream);
    }
    // Those of heads that several ranks hold stay in fp32 until all of these have added theirs.
    const auto result = [&](const Buffer& sum, const TensorOut& rounded) -> TensorOut {
      return use_.heads.replicated ? TensorOut{sum.get(), Dtype::kFp32} : rounded;
    };
    SumGradients(buffers_.dk_sum, buffers_.dk_taken, spec_.dim_qk, result(buffers_.dk_sum, args.dk));
    SumGradients(buffers_.dv_sum, buffers_.dv_taken, spec_.dim_v, result(buffers_.dv_sum, args.dv));
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

void HeadRingSchedule::AddGradients(const AttentionTensors& t, BackwardArgs& args, const Call& call) {
  args.plan = call.plan;
  args.k = call.block.k;
  args.v = call.block.v;
  args.query = call.query;
  args.key = call.key;
  args.dk_accumulator = call.dk;
  args.dv_accumulator = call.dv;
  attention_.Backward(args, call.stream);
  whole_.AddBlock(t, args);
}

}  // namespace cppool::kernels
