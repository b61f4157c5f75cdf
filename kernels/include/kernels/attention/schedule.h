// The context-parallel schedules, written once over the runtime seam. One object per rank and case; its
// thread is the rank's.
//
//   p2p         a ring: in step s a rank attends to the keys of the rank s before it, the next
//               block under way meanwhile (Liu et al. 2023, Ring Attention). A block comes from its
//               owner, and its gradients go back there, so that a step that a mask leaves without
//               work moves nothing;
//   a2a         heads instead of tokens: an all-to-all gives every rank all tokens of its heads
//               (Jacobs et al. 2023, DeepSpeed Ulysses);
//   a2a+p2p     all-to-all within groups of a2a_size adjacent ranks, the ring across the groups (Fang
//               and Zhao 2024, USP): world rank = ring rank * a2a_size + rank in the exchange;
//   all_gather  keys and values of all ranks at once; their gradients are reduce-scattered (as in
//               Llama 3's training).
//
// The first three are one schedule, an exchange over A ranks around a ring over R: p2p is A = 1, a2a is
// R = 1, no CP is A = R = 1.
#pragma once

#include <cppool/runtime.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/check_kernels.h"
#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/fp8_table.h"
#include "kernels/attention/spec.h"
#include "kernels/attention/tensor.h"

namespace cppool::kernels {

// A rank's tokens in device memory, laid out as RankLayout says. Owned by the caller.
struct AttentionTensors {
  TensorRef q;           // [rows_q, heads, dim_qk]
  TensorRef k;           // [rows_kv, kv_heads, dim_qk]
  TensorRef v;           // [rows_kv, kv_heads, dim_v]
  TensorRef dout;        // [rows_q, heads, dim_v]; the gradients' data is NULL when not training
  TensorOut out;         // [rows_q, heads, dim_v]
  float* lse = nullptr;  // [rows_q, heads]
  TensorOut dq, dk, dv;
  // What belongs to no token is whole on every rank, inputs and (summed over all ranks) results alike.
  TensorRef bias;                         // [batch or 1, heads or 1, seqlen_q or 1, seqlen_kv], by positions
  const float* softmax_offset = nullptr;  // [heads]
  TensorOut dbias;                        // as bias; NULL: not wanted
  float* d_softmax_offset = nullptr;      // [heads]
  float* max_logit = nullptr;             // [heads]
  // [rows_q, heads]: rowsum(dO * O), of the O and dO that the recipe says. NULL: the schedule makes it from
  // out and dout.
  const float* delta = nullptr;
  // These mean what they mean in Fp8Casts.
  const float* ds_scale = nullptr;
  float* amax_ds = nullptr;
};

// An operand as a rank's kernel calls read it.
struct QuantizedOperand {
  Operand operand = Operand::kQ;
  InputTensor tensor = InputTensor::kQ;
  std::optional<MxAxis> axis;               // quantized in blocks along it; else by one scale
  TensorRef payload;                        // [layout.rows, heads, dim]
  const std::uint8_t* exponents = nullptr;  // of blocks: as in MxTensor
  // What the kernel got: in bf16, in blocks or without fp8_bwd with the scale in them. No data: the payload.
  TensorRef values;
  Layout layout;
  int head0 = 0, heads = 0, dim = 0;
};

// What the last step in fp8 has used, for checks. Device memory, valid while the schedule lives; NULL: there
// is none.
struct Fp8Step {
  std::vector<QuantizedOperand> operands;  // of the last calls of kernels
  const float* delta = nullptr;            // [rows_q, heads], made from these two
  TensorRef out_of_delta, dout_of_delta;
  const Fp8Scale *qkv = nullptr, *dout = nullptr, *ds = nullptr;
  const Fp8Scale *out = nullptr, *gradients = nullptr;  // of results that leave as payloads
  // A rank's own tokens as the recipe stores them, by one scale each: rows as in AttentionTensors. No data:
  // not stored so.
  std::array<TensorRef, kFp8Tensors> stored;
  TensorRef out_16;  // O for D, where `out` leaves as a payload and D has it in 16 bits
};

class Schedule {
 public:
  virtual ~Schedule() = default;
  // Enqueues the pass on the runtime's main stream (and a stream of its own for communication, joined again
  // at the end). Stages are marked "forward/..." and "backward/...".
  virtual void Forward(const AttentionTensors&) = 0;
  // After Forward with the same tensors: uses its out and lse, and what it kept.
  virtual void Backward(const AttentionTensors&) = 0;

  // Before the first pass with these inputs: what a recipe does outside of a step. Enqueued on the main
  // stream.
  virtual void Prepare(const AttentionTensors&) {}
  virtual Fp8Step Fp8() const { return {}; }
};

// What spec.transfers means on the runtime's world: kComm or kPeer. The same on all ranks. Throws
// RuntimeError (CPPOOL_UNSUPPORTED) when copies are asked for and there are none.
Transfers TransfersOf(cppool_runtime* runtime, const AttentionSpec& spec);

// Why the forward pass of the schedule cannot be one launch (spec.launches), whatever the runtime; nothing
// when it can.
std::optional<std::string> WhyNotOneLaunch(const AttentionFamily& family, const AttentionSpec& spec);
// What spec.launches means on the runtime's world: kSteps or kOne; with one rank kSteps. The same on all
// ranks. Throws RuntimeError (CPPOOL_UNSUPPORTED) when one launch is asked for and cannot be.
Launches LaunchesOf(cppool_runtime* runtime, const AttentionFamily& family, const AttentionSpec& spec);

// The schedule of spec.comm on the runtime's world. All of its memory is allocated here, and its kernels are
// loaded. `kernels` outlives it.
std::unique_ptr<Schedule> MakeSchedule(cppool_runtime* runtime, RankKernels& kernels,
                                       const AttentionSpec& spec);
// The same kernels without CP: every token on this rank, no communication. Its stages are marked
// "reference/...". For one step: each of its methods is called once, with the same tensors.
std::unique_ptr<Schedule> MakeNoCpSchedule(cppool_runtime* runtime, RankKernels& kernels,
                                           const AttentionSpec& spec);

// Why the family cannot do a block that some rank of the schedule has, or the run without CP; nothing when it
// can do all. For a request that the family does not refuse.
std::optional<std::string> ScheduleRefusal(const AttentionFamily& family, const AttentionSpec& spec,
                                           int world_size);

// What a rank takes of device memory, in bytes.
struct MemoryUse {
  double buffers = 0;  // exactly what is allocated
  double tables = 0;   // the most that tables of plans and of rows take
  double total() const { return buffers + tables; }
};
// Returns what a schedule holds on the rank that holds most, and what the reference without CP does.
MemoryUse ScheduleMemory(const AttentionFamily& family, const AttentionSpec& spec, int world_size);
MemoryUse NoCpMemory(const AttentionFamily& family, const AttentionSpec& spec);

}  // namespace cppool::kernels
