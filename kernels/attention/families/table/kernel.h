// A kernel of cppool/attention.h on one rank: blocks as prepared calls, and their results merged and added
// up.
#pragma once

#include <cppool/attention.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention/families/table/block_calls.h"
#include "kernels/attention/families/table/family.h"
#include "kernels/attention/families/table/prepared_call.h"
#include "kernels/attention/families/table/scratch.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/runtime.h"

namespace cppool::kernels::table {

// A call as it is, and with strides of its own where a trial may want that and the kernel takes it.
struct Prepared {
  std::shared_ptr<PreparedCall> call, strided;
};

class TablePlan : public BlockPlan {
 public:
  std::int64_t pairs() const override { return pairs_; }

  TablePlan(BlockCalls calls, const KernelRequest& asked, std::int64_t pairs, const Layout& query,
            const Layout& key)
      : block(std::move(calls)),
        request(asked),
        rows_q(query.rows),
        rows_kv(key.rows),
        q_step(query.row_step),
        pairs_(pairs) {}

  BlockCalls block;
  KernelRequest request;
  std::vector<Prepared> forward, backward;  // by form
  Buffer forward_tables, backward_tables;   // PassCalls::tables
  std::int64_t rows_q, rows_kv;
  std::int32_t q_step;
  std::unique_ptr<TokenRows> tokens;  // of the queries

 private:
  std::int64_t pairs_;
};

class TableKernel : public AttentionKernel {
 public:
  // The family outlives the kernel.
  TableKernel(cppool_runtime* runtime, const TableFamily& family);
  // Plans of the kernel on CUDA go after the work that uses them.
  ~TableKernel() override;

  bool takes_trials() const override { return true; }
  void AllowTrials() override { trials_ = true; }
  void SetTrial(CallTrial* trial) override { trial_ = trial; }

  void Load(const KernelRequest& request) override;
  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream stream) override;
  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override;
  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override;
  void BackwardBias(const KernelShape&, const BackwardArgs&, const BiasGradient&, cppool_stream) override;

 private:
  bool Has(std::uint32_t feature) const { return (kernel_.features & feature) != 0; }
  // Returns whether the kernel's lse has another base or another order than cppool's.
  bool ConvertsLse() const {
    return Has(CPPOOL_ATTENTION_LSE_BASE2) || Has(CPPOOL_ATTENTION_LSE_HEADS_FIRST);
  }

  bool WritesPayload(const ForwardArgs& args) const {
    return args.p_scale != 0 && Has(CPPOOL_ATTENTION_FP8_OUT);
  }

  std::vector<Prepared> Prepare(const PassCalls& pass);
  Buffer Upload(const std::vector<std::int32_t>& tables, cppool_stream stream);
  // One for all plans, whose calls are on one stream.
  void GrowWorkspace(std::size_t bytes);
  void Run(const Prepared& prepared, const CallArea& area, const CallData& data, cppool_stream stream);

  // One fp32 value per row of a call, as the kernel has it and as the block has it: lse, delta or max_logit.
  struct RowValues {
    CallTensor which;
    void* of_call;
    float* of_block;  // of the call's first row
    float factor = 1;
  };
  // Between the two; rows of no sequence are not touched.
  void CopyValues(const RowValues& values, bool to_call, const TablePlan& plan, const CallForm& form,
                  const BlockCall& call, cppool_stream stream);
  // Where a call's lse is when the kernel has it in its own order or base: at the beginning of `scratch`,
  // packed, or where the rows of the block are.
  void* OwnLse(const BlockCall& call, const KernelShape& shape, float* scratch) const;

  void RunForward(const TablePlan& plan, const BlockCall& call, bool fp32, const ForwardArgs& args,
                  TensorOut out, float* lse, const Scratch& scratch, cppool_stream stream);
  void RunForward(const TablePlan& plan, const Layer& layer, bool fp32, const ForwardArgs& args,
                  TensorOut out, float* lse, const Scratch& scratch, cppool_stream stream);
  void RunBackward(const TablePlan& plan, const BlockCall& call, bool fp32, const BackwardArgs& args,
                   const TensorOut& dq, const TensorOut& dk, const TensorOut& dv, const Scratch& scratch,
                   cppool_stream stream);
  // Adds what the call has left in the scratch memory.
  void AddBias(const CallForm& form, const BlockCall& call, const BiasGradient& gradient,
               const Scratch& scratch, cppool_stream stream);
  void Zero(void* data, std::int64_t elements, Dtype dtype, cppool_stream stream) {
    Check(rt_, rt_->fill(rt_, data, 0, static_cast<std::size_t>(elements) * SizeOf(dtype), stream));
  }

  cppool_runtime* rt_;
  const TableFamily& family_;
  const cppool_attention_kernel& kernel_;
  CallAsker asker_;
  std::unique_ptr<TensorOps> ops_;
  std::vector<Prepared> prepared_;
  Buffer workspace_;
  bool trials_ = false;
  CallTrial* trial_ = nullptr;
};

}  // namespace cppool::kernels::table
