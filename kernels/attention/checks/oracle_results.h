// Holds the oracle's results on a rank.
#pragma once

#include "kernels/attention/checks/oracle_sample.h"
#include "kernels/attention/judge.h"
#include "kernels/attention/spec.h"
#include "kernels/memory_list.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// The oracle's results, in fp64.
struct OracleOutputs {
  Buffer out, lse, dq, dk, dv;         // of one OraclePair
  Buffer dbias;                        // of one BiasUnit
  Buffer d_softmax_offset, max_logit;  // [heads]

  // What a pair gives.
  void ListPair(const AttentionSpec& spec, MemoryList& list);
  // Declares also what several pairs add to.
  void List(const AttentionSpec& spec, const OracleSample& sample, MemoryList& list);

  const Buffer& of(CheckedTensor kind) const;
};

// Holds what a pair's exact and plain calls give, and the bounds of the exact results.
struct OracleResults {
  OracleOutputs exact, plain, bounds;

  // `own`: the list has what several pairs add to, too.
  void List(const AttentionSpec& spec, const OracleSample& sample, bool own, MemoryList& list);
};

}  // namespace cppool::kernels
