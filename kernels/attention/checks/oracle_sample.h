// Selects the parts of a case that the oracle computes: everything if that is cheap, otherwise a sample. For
// tensors that sum over sequences or heads, the sample contains all terms of at least one sum, if that is not
// too much work.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/spec.h"

namespace cppool::kernels {

// One sequence and one key/value head with its query heads: one call of the oracle.
struct OraclePair {
  int sequence;
  int kv_head;
  bool operator==(const OraclePair&) const = default;
};

// A part of dbias, and the pairs that add to it, which are consecutive in OracleSample::pairs. Other pairs do
// not add to it.
struct BiasUnit {
  std::size_t begin, end;       // indices of the pairs
  std::int64_t batch, head;     // first index of the part in dbias
  std::int64_t heads, queries;  // size of the part; it contains all keys
};

struct OracleSample {
  std::vector<OraclePair> pairs;
  // Units with all their pairs in the sample. Empty: dbias is not checked against the oracle.
  std::vector<BiasUnit> bias_units;
  // Key/value heads with all sequences in the sample, for d_softmax_offset and max_logit.
  std::vector<int> whole_heads;
};

// Returns the same sample on every rank. `host`: the oracle runs on the CPU, and the sample is smaller.
OracleSample SampleOracle(const AttentionSpec& spec, bool host);

}  // namespace cppool::kernels
