// From the parameters of a request to the problem of attention: model rows, derived values, relations, what
// is unsupported.
#pragma once

#include <cppool/attention.h>
#include <cppool/case.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/fp8_recipe.h"
#include "kernels/attention/spec.h"

namespace cppool::attention_case {

using Json = nlohmann::json;

// The schema, by Transformer Engine's names.
extern const cppool_parameter kParameters[];
extern const std::size_t kParameterCount;

// A request that is not run. Its status is what `validate` returns:
//   CPPOOL_INVALID_REQUEST  it contradicts itself, or has a value that no world size takes;
//   CPPOOL_INAPPLICABLE     its lengths, heads or schedule cannot be divided over this many ranks;
//   CPPOOL_UNSUPPORTED      there are no kernels for it.
class Refused : public std::runtime_error {
 public:
  Refused(cppool_status status, const std::string& why) : std::runtime_error(why), status_(status) {}
  cppool_status status() const { return status_; }

 private:
  cppool_status status_;
};

// `params` has every parameter of the schema, of the right type and in range; `given` says which of them the
// request gave. The result has the model's values, no null where a value can be derived, and mask and window
// in their effective form:
//   thd: `causal` and `no_mask` are `padding_causal` and `padding`; rows of the fused table have
//   pad_between_seqs;
//   a causal mask closes the window's right side; without one, (-1, 0) means (-1, -1).
// Throws Refused.
Json Resolve(Json params, const std::function<bool(const std::string&)>& given);

// Resolves the parameters of dtype fp8: no null is left, and fp8_mha implies fp8_dpa. Leaves another dtype as
// it is.
void ResolveFp8(Json& params);

// Checks the relations between resolved parameters, and between them and the world. Throws Refused naming the
// parameter and what is allowed: CPPOOL_INVALID_REQUEST before CPPOOL_INAPPLICABLE.
void CheckRelations(const Json& params, int world_size);

// Whether the resolved parameters make a recipe of fp8. Throws Refused, CPPOOL_INVALID_REQUEST, with the name
// of the parameter that contradicts another one. Returns why blocks of mxfp8 cannot be divided over
// `world_size` ranks, or "".
std::string CheckFp8(const Json& params, int world_size);

// Checks cu_seqlens_q, cu_seqlens_kv and their padded forms (cumulated numbers of tokens and of places, as in
// Transformer Engine and FlashAttention) against each other and against the other parameters, which are
// resolved and checked. Throws and returns as CheckFp8.
std::string CheckSequences(const Json& params, int world_size);

// Finds the kernels of a case: those of the kernel that the request wants; NULL: cppool's. Throws Refused:
// CPPOOL_UNSUPPORTED with their reason when they cannot do this case.
std::shared_ptr<const kernels::AttentionFamily> ChooseKernels(const cppool_attention_kernel* wanted,
                                                              const std::string& backend,
                                                              const kernels::AttentionSpec& spec,
                                                              int world_size);

// The recipe of resolved, checked parameters; nothing when dtype is not fp8.
std::optional<kernels::Fp8Recipe> RecipeOf(const Json& params);

// Fills spec.queries and spec.keys, as given or drawn from the seed.
void SetSequences(const Json& params, int world_size, kernels::AttentionSpec& spec);

// Makes the problem of resolved, checked parameters. Sequences that are not given are drawn from the seed.
kernels::AttentionSpec ToSpec(const Json& params, int world_size);

// Refuses what cannot be one launch on any machine: throws Refused, CPPOOL_UNSUPPORTED. Takes steps where one
// launch was not asked for and `has_room` says that its memory is not there. Returns the bytes that a rank
// needs.
double SetLaunches(kernels::AttentionSpec& spec, const kernels::AttentionFamily& family, int world_size,
                   bool on_host, const std::function<bool(double)>& has_room);

}  // namespace cppool::attention_case
