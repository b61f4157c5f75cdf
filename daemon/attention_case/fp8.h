// The parameters of dtype fp8: scaling_mode, fp8_dpa, fp8_mha, fp8_bwd and f16_O, with the names and values of Transformer Engine's
// context-parallel tests.
#pragma once

#include <optional>
#include <string>

#include "daemon/attention_case/resolve.h"
#include "kernels/attention/fp8_recipe.h"

namespace cppool::attention_case {

// Of dtype fp8: no null is left, and fp8_mha implies fp8_dpa. Of another dtype nothing is changed.
void ResolveFp8(Json& params);

// Whether the resolved parameters make a recipe. Throws Refused, CPPOOL_INVALID_REQUEST, with the name of the parameter that
// contradicts another one. Returns why blocks of mxfp8 cannot be divided over `world_size` ranks, or "".
std::string CheckFp8(const Json& params, int world_size);

// From resolved, checked parameters; nothing when dtype is not fp8.
std::optional<kernels::Fp8Recipe> RecipeOf(const Json& params);

}  // namespace cppool::attention_case
