// The exchange of heads within groups of A ranks around a ring over R groups: p2p (A = 1), a2a (R = 1),
// a2a+p2p, and no CP (A = R = 1).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "head_exchange.h"
#include "kernels/attention/schedule.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// World rank of a rank = ring.rank * heads.size + heads.rank.
struct HeadRingGroups {
  Group heads;
  Group ring;
};

class HeadRingSchedule : public Schedule {
 public:
  // Stages are marked `stage_prefix` + "forward/..." and "backward/...".
  HeadRingSchedule(cppool_runtime* runtime, AttentionKernels& kernels, const AttentionSpec& spec,
                   HeadRingGroups groups, std::string stage_prefix = "");
  void Forward(const AttentionTensors&) override;
  void Backward(const AttentionTensors&) override;

 private:
  struct Block {  // keys and values of one ring member's tokens, for the heads of this rank
    const void* k = nullptr;
    const void* v = nullptr;
  };

  int left() const { return (groups_.ring.rank + groups_.ring.size - 1) % groups_.ring.size; }
  int right() const { return (groups_.ring.rank + 1) % groups_.ring.size; }
  bool exchanges() const { return groups_.heads.size > 1; }
  bool rings() const { return groups_.ring.size > 1; }
  std::string StepName(const char* pass, int step) const;
  void Mark(const std::string& stage) { Check(rt_, rt_->mark(rt_, rt_->stream, (prefix_ + stage).c_str())); }
  void EndMarks() { Check(rt_, rt_->mark(rt_, rt_->stream, nullptr)); }

  // The block of ring step `step`; starts the transfer of the next one under it.
  Block RingStep(const char* pass, int step, Block own);
  // Orders everything on the communication stream after what the main stream has so far.
  void CommAfterMain();

  cppool_runtime* rt_;
  AttentionKernels& kernels_;
  AttentionSpec spec_;
  HeadRingGroups groups_;
  std::string prefix_;
  HeadPlan heads_;
  KernelShape shape_;
  std::int64_t rows_q_ = 0, rows_kv_ = 0;    // of this rank's tokens
  std::int64_t block_q_ = 0, block_kv_ = 0;  // of a block after the exchange
  std::size_t k_bytes_ = 0, v_bytes_ = 0;    // of a block

  Stream comm_;
  HeadExchange exchange_;
  Event main_ready_, block_ready_, gradients_ready_, gradients_done_;
  std::vector<Event> attended_;                    // after the main stream's use of the block of each step
  std::vector<std::unique_ptr<BlockPlan>> plans_;  // by ring step

  // After the exchange; unused without one.
  Buffer scratch_, q_, k_, v_, out_, lse_, dout_, dq_, dk_, dv_;
  Buffer k_ring_[2], v_ring_[2];                  // blocks under way
  Buffer accumulator_, delta_;                    // [block_q, heads, dim_v], [block_q, heads]; fp32
  Buffer dq_accumulator_;                         // [block_q, heads, dim_qk]
  Buffer dk_accumulator_[2], dv_accumulator_[2];  // [block_kv, kv_heads, dim], going round with their block
};

}  // namespace cppool::kernels
