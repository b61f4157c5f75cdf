// From the parameters of a request to the problem of attention: model rows, derived values, relations, what is unsupported.
#pragma once

#include <cppool/runtime.h>

#include <functional>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/spec.h"

namespace cppool::attention_case {

using Json = nlohmann::json;

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

// `params` has every parameter of the schema, of the right type and in range; `given` says which of them the request gave. The
// result has the model's values, no null where a value can be derived, and mask and window in their effective form:
//   thd: `causal` and `no_mask` are `padding_causal` and `padding`; a row of the fused table has pad_between_seqs;
//   a causal mask closes the window's right side; without one, (-1, 0) means (-1, -1).
// Throws Refused.
Json Resolve(Json params, const std::function<bool(const std::string&)>& given);

// Relations between resolved parameters, and between them and the world. Throws Refused naming the parameter and what is
// allowed: CPPOOL_INVALID_REQUEST before CPPOOL_INAPPLICABLE.
void CheckRelations(const Json& params, int world_size);
// The kernels of a case, and where they come from.
struct ChosenKernels {
  const kernels::AttentionFamily* family = nullptr;
  std::string file, digest;  // of a library; empty: cppool's own

  Json Describe() const;  // the member "kernels" of an answer
};
// Those that the request wants ("cppool", "cudnn", a library; NULL: cppool's). `copy`: of this library; NULL: none. Throws Refused:
// CPPOOL_INVALID_REQUEST for a library that cannot be used, CPPOOL_UNSUPPORTED with their reason when they cannot do this case.
ChosenKernels ChooseKernels(const char* wanted, const char* copy, const std::string& backend,
                            const kernels::AttentionSpec& spec, int world_size);

// From resolved, checked parameters. Sequences that are not given are drawn from the seed.
kernels::AttentionSpec ToSpec(const Json& params, int world_size);

}  // namespace cppool::attention_case
