// All ranks' keys and values at once: the rank's own block is attended to while the others' are gathered.
#pragma once

#include <memory>
#include <vector>

#include "kernels/attention/schedule.h"
#include "kernels/attention/schedules/block_attention.h"
#include "kernels/attention/schedules/whole_tensors.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// What a rank does, from the spec and its place alone.
struct AllGatherUse {
  AllGatherUse(const AttentionSpec& spec, const AttentionFamily& family, int world_size, int rank);

  TensorDtypes moved;  // in which tensors are gathered
  int world_size;
  std::int64_t rows_q, rows_kv;  // of this rank's tokens
  std::vector<Band> bands;
  // This rank's keys, the others' as gathered, and all gathered ones.
  Layout own, others, all;
  BlockUse block;
  bool joint() const { return !block.capabilities().gradients_apart; }
};

struct AllGatherBuffers {
  Buffer k, v;    // [world * rows_kv, kv_heads, dim]
  Buffer delta;   // [rows_q, heads] fp32
  Buffer dk, dv;  // this rank's contribution to everybody's gradients, fp32 [world * rows_kv, kv_heads, dim]
  Buffer dk_sum, dv_sum;  // fp32 [rows_kv, kv_heads, dim]

  void List(const AllGatherUse& use, MemoryList& list);
};

// Declares all that the rank holds, and what its plans take.
void ListAllGather(const AttentionSpec& spec, const AllGatherUse& use, AllGatherBuffers& gather,
                   BlockBuffers& block, WholeBuffers& whole, MemoryList& list);
void ListAllGatherPlans(const AllGatherUse& use, MemoryList& list);

class AllGatherSchedule : public Schedule {
 public:
  AllGatherSchedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec, Group world);
  void Forward(const AttentionTensors&) override;
  void Backward(const AttentionTensors&) override;
  Fp8Step Fp8() const override {
    Fp8Step step;
    step.operands = attention_.quantized();
    return step;
  }

 private:
  const KernelShape& shape() const { return use_.block.request.shape; }
  void Zero(void* data, std::size_t bytes) { Check(rt_, rt_->fill(rt_, data, 0, bytes, rt_->stream)); }
  std::size_t QueryElements(int dim) const {
    return static_cast<std::size_t>(use_.rows_q * spec_.heads * dim);
  }
  // Gathers k and v of all ranks on the communication stream, after what the main stream has so far.
  void StartGather(const char* stage, const AttentionTensors&);
  // The keys and values that a call reads: this rank's own, or the gathered ones.
  void UseOwn(const AttentionTensors&, BackwardArgs&) const;
  void UseGathered(const AttentionTensors&, BackwardArgs&) const;
  // Starts the sums of the keys' gradients over the ranks, and then of dbias, on the communication stream.
  void StartSums(const AttentionTensors&);

  cppool_runtime* rt_;
  RankKernels& kernels_;
  AttentionSpec spec_;
  Group world_;
  AllGatherUse use_;

  Stream comm_;
  BlockAttention attention_;
  WholeTensors whole_;
  Event main_ready_, gathered_, gradients_ready_, reduced_;
  std::unique_ptr<BlockPlan> own_, others_, all_;
  AllGatherBuffers buffers_;
};

}  // namespace cppool::kernels
