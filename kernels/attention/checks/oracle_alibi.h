// ALiBi's slopes as the oracle has them: written from the paper's words and apart from AlibiSlopes, as oracle_mask.h is
// from BandOf.
#pragma once

#include <vector>

namespace cppool::kernels {

// By head (Press, Smith, Lewis, "Train Short, Test Long", ICLR 2022, section 3): for n heads the geometric sequence
// that starts at 2^(-8/n) and has that as its ratio. Where n is no power of two, as the authors do it: the sequence of
// the power below, then every other member, the first of them first, of the sequence of the power above.
std::vector<float> OracleAlibiSlopes(int heads);

}  // namespace cppool::kernels
