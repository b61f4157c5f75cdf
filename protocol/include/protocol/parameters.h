// Parameters of a case: their schema, validation with defaults, and the string form of Transformer Engine's
// test worker.
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
  std::optional<Json> default_value;  // absent: required; JSON null: may be null, and is by default
  std::optional<std::vector<Json>> allowed;
  std::optional<double> minimum, maximum;  // inclusive; of a list's elements
  std::size_t list_length = 0;             // 0: any
  std::string doc;
};

// Writes it as in the answer to `list`: name, type, default, allowed values or range, doc.
Json ToJson(const ParameterSpec& spec);

// A request that is wrong: what is wrong, where, what is allowed. Its text is the response's `error`.
class InvalidRequest : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Every parameter of the schema, given or default. Throws InvalidRequest for an unknown name, a wrong type
// (1.0 is not an integer, true is not a number), and a value that is out of range or not among the allowed
// ones.
Json ValidateParameters(const Json& given, const std::vector<ParameterSpec>& schema);

// {"num_heads": "12", "is_training": "True", "window_size": "(-1, 0)", "softmax_scale": "None"} as typed JSON
// for ValidateParameters. Strings are converted to the type in the schema; "None" is left out.
// `fa_pad_between_seqs` is `pad_between_seqs`; `log_level` is dropped, and so are the fp8 flags when dtype is
// not fp8. With dtype fp8, flags that the worker ignores are dropped, too: fp8_mha with mxfp8, f16_O with
// delayed and mxfp8. With neither fp8_dpa nor fp8_mha the dtype becomes bf16, as the worker runs it, and
// `warnings` says so. Throws InvalidRequest for a string that cannot be converted.
Json ParametersFromKwargs(const Json& kwargs, const std::vector<ParameterSpec>& schema,
                          std::vector<std::string>* warnings = nullptr);

// "; did you mean \"hello\"?", or nothing when none is near.
std::string DidYouMean(std::string_view word, const std::vector<std::string>& candidates);
// `unknown op "helo"; did you mean "hello"? (known: hello, list)`. `where` comes behind the name: ` in
// "fault"`.
std::string Unknown(const std::string& what, std::string_view name, const std::vector<std::string>& known,
                    const std::string& where = "");

}  // namespace cppool::protocol
