// A step in fp8 around a schedule that moves and attends: what is quantized before and after it, with which
// scales. The schedule itself moves payloads (fp8_operands.h makes what kernels read of them).
//
// Amaxes are maxima over all ranks that share the tokens, also where heads are exchanged within smaller
// groups, so every rank has the same scales. Results come from the kernels in 16 bits, and those that the
// recipe has in fp8 are cast from there.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "kernels/attention/fp8_table.h"
#include "kernels/attention/schedule.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/memory_list.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

struct Fp8Buffers {
  std::array<Buffer, kFp8Tensors> payload;  // of this rank's tokens
  Buffer out_16;                            // O for D, where `out` itself is made from a payload
  Buffer delta;                             // fp32 [rows_q, heads]
  Buffer scales;                            // Fp8Scale by slot
  Buffer amaxes;                            // fp32 by slot

  // `rank` of the `world_size` that share the tokens.
  void List(const AttentionSpec& spec, int world_size, int rank, MemoryList& list);
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
  const Buffer& PayloadOf(Fp8Tensor tensor) const {
    return buffers_.payload[static_cast<std::size_t>(tensor)];
  }
  TensorRef Payload(const Fp8Row& row) const {
    return {PayloadOf(row.tensor).get(), row.format, &scale(*row.slot)->inverse};
  }
  const TokenRows& rows(const Fp8Row& row) const { return row.of_queries() ? *query_rows_ : *key_rows_; }
  Fp8Ops& fp8() const { return kernels_.ops->fp8(); }
  void Mark(const char* pass);
  void EndMarks() { Check(rt_, rt_->mark(rt_, rt_->stream, nullptr)); }

  // Makes the slot's scale, which has a row, from the ranks' amaxes.
  void Reduce(Fp8Slot slot);
  // These treat all tensors of the slot, and do nothing where the recipe has none. FindScale makes the slot's
  // scale from their amax on all ranks.
  void FindScale(Fp8Slot slot, const AttentionTensors&);
  void Cast(Fp8Slot slot, const AttentionTensors&);
  void Dequantize(Fp8Slot slot, const AttentionTensors&);
  // Casts; finds the scale first unless the recipe takes that of a step before.
  void Quantize(Fp8Slot slot, const AttentionTensors&);
  bool CastInSteps(Fp8Tensor tensor) const;  // before the schedule

  AttentionTensors Inner(const AttentionTensors&) const;
  void MakeDelta(const AttentionTensors&);
  void Calibrate(const AttentionTensors&);

  cppool_runtime* rt_;
  RankKernels& kernels_;
  AttentionSpec spec_;
  Fp8Table table_;
  Group group_;
  std::unique_ptr<Schedule> inner_;
  std::string prefix_;
  bool one_step_;
  bool attended_ = false;  // the outputs are those of Calibrate
  std::unique_ptr<TokenRows> query_rows_, key_rows_;
  Fp8Buffers buffers_;
  TensorRef out_of_delta_, dout_of_delta_;
};

}  // namespace cppool::kernels
