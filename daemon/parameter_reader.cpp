#include "daemon/parameter_reader.h"

#include <algorithm>

namespace cppool::daemon {

using protocol::Json;
using protocol::ParameterType;

ParameterReader::ParameterReader(const Json& params, const std::vector<protocol::ParameterSpec>& schema)
    : params_(params), schema_(schema) {}

const Json* ParameterReader::Find(const char* name, ParameterType type) {
  const std::string wanted = name ? name : "";
  const auto misused = [&](const char* what) {
    if (misuse_.empty()) misuse_ = "the case asked for parameter '" + wanted + "', " + what;
    return nullptr;
  };
  const auto spec = std::ranges::find_if(schema_, [&](const auto& s) { return s.name == wanted; });
  if (spec == schema_.end()) return misused("which is not in its schema");
  const bool converts = type == ParameterType::kNumber && spec->type == ParameterType::kInteger;
  if (spec->type != type && !converts) return misused("which has another type in its schema");
  const auto value = params_.find(wanted);
  if (value == params_.end() || value->is_null()) return nullptr;
  const bool fits = type == ParameterType::kInteger   ? value->is_number_integer()
                    : type == ParameterType::kNumber  ? value->is_number()
                    : type == ParameterType::kBoolean ? value->is_boolean()
                                                      : value->is_string();
  return fits ? &*value : misused("which replace_params gave a value of another type");
}

std::int64_t ParameterReader::Integer(const char* name) {
  const Json* value = Find(name, ParameterType::kInteger);
  if (!value) return 0;
  return value->is_number_unsigned() ? static_cast<std::int64_t>(value->get<std::uint64_t>())
                                     : value->get<std::int64_t>();
}

double ParameterReader::Number(const char* name) {
  const Json* value = Find(name, ParameterType::kNumber);
  return value ? value->get<double>() : 0;
}

bool ParameterReader::Boolean(const char* name) {
  const Json* value = Find(name, ParameterType::kBoolean);
  return value && value->get<bool>();
}

const char* ParameterReader::String(const char* name) {
  const Json* value = Find(name, ParameterType::kString);
  return value ? value->get_ref<const std::string&>().c_str() : nullptr;
}

}  // namespace cppool::daemon
