// ALiBi's slopes for the oracle, written from the paper and independent of AlibiSlopes, as oracle_mask.h is independent of BandOf.
#pragma once

#include <vector>

namespace cppool::kernels {

// One slope per head (Press, Smith, Lewis, "Train Short, Test Long", ICLR 2022, section 3): for n heads the geometric sequence with
// first element and ratio 2^(-8/n). If n is not a power of two, as in the authors' code: the sequence for the next lower power of
// two, then elements 1, 3, 5, ... (counted from 1) of the sequence for the next higher power.
std::vector<float> OracleAlibiSlopes(int heads);

}  // namespace cppool::kernels
