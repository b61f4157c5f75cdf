// Parameters of a case as types: their schema, validation with defaults, and the string form that Transformer Engine's test worker takes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "protocol/failure.h"

namespace cppool::protocol {

enum class ParameterType { kInteger, kNumber, kBoolean, kString, kIntegerList };

struct ParameterSpec {
  std::string name;
  ParameterType type = ParameterType::kInteger;
  std::optional<Json> default_value;  // absent: required; JSON null: may be null, and is when not given
  std::optional<std::vector<Json>> allowed;
  std::optional<double> minimum, maximum;  // inclusive; of a list's elements
  std::size_t list_length = 0;             // 0: any
  std::string doc;
};

// As `list` answers it: name, type, default, allowed values or range, doc.
Json ToJson(const ParameterSpec& spec);

// A request that is wrong: what is wrong, where, what is allowed. Its text is the response's `error`.
class InvalidRequest : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Every parameter of the schema, given or default. Throws InvalidRequest for an unknown name (with the nearest), a wrong type
// (1.0 is not an integer when written as a fraction; true is no number), a value out of range or not among the allowed ones (with the nearest).
Json ValidateParameters(const Json& given, const std::vector<ParameterSpec>& schema);

// {"num_heads": "12", "is_training": "True", "window_size": "(-1, 0)", "softmax_scale": "None"} as typed JSON for ValidateParameters.
// Strings become what the schema's type says; "None" is left out. `fa_pad_between_seqs` is `pad_between_seqs`; `log_level`, and
// the fp8 flags when dtype is not fp8, are dropped. Throws InvalidRequest for a string that does not read as its type.
Json ParametersFromKwargs(const Json& kwargs, const std::vector<ParameterSpec>& schema);

// The nearest of `candidates` by edit distance, or nothing when none is near.
std::optional<std::string> Nearest(std::string_view word, const std::vector<std::string>& candidates);
// "; did you mean \"hello\"?", or nothing when none is near.
std::string DidYouMean(std::string_view word, const std::vector<std::string>& candidates);
std::string Join(const std::vector<std::string>& words);  // "a, b, c"

}  // namespace cppool::protocol
