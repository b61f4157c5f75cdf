// The sequences of a request with lengths of their own: cu_seqlens_q, cu_seqlens_kv and their padded forms, the
// cumulated numbers of tokens and of places that Transformer Engine and FlashAttention give.
#pragma once

#include "kernels/attention/spec.h"
#include "daemon/attention_case/resolve.h"

namespace cppool::attention_case {

// That they fit together and to the other parameters, which are resolved and checked. Throws Refused naming the
// parameter.
void CheckSequences(const Json& params, int world_size);

// Fills spec.queries and spec.keys: as given, else drawn from the seed.
void SetSequences(const Json& params, int world_size, kernels::AttentionSpec& spec);

}  // namespace cppool::attention_case
