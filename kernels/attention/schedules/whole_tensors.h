// What belongs to no token and is whole on every rank: the bias, ALiBi's slopes, the softmax offset and
// max_logit, with their gradients. The same around the kernel calls of every schedule.
#pragma once

#include "kernels/attention/schedule.h"
#include "kernels/attention/schedules/block_attention.h"
#include "kernels/memory_list.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

struct WholeBuffers {
  Buffer slopes;  // [heads here]
  Buffer total;   // [rows_q, heads here]: the logarithm of the whole denominator
  Buffer dbias;   // fp32, as the bias
  // For a bias without an axis of queries: [batch, heads here, seqlen_kv], summed to dbias in one fixed
  // order.
  Buffer dbias_parts;

  // `shape`: the heads of this rank's calls; rows_q: of their queries.
  void List(const AttentionSpec& spec, const KernelShape& shape, std::int64_t rows_q, MemoryList& list);
};

class WholeTensors {
 public:
  // rows_q: of the queries of `attention`'s calls. Sums and maxima are taken over `world` on the
  // communication stream. What it is given outlives it.
  WholeTensors(cppool_runtime* runtime, TensorOps& ops, BlockAttention& attention, const AttentionSpec& spec,
               std::int64_t rows_q, Group world, cppool_stream comm_stream);
  WholeBuffers& buffers() { return buffers_; }
  // After the buffers are allocated. Waits for the main stream when there are slopes to upload.
  void Prepare();

  // Completes the arguments of a pass's calls, all but the plan and what comes with it.
  void BeginForward(const AttentionTensors&, ForwardArgs&);
  void EndForward(const AttentionTensors&);  // max_logit over all ranks

  // Follows Delta; args.lse and args.delta are of all of this rank's queries.
  void BeginBackward(const AttentionTensors&, BackwardArgs&);
  // After the block's other gradients, with their arguments. Adds the block's part of dbias, unless Backward
  // has.
  void AddBlock(const AttentionTensors&, const BackwardArgs&);
  // After the last block: starts the sums over all ranks, which the main stream sees after EndBackward.
  void StartSums(const AttentionTensors&);
  void EndBackward(const AttentionTensors&);

 private:
  bool has_offset() const { return spec_.softmax != SoftmaxType::kVanilla; }
  BiasArgs Bias(const AttentionTensors&) const;
  BiasGradient GradientOfBias() const;
  const float* offset(const AttentionTensors&) const;  // [heads here]; NULL: the softmax has none
  // Orders the communication stream after the main stream's work so far.
  void CommAfterMain();
  void Reduce(float* data, std::int64_t count, cppool_reduce reduce);

  cppool_runtime* rt_;
  TensorOps& ops_;
  BlockAttention& attention_;
  AttentionSpec spec_;
  KernelShape shape_;
  std::int64_t rows_q_;
  Group world_;
  cppool_stream comm_;
  Event ready_, reduced_;
  BiasExtent bias_;
  WholeBuffers buffers_;
};

}  // namespace cppool::kernels
