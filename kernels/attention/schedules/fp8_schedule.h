// A step in fp8 around a schedule that moves and attends: what is quantized before and after it, with which
// scales. The schedule itself moves payloads (fp8_operands.h makes what kernels read of them).
//
// Amaxes are maxima over all ranks that share the tokens, also where heads are exchanged within smaller
// groups, so every rank has the same scales. Results come from the kernels in 16 bits, and those that the
// recipe has in fp8 are cast from there.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/attention/schedule.h"
#include "kernels/attention/schedules/fp8_operands.h"
#include "kernels/memory_list.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

struct Fp8Use {
  Fp8Use(const AttentionSpec& spec, int world_size, int rank);

  Fp8Recipe recipe;
  bool training;
  Layout queries, keys;                       // of this rank's tokens
  std::int64_t q_row, k_row, v_row, out_row;  // elements of a row

  bool per_tensor() const { return !InBlocks(recipe); }
  bool delayed() const { return recipe.scaling_mode == ScalingMode::kDelayed; }
  bool backward() const { return training && recipe.bwd; }
  // Outputs that leave as payloads, or pass through one on the way.
  bool casts_out() const { return delayed() || recipe.mha || out_of_delta_is_payload(); }
  bool out_is_payload() const { return delayed() || recipe.mha; }
  bool out_of_delta_is_payload() const { return delayed() || (per_tensor() && backward() && !recipe.f16_o); }
  bool keeps_16_bit_out() const { return training && out_is_payload() && !out_of_delta_is_payload(); }
  bool casts_gradients() const { return backward() && (delayed() || recipe.mha); }
  // A step is run to find scales.
  bool calibrates() const { return delayed() || (per_tensor() && backward()); }
};

struct Fp8Buffers {
  Buffer q, k, v, dout, out, dq, dk, dv;  // payloads
  Buffer out_16;                          // O for D, where `out` itself is made from a payload
  Buffer delta;                           // fp32 [rows_q, heads]
  Buffer scales;                          // Fp8Scale by slot
  Buffer amaxes;                          // fp32 by slot

  void List(const AttentionSpec& spec, const Fp8Use& use, MemoryList& list);
};

class Fp8Schedule : public Schedule {
 public:
  // `group`: the ranks that share the tokens. Stages are marked `stage_prefix` + "forward/fp8 casts" and so
  // on. `one_step`: Forward comes once, after Prepare with the same tensors and before Backward: it does not
  // repeat what Prepare has computed.
  Fp8Schedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec, Group group,
              std::unique_ptr<Schedule> inner, std::string stage_prefix, bool one_step);
  // Quantizes what arrives as a payload (fp8_mha), and runs a step that finds the scales of dS and the
  // delayed ones: those that a history of steps with the same inputs leaves. Outputs are overwritten.
  void Prepare(const AttentionTensors&) override;
  void Forward(const AttentionTensors&) override;
  void Backward(const AttentionTensors&) override;
  Fp8Step Fp8() const override;

 private:
  Fp8Scale* scale(Fp8Slot slot) const { return buffers_.scales.get<Fp8Scale>() + static_cast<int>(slot); }
  float* amax(Fp8Slot slot) const { return buffers_.amaxes.get<float>() + static_cast<int>(slot); }
  TensorRef Payload(const Buffer& buffer, Fp8Slot slot) const {
    return {buffer.get(), FormatOf(slot), &scale(slot)->inverse};
  }
  const TokenRows& rows(bool of_queries) const { return of_queries ? *query_rows_ : *key_rows_; }
  Fp8Ops& fp8() const { return kernels_.ops->fp8(); }
  void Mark(const char* pass);
  void EndMarks() { Check(rt_, rt_->mark(rt_, rt_->stream, nullptr)); }

  // A tensor of this rank that shares a slot with others.
  struct Part {
    bool of_queries;
    std::int64_t columns;
    TensorRef tensor;
    const Buffer* payload;
  };
  // Makes the slot's scale from the amax of all parts on all ranks.
  void FindScale(Fp8Slot slot, std::initializer_list<Part> parts);
  void Reduce(Fp8Slot slot);  // from the ranks' amaxes to the scale
  void Cast(Fp8Slot slot, std::initializer_list<Part> parts);
  void Dequantize(Fp8Slot slot, std::initializer_list<Part> parts);

  void QuantizeInputs(const AttentionTensors&, bool find_scales);
  void QuantizeDout(const AttentionTensors&, bool find_scales);
  AttentionTensors Inner(const AttentionTensors&) const;
  void MakeDelta(const AttentionTensors&, bool from_payload);
  void Calibrate(const AttentionTensors&);

  cppool_runtime* rt_;
  RankKernels& kernels_;
  AttentionSpec spec_;
  Group group_;
  std::unique_ptr<Schedule> inner_;
  std::string prefix_;
  bool one_step_;
  bool attended_ = false;  // the outputs are those of Calibrate
  Fp8Use use_;
  std::unique_ptr<TokenRows> query_rows_, key_rows_;
  Fp8Buffers buffers_;
  TensorRef out_of_delta_, dout_of_delta_;
};

}  // namespace cppool::kernels
