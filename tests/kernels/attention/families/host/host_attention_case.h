// A problem, cut into parts, run through the host's attention kernels and compared with attention in fp64.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/spec.h"

namespace cppool::test {

struct Problem {
  kernels::KernelShape shape;
  // Parts of queries and of keys, each a buffer of its own; calls are made for every pair of them.
  std::vector<kernels::Layout> query_parts;
  std::vector<kernels::Layout> key_parts;
  std::vector<kernels::Band> bands;
  std::vector<std::int64_t> length_q, length_kv;  // of each sequence
  kernels::BiasType bias = kernels::BiasType::kNone;
  kernels::BiasShape bias_shape;
  bool offset = false;  // a softmax offset, different for each head
};

kernels::KernelShape Shape(kernels::Dtype dtype, int dim_qk, int dim_v, int heads, int kv_heads);

kernels::AttentionSpec Spec(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                            kernels::AttnMaskType mask, std::int64_t left = -1, std::int64_t right = -1,
                            kernels::QkvFormat format = kernels::QkvFormat::kBshd);

// Every part of a world's layouts, as queries and as keys, of the spec's sequences.
Problem MakeProblem(kernels::KernelShape shape, const kernels::AttentionSpec& spec, int query_parts,
                    int key_parts);

// Runs forward and backward with random tensors and checks out, lse, max_logit, dq, dk and dv, and dbias and the
// offset's gradient where there are any. Inputs are NaN where there is no token, and outputs must stay there what
// they were.
void RunAndCheck(const Problem& problem, unsigned seed);

}  // namespace cppool::test
