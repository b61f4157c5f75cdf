// From the parameters of a request to what attention is asked for: model rows, derived values, relations, what is not there yet.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/spec.h"

namespace cppool::attention_case {

using Json = nlohmann::json;

// A request that cannot be meant (`unsupported` false), or one that is not supported here.
class Refused : public std::runtime_error {
 public:
  Refused(bool unsupported, const std::string& why) : std::runtime_error(why), unsupported_(unsupported) {}
  bool unsupported() const { return unsupported_; }

 private:
  bool unsupported_;
};

// `params` has every parameter of the schema, of the right type and in range; `given` tells which of them the request gave. The result
// has the model's values, no nulls where a value can be derived, and mask and window in the form that they mean:
//   thd: `causal` and `no_mask` are `padding_causal` and `padding`; a row of the fused table has pad_between_seqs;
//   a causal mask closes the window's right side; without one, (-1, 0) means (-1, -1).
// Throws Refused.
Json Resolve(Json params, const std::function<bool(const std::string&)>& given);

// Relations between resolved parameters. Throws Refused naming the parameter and what is allowed.
void CheckRelations(const Json& params, int world_size);
// What is meaningful and not there yet, whatever the kernels. Throws Refused(unsupported).
void CheckSupported(const Json& params);
// The kernels of the backend for this case. Throws Refused(unsupported) with their reason when none can do it.
const kernels::AttentionFamily& FamilyFor(const std::string& backend, const kernels::AttentionSpec& spec);

// Of resolved, checked parameters. Complete: sequences that are not given are drawn.
kernels::AttentionSpec ToSpec(const Json& params, int world_size);

}  // namespace cppool::attention_case
