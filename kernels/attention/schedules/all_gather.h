// All ranks' keys and values at once: the rank's own block is attended to while the others' are gathered.
#pragma once

#include <memory>

#include "kernels/attention/schedule.h"
#include "kernels/runtime.h"
#include "kernels/attention/schedules/whole_tensors.h"

namespace cppool::kernels {

class AllGatherSchedule : public Schedule {
 public:
  AllGatherSchedule(cppool_runtime* runtime, AttentionKernels& kernels, const AttentionSpec& spec,
                    Group world);
  void Forward(const AttentionTensors&) override;
  void Backward(const AttentionTensors&) override;

 private:
  void Zero(void* data, std::size_t bytes) { Check(rt_, rt_->fill(rt_, data, 0, bytes, rt_->stream)); }
  std::size_t QueryElements(int dim) const { return rows_q_ * shape_.heads * dim; }
  // Gathers k and v of all ranks into k_ and v_, on the communication stream, after what the main stream has
  // so far.
  void StartGather(const char* stage, const AttentionTensors&);

  cppool_runtime* rt_;
  AttentionKernels& kernels_;
  AttentionSpec spec_;
  Group world_;
  KernelShape shape_;
  std::int64_t rows_q_ = 0, rows_kv_ = 0;  // of this rank's tokens

  Stream comm_;
  WholeTensors whole_;
  Event main_ready_, gathered_, gradients_ready_, reduced_;
  // This rank's queries with its own keys, with the others' keys as gathered, and with all gathered keys.
  std::unique_ptr<BlockPlan> own_, others_, all_;

  Buffer k_, v_;  // [world * rows_kv, kv_heads, dim]
  Buffer accumulator_, delta_, dq_accumulator_;
  // This rank's contribution to everybody's gradients, fp32 [world * rows_kv, kv_heads, dim].
  Buffer dk_, dv_;
  Buffer dk_sum_, dv_sum_;  // fp32 [rows_kv, kv_heads, dim]
};

}  // namespace cppool::kernels
