// The exchange of heads within groups of A ranks around a ring over R groups: p2p (A = 1), a2a (R = 1),
// a2a+p2p, and no CP (A = R = 1).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/schedules/head_exchange.h"
#include "kernels/attention/schedule.h"
#include "kernels/runtime.h"
#include "kernels/attention/schedules/whole_tensors.h"

namespace cppool::kernels {

// World rank of a rank = ring.rank * heads.size + heads.rank.
struct HeadRingGroups {
  Group world;
  Group heads;
  Group ring;
};

class HeadRingSchedule : public Schedule {
 public:
  // Stages are marked `stage_prefix` + "forward/..." and "backward/...", with the schedule's name.
  HeadRingSchedule(cppool_runtime* runtime, AttentionKernels& kernels, const AttentionSpec& spec,
                   HeadRingGroups groups, std::string stage_prefix = "");
  void Forward(const AttentionTensors&) override;
  void Backward(const AttentionTensors&) override;

 private:
  struct Block {  // keys and values of one ring member's tokens, for the heads of this rank
    const void* k = nullptr;
    const void* v = nullptr;
  };
  // A step of the ring: everybody may attend to the block of the member `distance` before.
  struct Step {
    int distance = 0;
    bool serves = false;              // the member `distance` after this one attends to this one's block
    std::unique_ptr<BlockPlan> plan;  // NULL: this member sees nothing of the other's block
    Event arrived;                    // the block is here
    Event returned;  // the block's gradients are with its owner, and those of this member's block are here

    bool attends() const { return plan != nullptr; }
  };

  bool exchanges() const { return groups_.heads.size > 1; }
  std::size_t QueryElements(int dim) const { return block_q_ * shape_.heads * dim; }
  std::size_t KeyElements(int dim) const { return block_kv_ * shape_.kv_heads * dim; }
  void PlanSteps();
  void AllocateBuffers();

  int Before(const Step&) const;  // the ring member that this one takes the step's block from
  int After(const Step&) const;
  std::string StageName(const char* pass, const std::string& what) const;  // "forward/p2p step 2 of 4"
  std::string StepName(const Step&) const;
  void Mark(const char* pass, const std::string& what) {
    Check(rt_, rt_->mark(rt_, rt_->stream, StageName(pass, what).c_str()));
  }
  void EndMarks() { Check(rt_, rt_->mark(rt_, rt_->stream, nullptr)); }
  void Zero(void* data, std::size_t bytes) { Check(rt_, rt_->fill(rt_, data, 0, bytes, rt_->stream)); }

  // Orders everything on one stream after what the other has so far.
  void CommAfterMain();
  void MainAfterComm();
  Block BlockOf(std::size_t index, Block own) const;
  // Starts the transfer of the next step's block, under the work of this step.
  void FetchNext(const char* pass, std::size_t index, Block own);
  // Starts the way home of the gradients of the step's block.
  void ReturnGradients(std::size_t index);
  // Adds what the step brought to the gradients of this member's block.
  void CollectGradients(std::size_t index);

  cppool_runtime* rt_;
  AttentionKernels& kernels_;
  AttentionSpec spec_;
  HeadRingGroups groups_;
  std::string prefix_;
  HeadPlan heads_;
  KernelShape shape_;
  std::int64_t rows_q_ = 0, rows_kv_ = 0;    // of this rank's tokens
  std::int64_t block_q_ = 0, block_kv_ = 0;  // of a block after the exchange

  Stream comm_;
  HeadExchange exchange_;
  WholeTensors whole_;
  Event main_done_, comm_done_;
  // Those in which any member of the ring attends, so that all members go through the same transfers in the same
  // order; the first is the own block's.
  std::vector<Step> steps_;
  std::size_t last_attended_ = 0;  // index into steps_
  bool serves_ = false;            // in any step: others add to the gradients of this member's block
  bool sums_gradients_ = false;    // dk and dv of this member's block are sums, in fp32 until the end

  // After the exchange; unused without one.
  Buffer scratch_, q_, k_, v_, out_, lse_, dout_, dq_, dk_, dv_;
  Buffer k_slot_[2], v_slot_[2];    // others' blocks, by turns
  Event slot_read_[2];              // the main stream is done with the slot's last block, of whichever step
  Buffer accumulator_, delta_;      // [block_q, heads, dim_v], [block_q, heads]; fp32
  Buffer dq_accumulator_;           // [block_q, heads, dim_qk]
  Buffer dk_sum_, dv_sum_;          // of this member's block: [block_kv, kv_heads, dim], fp32
  Buffer dk_part_[2], dv_part_[2];  // this member's part in others' gradients, by turns
  Buffer dk_taken_, dv_taken_;      // another member's part in this one's
};

}  // namespace cppool::kernels
