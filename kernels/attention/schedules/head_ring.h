// The exchange of heads within groups of A ranks around a ring over R groups: p2p (A = 1), a2a (R = 1),
// a2a+p2p, all_gather (A = 1, others' blocks at once in the forward pass), and no CP (A = R = 1).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/schedule.h"
#include "kernels/attention/schedules/head_exchange.h"
#include "kernels/attention/schedules/head_ring_use.h"
#include "kernels/attention/schedules/whole_tensors.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// World rank of a rank = ring.rank * heads.size + heads.rank.
struct HeadRingGroups {
  Group world;
  Group heads;
  Group ring;
  bool ring_by_kernels = false;  // its transfers are kernels on the device
};

class HeadRingSchedule : public Schedule {
 public:
  // Stages are marked `stage_prefix` + "forward/..." and "backward/...", with the schedule's name.
  HeadRingSchedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec,
                   HeadRingGroups groups, std::string stage_prefix = "");
  void Forward(const AttentionTensors&) override;
  void Backward(const AttentionTensors&) override;
  Fp8Step Fp8() const override {
    Fp8Step step;
    step.operands = attention_.quantized();
    return step;
  }

 private:
  struct Block {  // keys and values of one ring position's tokens, for the heads of this rank
    TensorRef k;
    TensorRef v;
  };
  // A step of the ring (RingSteps::Step), as this rank takes part in it.
  struct Step {
    int distance = 0;
    bool serves = false;              // the position `distance` after this one attends to this one's block
    bool attends = false;             // this rank sees something of the other's block
    std::unique_ptr<BlockPlan> plan;  // NULL: no call on the block alone
    Event arrived;                    // the block is here
    Event returned;  // the block's gradients are with its owner, and those of this rank's block are here
    std::size_t taken = 0;  // which of dk_taken and dv_taken those are

    bool moves() const { return attends || serves; }
  };

  HeadRingSchedule(cppool_runtime* runtime, RankKernels& kernels, const AttentionSpec& spec,
                   HeadRingGroups groups, const RingSteps& ring, std::string stage_prefix);
  bool exchanges() const { return use_.exchanges; }
  bool gathers() const { return spec_.comm == CpCommType::kAllGather && groups_.ring.size > 1; }
  const KernelShape& shape() const { return use_.block.request.shape; }

  int Before(const Step&) const;  // the ring position that this one takes the step's block from
  int After(const Step&) const;
  std::string StageName(const char* pass, const std::string& what) const;  // "forward/p2p step 2 of 4"
  std::string StepName(const Step&) const;
  // These are on the main stream where no other one is named.
  void Mark(const char* pass, const std::string& what) { Mark(pass, what, rt_->stream); }
  void Mark(const char* pass, const std::string& what, cppool_stream stream) {
    Check(rt_, rt_->mark(rt_, stream, StageName(pass, what).c_str()));
  }
  void EndMarks() { EndMarks(rt_->stream); }
  void EndMarks(cppool_stream stream) { Check(rt_, rt_->mark(rt_, stream, nullptr)); }
  void Zero(void* data, std::size_t bytes) { Zero(data, bytes, rt_->stream); }
  void Zero(void* data, std::size_t bytes, cppool_stream stream) {
    Check(rt_, rt_->fill(rt_, data, 0, bytes, stream));
  }
  std::size_t SlotOf(std::size_t index) const { return (index - 1) % use_.slots; }

  // Orders everything on one stream after what the other has so far.
  void CommAfter(cppool_stream stream);
  void MainAfterComm();
  Block BlockOf(std::size_t index, Block own) const;
  float* SlotScale(std::size_t slot, std::size_t of_v) const;  // NULL: blocks have no scales
  // Starts the transfers that can go on under the work of this step: of the next block, or in the first step
  // of all that have a slot of their own.
  void FetchAhead(const char* pass, std::size_t index, Block own);
  void Fetch(const char* pass, std::size_t index, Block own);
  // The forward pass in one launch: starts all transfers of keys and values, and returns what arrives.
  ArrivingKeys StartArrivals(Block own);
  // Gradients of the step's block, or of a part of the own one.
  struct Call {
    const BlockPlan* plan = nullptr;
    Block block;
    GradientPass query, key;
    float *dk = nullptr, *dv = nullptr;  // accumulators; NULL: the results of the pass
    cppool_stream stream = nullptr;
  };
  void AddGradients(const AttentionTensors&, BackwardArgs&, const Call&);
  // Starts the way home of the gradients of the step's block, which `stream` has made.
  void ReturnGradients(std::size_t index, cppool_stream stream);
  // Adds what others have returned to the gradients of this rank's block, in the order of the ranks, and
  // rounds the sum. `dim`: of the tensor.
  void SumGradients(const Buffer& own, const Buffer& taken, int dim, const TensorOut& result);

  cppool_runtime* rt_;
  RankKernels& kernels_;
  AttentionSpec spec_;
  HeadRingGroups groups_;
  std::string prefix_;
  HeadRingUse use_;

  Stream comm_;
  // Every second call of a backward pass runs here, so that it takes the multiprocessors that the one before
  // no longer fills. NULL: all run on the main stream.
  std::unique_ptr<Stream> beside_;
  BlockAttention attention_;
  HeadExchange exchange_;
  WholeTensors whole_;
  Event ready_, comm_done_;
  std::vector<Event> slot_read_;  // by slot: its last block is no longer read
  std::vector<Step> steps_;
  std::unique_ptr<BlockPlan> gathered_;         // of others' blocks; NULL: no call on them at once
  std::unique_ptr<BlockPlan> arriving_;         // of these and its own; NULL: the steps are launches
  std::unique_ptr<BlockPlan> later_, earlier_;  // of the parts of the own block; NULL: it is not divided
  HeadRingBuffers buffers_;
};

}  // namespace cppool::kernels
