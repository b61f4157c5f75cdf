// The attention case: inputs, context-parallel forward and backward, and the comparison of every output with
// the same kernels without CP and with the fp64 oracle. What it reports goes to whoever runs it; it knows no
// requests.
#pragma once

#include <cppool/runtime.h>

#include <string>

#include "kernels/attention/judge.h"
#include "kernels/attention/spec.h"

namespace cppool::kernels {

// Called on the rank's thread.
class AttentionReport {
 public:
  virtual ~AttentionReport() = default;
  // True for each warm-up and each counted iteration, then false.
  virtual bool NextIteration() = 0;
  // Floating-point operations of this rank in a stage ("forward", "backward") of one iteration.
  virtual void Work(const std::string& stage, double flops) = 0;
  virtual void Check(CheckedTensor tensor, const std::string& against, const Verdict& verdict) = 0;
};

// Called by every rank at once, each with its own runtime. The spec has been validated: divisible lengths and
// heads, supported head dims. Stages: "inputs", "forward/...", "backward/...", "reference", "checks". Throws
// RuntimeError.
void RunAttention(cppool_runtime* runtime, const AttentionSpec& spec, bool checks, AttentionReport& report);

// Most device bytes that RunAttention holds on a rank, checks included.
double AttentionBytes(const AttentionSpec& spec, int world_size);

}  // namespace cppool::kernels
