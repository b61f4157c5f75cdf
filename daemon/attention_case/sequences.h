// The lengths of sequences that a request gives: cu_seqlens_q, cu_seqlens_kv and their padded forms, which are cumulated
// numbers of tokens and of places, as in Transformer Engine and FlashAttention.
#pragma once

#include <string>

#include "daemon/attention_case/resolve.h"
#include "kernels/attention/spec.h"

namespace cppool::attention_case {

// Checks them against each other and against the other parameters, which are resolved and checked. Throws Refused with the
// name of the parameter for what is wrong in any world; returns why they cannot be divided over `world_size` ranks, or "".
std::string CheckSequences(const Json& params, int world_size);

// Fills spec.queries and spec.keys: as given, else drawn from the seed.
void SetSequences(const Json& params, int world_size, kernels::AttentionSpec& spec);

}  // namespace cppool::attention_case
