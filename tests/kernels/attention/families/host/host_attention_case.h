// Runs a problem, divided into parts, with the host's attention kernels and compares the results with
// attention in fp64.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/spec.h"

namespace cppool::test {

struct Problem {
  kernels::KernelShape shape;
  // Parts of queries and of keys, each in its own buffer; the kernels are called for every pair of parts.
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

// The problem of a spec, with the queries divided like those of `query_parts` ranks and the keys like those
// of `key_parts` ranks.
Problem MakeProblem(kernels::KernelShape shape, const kernels::AttentionSpec& spec, int query_parts,
                    int key_parts);

// Runs forward and backward with random tensors and checks out, lse, max_logit, dq, dk, dv, and if present
// dbias and d_softmax_offset. Rows without a token are NaN in the inputs, and must not be written in the
// outputs.
void RunAndCheck(const Problem& problem, unsigned seed);

}  // namespace cppool::test
