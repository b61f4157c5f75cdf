#include "kernels/attention/schedules/fp8_schedule.h"

#include <utility>

#include "kernels/attention/problem/row_tiles.h"

namespace cppool::kernels {

Fp8Use::Fp8Use(const AttentionSpec& spec, int world_size, int rank)
    : recipe(*spec.fp8),
      training(spec.training),
      queries(RankLayout(spec.format, spec.queries, world_size, rank)),
      keys(RankLayout(spec.format, spec.keys, world_size, rank)),
      q_row(std::int64_t{spec.heads} * spec.dim_qk),
      k_row(std::int64_t{spec.kv_heads} * spec.dim_qk),
      v_row(std::int64_t{spec.kv_heads} * spec.dim_v),
      out_row(std::int64_t{spec.heads} * spec.dim_v) {}

void Fp8Buffers::List(const AttentionSpec& spec, const Fp8Use& use, MemoryList& list) {
  const auto add = [&](const char* name, bool wanted, std::int64_t rows, std::int64_t columns,
                       std::size_t element, Buffer& to) {
    if (wanted) list.Add(name, static_cast<std::size_t>(rows * columns) * element, to);
  };
  const std::int64_t rows_q = use.queries.rows, rows_kv = use.keys.rows;
  add("payload of q", use.per_tensor(), rows_q, use.q_row, 1, q);
  add("payload of k", use.per_tensor(), rows_kv, use.k_row, 1, k);
  add("payload of v", use.per_tensor(), rows_kv, use.v_row, 1, v);
  add("payload of dout", use.per_tensor() && use.backward(), rows_q, use.out_row, 1, dout);
  add("payload of out", use.casts_out(), rows_q, use.out_row, 1, out);
  add("16-bit out for the backward pass", use.keeps_16_bit_out(), rows_q, use.out_row,
      SizeOf(spec.dtypes.out), out_16);
  add("payload of dq", use.casts_gradients(), rows_q, use.q_row, 1, dq);
  add("payload of dk", use.casts_gradients(), rows_kv, use.k_row, 1, dk);
  add("payload of dv", use.casts_gradients(), rows_kv, use.v_row, 1, dv);
  add("delta of the recipe's out", use.training, rows_q, spec.heads, sizeof(float), delta);
  list.Add("scales", kFp8Slots * sizeof(Fp8Scale), scales);
  list.Add("amaxes", kFp8Slots * sizeof(float), amaxes);
  list.AddTables("rows of the tokens", RowTilesBytes(use.queries) + RowTilesBytes(use.keys));
}

Fp8Schedule::Fp8Schedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec,
                         Group group, std::unique_ptr<Schedule> inner, std::string stage_prefix,
                         bool one_step)
    : rt_(runtime),
      kernels_(kernels),
      spec_(spec),
      group_(group),
      inner_(std::move(inner)),
      prefix_(std::move(stage_prefix)),
      one_step_(one_step),
      use_(spec, group.size, group.rank),
      query_rows_(kernels.ops->Rows(use_.queries, runtime->stream)),
      key_rows_(kernels.ops->Rows(use_.keys, runtime->stream)) {
  MemoryList memory;
  buffers_.List(spec_, use_, memory);
  memory.Allocate(rt_);
  // Payloads of rows without a token travel, too.
  for (const Buffer* payload : {&buffers_.q, &buffers_.k, &buffers_.v, &buffers_.dout, &buffers_.delta}) {
    if (*payload) Check(rt_, rt_->fill(rt_, payload->get(), 0, payload->bytes(), rt_->stream));
  }
}

void Fp8Schedule::Mark(const char* pass) {
  Check(rt_, rt_->mark(rt_, rt_->stream, (prefix_ + pass + "/fp8 casts").c_str()));
}

void Fp8Schedule::Reduce(Fp8Slot slot) {
  if (group_.size > 1) {
    Check(rt_, rt_->all_reduce(rt_, amax(slot), amax(slot), 1, CPPOOL_FLOAT32, CPPOOL_MAX, group_.comm,
                               rt_->stream));
  }
  fp8().MakeScale(FormatOf(slot), amax(slot), scale(slot), rt_->stream);
}

void Fp8Schedule::FindScale(Fp8Slot slot, std::initializer_list<Part> parts) {
  kernels_.ops->Fill(amax(slot), 0, 1, rt_->stream);
  for (const Part& part : parts)
    fp8().Amax(rows(part.of_queries), part.columns, part.tensor, amax(slot), rt_->stream);
  Reduce(slot);
}

void Fp8Schedule::Cast(Fp8Slot slot, std::initializer_list<Part> parts) {
  for (const Part& part : parts) {
    fp8().Cast(rows(part.of_queries), part.columns, part.tensor, scale(slot),
               {part.payload->get(), FormatOf(slot)}, rt_->stream);
  }
}

void Fp8Schedule::Dequantize(Fp8Slot slot, std::initializer_list<Part> parts) {
  for (const Part& part : parts) {
    fp8().Dequantize(rows(part.of_queries), part.columns, Payload(*part.payload, slot),
                     {const_cast<void*>(part.tensor.data), part.tensor.dtype}, rt_->stream);
  }
}

void Fp8Schedule::QuantizeInputs(const AttentionTensors& t, bool find_scales) {
  const std::initializer_list<Part> parts = {{true, use_.q_row, t.q, &buffers_.q},
                                             {false, use_.k_row, t.k, &buffers_.k},
                                             {false, use_.v_row, t.v, &buffers_.v}};
  if (find_scales) FindScale(Fp8Slot::kQkv, parts);
  Cast(Fp8Slot::kQkv, parts);
}

void Fp8Schedule::QuantizeDout(const AttentionTensors& t, bool find_scales) {
  const std::initializer_list<Part> parts = {{true, use_.out_row, t.dout, &buffers_.dout}};
  if (find_scales) FindScale(Fp8Slot::kDout, parts);
  Cast(Fp8Slot::kDout, parts);
}

AttentionTensors Fp8Schedule::Inner(const AttentionTensors& t) const {
  AttentionTensors inner = t;
  if (use_.per_tensor()) {
    inner.q = Payload(buffers_.q, Fp8Slot::kQkv);
    inner.k = Payload(buffers_.k, Fp8Slot::kQkv);
    inner.v = Payload(buffers_.v, Fp8Slot::kQkv);
    if (use_.backward()) inner.dout = Payload(buffers_.dout, Fp8Slot::kDout);
  }
  if (use_.keeps_16_bit_out()) inner.out = {buffers_.out_16.get(), t.out.dtype};
  if (!t.delta) inner.delta = buffers_.delta.get<float>();
  return inner;
}

void Fp8Schedule::MakeDelta(const AttentionTensors& t, bool from_payload) {
  const AttentionTensors inner = Inner(t);
  out_of_delta_ = from_payload ? Payload(buffers_.out, Fp8Slot::kOut) : TensorRef(inner.out);
  dout_of_delta_ = inner.dout;
  fp8().Delta(*query_rows_, spec_.heads, spec_.dim_v, out_of_delta_, dout_of_delta_,
              buffers_.delta.get<float>(), rt_->stream);
}

void Fp8Schedule::Prepare(const AttentionTensors& t) {
  if (!use_.per_tensor()) return;
  QuantizeInputs(t, true);
  if (use_.backward()) QuantizeDout(t, true);
  if (use_.calibrates()) Calibrate(t);
}

void Fp8Schedule::Calibrate(const AttentionTensors& t) {
  AttentionTensors inner = Inner(t);
  inner_->Forward(inner);
  attended_ = one_step_;
  const std::initializer_list<Part> out = {{true, use_.out_row, inner.out, &buffers_.out}};
  if (use_.out_of_delta_is_payload()) {
    FindScale(Fp8Slot::kOut, out);
    Cast(Fp8Slot::kOut, out);
  }
  if (!use_.backward()) return;
  // From the O of the recipe: where a query sees few keys, dS is little else than the rounding of O.
  if (!t.delta) MakeDelta(t, use_.out_of_delta_is_payload());
  kernels_.ops->Fill(amax(Fp8Slot::kDs), 0, 1, rt_->stream);
  inner.amax_ds = amax(Fp8Slot::kDs);
  inner_->Backward(inner);
  Reduce(Fp8Slot::kDs);
  if (!use_.delayed()) return;
  FindScale(Fp8Slot::kGradients, {{true, use_.q_row, t.dq, &buffers_.dq},
                                  {false, use_.k_row, t.dk, &buffers_.dk},
                                  {false, use_.v_row, t.dv, &buffers_.dv}});
}

void Fp8Schedule::Forward(const AttentionTensors& t) {
  if (use_.per_tensor() && !use_.recipe.mha) {
    Mark("forward");
    QuantizeInputs(t, !use_.delayed());
  }
  const AttentionTensors inner = Inner(t);
  if (!std::exchange(attended_, false)) inner_->Forward(inner);
  if (!use_.casts_out()) return;
  Mark("forward");
  const std::initializer_list<Part> parts = {{true, use_.out_row, inner.out, &buffers_.out}};
  if (!use_.delayed()) FindScale(Fp8Slot::kOut, parts);
  Cast(Fp8Slot::kOut, parts);
  if (use_.out_is_payload()) {
    if (use_.keeps_16_bit_out() && spec_.queries.padded()) {
      Check(rt_, rt_->fill(rt_, t.out.data, 0,
                           static_cast<std::size_t>(use_.queries.rows * use_.out_row) * SizeOf(t.out.dtype),
                           rt_->stream));
    }
    Dequantize(Fp8Slot::kOut, {{true, use_.out_row, t.out, &buffers_.out}});
  }
  EndMarks();
}

void Fp8Schedule::Backward(const AttentionTensors& t) {
  Mark("backward");
  if (use_.per_tensor() && use_.backward() && !use_.recipe.mha) QuantizeDout(t, !use_.delayed());
  if (!t.delta) MakeDelta(t, use_.out_of_delta_is_payload());
  AttentionTensors inner = Inner(t);
  if (use_.per_tensor() && use_.backward()) inner.ds_scale = &scale(Fp8Slot::kDs)->scale;
  inner_->Backward(inner);
  if (!use_.casts_gradients()) return;
  Mark("backward");
  const std::initializer_list<Part> parts = {{true, use_.q_row, t.dq, &buffers_.dq},
                                             {false, use_.k_row, t.dk, &buffers_.dk},
                                             {false, use_.v_row, t.dv, &buffers_.dv}};
  if (!use_.delayed()) FindScale(Fp8Slot::kGradients, parts);
  Cast(Fp8Slot::kGradients, parts);
  Dequantize(Fp8Slot::kGradients, parts);
  EndMarks();
}

Fp8Step Fp8Schedule::Fp8() const {
  Fp8Step step = inner_->Fp8();
  step.delta = buffers_.delta.get<float>();
  step.out_of_delta = out_of_delta_;
  step.dout_of_delta = dout_of_delta_;
  if (use_.per_tensor()) {
    step.qkv = scale(Fp8Slot::kQkv);
    if (use_.backward()) {
      step.dout = scale(Fp8Slot::kDout);
      step.ds = scale(Fp8Slot::kDs);
    }
    if (use_.casts_gradients()) step.gradients = scale(Fp8Slot::kGradients);
  }
  if (use_.out_is_payload()) step.out = scale(Fp8Slot::kOut);
  const auto stored = [&](const Buffer& buffer, Fp8Slot slot) {
    return buffer ? Payload(buffer, slot) : TensorRef{};
  };
  step.stored = {stored(buffers_.q, Fp8Slot::kQkv),        stored(buffers_.k, Fp8Slot::kQkv),
                 stored(buffers_.v, Fp8Slot::kQkv),        stored(buffers_.dout, Fp8Slot::kDout),
                 stored(buffers_.out, Fp8Slot::kOut),      stored(buffers_.dq, Fp8Slot::kGradients),
                 stored(buffers_.dk, Fp8Slot::kGradients), stored(buffers_.dv, Fp8Slot::kGradients),
                 {buffers_.out_16.get(), spec_.dtypes.out}};
  return step;
}

}  // namespace cppool::kernels
