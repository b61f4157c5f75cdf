// Which parts of a case the oracle works out: everything where that is cheap, else a sample, and with it what the
// tensors that sum over sequences or heads need to be whole somewhere.
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

// A part of dbias that no other part's pairs add to; consecutive in OracleSample::pairs.
struct BiasUnit {
  std::size_t begin, end;       // of the pairs
  std::int64_t batch, head;     // where the part begins in dbias
  std::int64_t heads, queries;  // its size; keys are all there are
};

struct OracleSample {
  std::vector<OraclePair> pairs;
  std::vector<BiasUnit> bias_units;  // those that are whole; none: dbias is not checked here
  std::vector<int> whole_heads;      // key/value heads with all their sequences: d_softmax_offset, max_logit
};

// The same on every rank. `host`: a processor does it, not a GPU.
OracleSample SampleOracle(const AttentionSpec& spec, bool host);

}  // namespace cppool::kernels
