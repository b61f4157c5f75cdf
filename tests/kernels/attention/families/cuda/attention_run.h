// Runs a problem with the attention kernels of a GPU, in one call or in several, and compares all outputs
// with fp64. What needs Catch2 is here: attention_speed links reference.h without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/kernels/attention/families/cuda/reference.h"

namespace cppool::kernels::test {

// Whether there is a GPU. Warns that the test is skipped where there is none.
bool HaveDevice();

struct Dims {
  int qk, v;
};
inline constexpr Dims kDims[] = {{64, 64}, {128, 128}, {192, 128}, {128, 64}, {256, 256}};

KernelShape Shape(Dims dims, Dtype dtype, int heads, int kv_heads);

// `batch` sequences without padding, all with the same band.
Problem Global(const KernelShape& shape, QkvFormat format, std::int64_t batch, std::int64_t seqlen_q,
               std::int64_t seqlen_kv, Band band);

// Runs the test case that calls it with each family that this machine's GPUs have.
const AttentionFamily& EachFamily();

// Runs forward and backward, with one call per part of the keys for out, dq and dbias, and one per part of
// the queries for dk and dv.
Outputs Run(const Device& device, const Problem& problem, const Inputs& inputs,
            const std::vector<Layout>& key_parts, const std::vector<Layout>& query_parts);

// Runs random inputs, with queries and keys in `parts` parts each, and checks all outputs.
void RunAndExpect(const Device& device, const Problem& problem, std::size_t parts = 1);

}  // namespace cppool::kernels::test
