#include "kernels/attention/schedules/fp8_schedule.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/attention/problem/row_tiles.h"

namespace cppool::kernels {
namespace {

std::int64_t Columns(const AttentionSpec& spec, const Fp8Row& row) {
  return std::int64_t{row.of_queries() ? spec.heads : spec.kv_heads} *
         (row.of_v() ? spec.dim_v : spec.dim_qk);
}

// One that is in memory.
TensorRef TensorOf(const AttentionTensors& t, Fp8Tensor tensor) {
  const TensorRef all[] = {t.q, t.k, t.v, t.dout, t.out, t.dq, t.dk, t.dv};
  return all[static_cast<std::size_t>(tensor)];
}

}  // namespace

void Fp8Buffers::List(const AttentionSpec& spec, int world_size, int rank, MemoryList& list) {
  const Fp8Table table = Fp8TableOf(*spec.fp8, spec.training);
  const Layout queries = RankLayout(spec.format, spec.queries, world_size, rank),
               keys = RankLayout(spec.format, spec.keys, world_size, rank);
  for (const Fp8Row& row : table) {
    if (!row.stored()) continue;
    const std::int64_t rows = row.of_queries() ? queries.rows : keys.rows;
    list.Add("payload with one scale", static_cast<std::size_t>(rows * Columns(spec, row)),
             payload[static_cast<std::size_t>(row.tensor)]);
  }
  const auto vectors = static_cast<std::size_t>(queries.rows * spec.heads);
  if (KeepsOut16(table, spec.training)) {
    list.Add("16-bit out for the backward pass",
             vectors * static_cast<std::size_t>(spec.dim_v) * SizeOf(spec.dtypes.out), out_16);
  }
  if (spec.training) list.Add("delta of the recipe's out", vectors * sizeof(float), delta);
  list.Add("scales", kFp8Slots * sizeof(Fp8Scale), scales);
  list.Add("amaxes", kFp8Slots * sizeof(float), amaxes);
  list.AddTables("rows of the tokens", RowTilesBytes(queries) + RowTilesBytes(keys));
}

Fp8Schedule::Fp8Schedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec,
                         Group group, std::unique_ptr<Schedule> inner, std::string stage_prefix,
                         bool one_step)
    : rt_(runtime),
      kernels_(kernels),
      spec_(spec),
      table_(Fp8TableOf(*spec.fp8, spec.training)),
      group_(group),
      inner_(std::move(inner)),
      prefix_(std::move(stage_prefix)),
      one_step_(one_step) {
  const auto rows = [&](const Sequences& sequences) {
    return kernels.ops->Rows(RankLayout(spec.format, sequences, group.size, group.rank), rt_->stream);
  };
  query_rows_ = rows(spec.queries);
  key_rows_ = rows(spec.keys);
  MemoryList memory;
  buffers_.List(spec_, group.size, group.rank, memory);
  memory.Allocate(rt_);
  // Payloads of rows without a token travel, too.
  const auto clear = [&](const Buffer& buffer) {
    if (buffer) Check(rt_, rt_->fill(rt_, buffer.get(), 0, buffer.bytes(), rt_->stream));
  };
  for (const Fp8Row& row : table_)
    if (row.operand) clear(PayloadOf(row.tensor));
  clear(buffers_.delta);
}

void Fp8Schedule::Mark(const char* pass) {
  Check(rt_, rt_->mark(rt_, rt_->stream, (prefix_ + pass + "/fp8 casts").c_str()));
}

void Fp8Schedule::Reduce(Fp8Slot slot) {
  if (group_.size > 1) {
    Check(rt_, rt_->all_reduce(rt_, amax(slot), amax(slot), 1, CPPOOL_FLOAT32, CPPOOL_MAX, group_.comm,
                               rt_->stream));
  }
  fp8().MakeScale(table_.Find(slot)->format, amax(slot), scale(slot), rt_->stream);
}

void Fp8Schedule::FindScale(Fp8Slot slot, const AttentionTensors& t) {
  if (!table_.Find(slot)) return;
  kernels_.ops->Fill(amax(slot), 0, 1, rt_->stream);
  for (const Fp8Row& row : table_) {
    if (row.slot == slot)
      fp8().Amax(rows(row), Columns(spec_, row), TensorOf(t, row.tensor), amax(slot), rt_->stream);
  }
  Reduce(slot);
}

void Fp8Schedule::Cast(Fp8Slot slot, const AttentionTensors& t) {
  for (const Fp8Row& row : table_) {
    if (row.slot != slot) continue;
    fp8().Cast(rows(row), Columns(spec_, row), TensorOf(t, row.tensor), scale(slot),
               {PayloadOf(row.tensor).get(), row.format}, rt_->stream);
  }
}

void Fp8Schedule::Dequantize(Fp8Slot slot, const AttentionTensors& t) {
  for (const Fp8Row& row : table_) {
    if (row.slot != slot) continue;
    const TensorRef to = TensorOf(t, row.tensor);
    fp8().Dequantize(rows(row), Columns(spec_, row), Payload(row), {const_cast<void*>(to.data), to.dtype},
                     rt_->stream);
  }
}

void Fp8Schedule::Quantize(Fp8Slot slot, const AttentionTensors& t) {
  if (const Fp8Row* const row = table_.Find(slot); row && !row->of_step_before) FindScale(slot, t);
  Cast(slot, t);
}

bool Fp8Schedule::CastInSteps(Fp8Tensor tensor) const {
  const Fp8Row* const row = table_.Find(tensor);
  return row && row->cast == Fp8Cast::kBeforeSchedule;
}

AttentionTensors Fp8Schedule::Inner(const AttentionTensors& t) const {
  AttentionTensors inner = t;
  const auto move_payload = [&](Fp8Tensor tensor, TensorRef& in) {
    if (const Fp8Row* const row = table_.Find(tensor); row && row->stored()) in = Payload(*row);
  };
  move_payload(Fp8Tensor::kQ, inner.q);
  move_payload(Fp8Tensor::kK, inner.k);
  move_payload(Fp8Tensor::kV, inner.v);
  move_payload(Fp8Tensor::kDout, inner.dout);
  if (buffers_.out_16) inner.out = {buffers_.out_16.get(), t.out.dtype};
  if (!t.delta) inner.delta = buffers_.delta.get<float>();
  return inner;
}

void Fp8Schedule::MakeDelta(const AttentionTensors& t) {
  const AttentionTensors inner = Inner(t);
  const Fp8Row* const out = table_.Find(Fp8Tensor::kOut);
  out_of_delta_ = out && out->readers & kForDelta ? Payload(*out) : TensorRef(inner.out);
  dout_of_delta_ = inner.dout;
  fp8().Delta(*query_rows_, spec_.heads, spec_.dim_v, out_of_delta_, dout_of_delta_,
              buffers_.delta.get<float>(), rt_->stream);
}

void Fp8Schedule::Prepare(const AttentionTensors& t) {
  for (const Fp8Slot slot : {Fp8Slot::kQkv, Fp8Slot::kDout}) {
    FindScale(slot, t);
    Cast(slot, t);
  }
  if (std::any_of(table_.begin(), table_.end(), [](const Fp8Row& row) { return row.of_step_before; }))
    Calibrate(t);
}

void Fp8Schedule::Calibrate(const AttentionTensors& t) {
  AttentionTensors inner = Inner(t);
  inner_->Forward(inner);
  attended_ = one_step_;
  const Fp8Row* const out = table_.Find(Fp8Tensor::kOut);
  if (out && (out->of_step_before || out->readers & kForDelta)) {
    FindScale(Fp8Slot::kOut, inner);
    Cast(Fp8Slot::kOut, inner);
  }
  if (!table_.Find(Fp8Slot::kDs)) return;
  // From the O of the recipe: where a query sees few keys, dS is little else than the rounding of O.
  if (!t.delta) MakeDelta(t);
  kernels_.ops->Fill(amax(Fp8Slot::kDs), 0, 1, rt_->stream);
  inner.amax_ds = amax(Fp8Slot::kDs);
  inner_->Backward(inner);
  Reduce(Fp8Slot::kDs);
  if (const Fp8Row* const dq = table_.Find(Fp8Tensor::kDq); dq && dq->of_step_before)
    FindScale(Fp8Slot::kGradients, t);
}

void Fp8Schedule::Forward(const AttentionTensors& t) {
  if (CastInSteps(Fp8Tensor::kQ)) {
    Mark("forward");
    Quantize(Fp8Slot::kQkv, t);
  }
  const AttentionTensors inner = Inner(t);
  if (!std::exchange(attended_, false)) inner_->Forward(inner);
  if (!table_.Find(Fp8Tensor::kOut)) return;
  Mark("forward");
  Quantize(Fp8Slot::kOut, inner);
  if (table_.Has(Fp8Tensor::kOut, kForCaller)) {
    if (buffers_.out_16 && spec_.queries.padded()) {
      Check(rt_, rt_->fill(rt_, t.out.data, 0, buffers_.out_16.bytes(), rt_->stream));
    }
    Dequantize(Fp8Slot::kOut, t);
  }
  EndMarks();
}

void Fp8Schedule::Backward(const AttentionTensors& t) {
  Mark("backward");
  if (CastInSteps(Fp8Tensor::kDout)) Quantize(Fp8Slot::kDout, t);
  if (!t.delta) MakeDelta(t);
  AttentionTensors inner = Inner(t);
  if (table_.Find(Fp8Slot::kDs)) inner.ds_scale = &scale(Fp8Slot::kDs)->scale;
  inner_->Backward(inner);
  if (!table_.Find(Fp8Slot::kGradients)) return;
  Mark("backward");
  Quantize(Fp8Slot::kGradients, t);
  Dequantize(Fp8Slot::kGradients, t);
  EndMarks();
}

Fp8Step Fp8Schedule::Fp8() const {
  Fp8Step step = inner_->Fp8();
  step.delta = buffers_.delta.get<float>();
  step.out_of_delta = out_of_delta_;
  step.dout_of_delta = dout_of_delta_;
  const auto used = [&](Fp8Slot slot) { return table_.Find(slot) ? scale(slot) : nullptr; };
  step.qkv = used(Fp8Slot::kQkv);
  step.dout = used(Fp8Slot::kDout);
  step.ds = used(Fp8Slot::kDs);
  step.gradients = used(Fp8Slot::kGradients);
  if (table_.Has(Fp8Tensor::kOut, kForCaller)) step.out = scale(Fp8Slot::kOut);
  for (const Fp8Row& row : table_)
    if (row.stored()) step.stored[static_cast<std::size_t>(row.tensor)] = Payload(row);
  step.out_16 = {buffers_.out_16.get(), spec_.dtypes.out};
  return step;
}

}  // namespace cppool::kernels
