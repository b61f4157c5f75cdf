#include "protocol/parameters.h"

#include <cmath>
#include <cstdint>

#include "base/words.h"
#include "protocol/schema.h"
#include "protocol/text.h"

namespace cppool::protocol {
namespace {

std::string_view ToString(ParameterType type) {
  static constexpr auto kWords =
      std::to_array<std::string_view>({"integer", "number", "boolean", "string", "integer_list"});
  static_assert(kWords.size() == static_cast<std::size_t>(ParameterType::kIntegerList) + 1);
  return kWords.at(static_cast<std::size_t>(type));
}

// Limits are doubles in the schema; those of integers are shown as integers of 64 bits.
Json Limit(const ParameterSpec& spec, double value) {
  constexpr double kPast = 9223372036854775808.0;  // 2^63, the double nearest to the largest integer
  if (spec.type == ParameterType::kNumber || value != std::floor(value)) return value;
  if (value >= kPast) return INT64_MAX;
  if (value < -kPast) return INT64_MIN;
  return static_cast<std::int64_t>(value);
}

// " from 1 to 8", " of at least 1", "".
std::string RangeWords(const ParameterSpec& spec) {
  const auto shown = [&](double value) { return EchoValue(Limit(spec, value)); };
  if (spec.minimum && spec.maximum) return " from " + shown(*spec.minimum) + " to " + shown(*spec.maximum);
  if (spec.minimum) return " of at least " + shown(*spec.minimum);
  if (spec.maximum) return " of at most " + shown(*spec.maximum);
  return "";
}

// "an integer from 1 to 8".
std::string Expected(const ParameterSpec& spec) {
  switch (spec.type) {
    case ParameterType::kInteger:
      return "an integer" + RangeWords(spec);
    case ParameterType::kNumber:
      return "a number" + RangeWords(spec);
    case ParameterType::kBoolean:
      return "true or false";
    case ParameterType::kString:
      return "a string";
    case ParameterType::kIntegerList:
      return "a list of " + (spec.list_length > 0 ? std::to_string(spec.list_length) + " " : "") +
             "integers" + RangeWords(spec);
  }
  return "";
}

bool IsNullable(const ParameterSpec& spec) { return spec.default_value && spec.default_value->is_null(); }

// Cases read integers as signed 64 bits.
bool FitsInt64(const Json& value) {
  return !value.is_number_unsigned() || value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX);
}

[[noreturn]] void Refuse(const ParameterSpec& spec, const Json& value, const std::string& hint = "") {
  throw InvalidRequest("parameter " + Quoted(spec.name) + " must be " + Expected(spec) +
                       (IsNullable(spec) ? " or null" : "") + ", not " + EchoValue(value) + hint);
}

void CheckInteger(const ParameterSpec& spec, const Json& element, const Json& value) {
  if (element.is_number_float()) {
    const double number = element.get<double>();
    const bool whole = number == std::floor(number) && std::abs(number) < 9.2e18;
    Refuse(spec, value, whole ? " (an integer is written without fraction or exponent)" : "");
  }
  if (!element.is_number_integer()) Refuse(spec, value);
}

void CheckType(const ParameterSpec& spec, const Json& value) {
  switch (spec.type) {
    case ParameterType::kInteger:
      return CheckInteger(spec, value, value);
    case ParameterType::kNumber:
      if (!value.is_number() || !std::isfinite(value.get<double>())) Refuse(spec, value);
      return;
    case ParameterType::kBoolean:
      if (!value.is_boolean()) Refuse(spec, value);
      return;
    case ParameterType::kString:
      if (!value.is_string()) Refuse(spec, value);
      return;
    case ParameterType::kIntegerList:
      if (!value.is_array()) Refuse(spec, value);
      if (spec.list_length > 0 && value.size() != spec.list_length) {
        Refuse(spec, value, " (" + std::to_string(value.size()) + " elements)");
      }
      for (const Json& element : value) CheckInteger(spec, element, value);
  }
}

void CheckRange(const ParameterSpec& spec, const Json& element, const Json& value) {
  const double number = element.get<double>();
  if ((spec.minimum && number < *spec.minimum) || (spec.maximum && number > *spec.maximum))
    Refuse(spec, value);
  if (spec.type != ParameterType::kNumber && !FitsInt64(element))
    Refuse(spec, value, " (it does not fit in 64 bits)");
}

void CheckAllowed(const ParameterSpec& spec, const Json& value) {
  std::vector<std::string> shown, words;
  for (const Json& allowed : *spec.allowed) {
    if (value == allowed) return;
    shown.push_back(EchoValue(allowed));
    if (allowed.is_string()) words.push_back(allowed.get<std::string>());
  }
  const std::string hint = value.is_string() ? DidYouMean(value.get_ref<const std::string&>(), words) : "";
  throw InvalidRequest("parameter " + Quoted(spec.name) + " must be one of " + base::Join(shown) + ", not " +
                       EchoValue(value) + hint);
}

void CheckValue(const ParameterSpec& spec, const Json& value) {
  if (spec.type == ParameterType::kIntegerList) {
    for (const Json& element : value) CheckRange(spec, element, value);
  } else if (value.is_number()) {
    CheckRange(spec, value, value);
  }
  if (spec.allowed) CheckAllowed(spec, value);
}

}  // namespace

const ParameterSpec* FindSpec(const std::vector<ParameterSpec>& schema, std::string_view name) {
  for (const ParameterSpec& spec : schema) {
    if (spec.name == name) return &spec;
  }
  return nullptr;
}

void RefuseUnknownName(const std::string& name, const std::vector<ParameterSpec>& schema,
                       const std::vector<std::string>& others) {
  std::vector<std::string> names;
  names.reserve(schema.size() + others.size());
  for (const ParameterSpec& spec : schema) names.push_back(spec.name);
  names.insert(names.end(), others.begin(), others.end());
  throw InvalidRequest(Unknown("parameter", name, names));
}

Json ToJson(const ParameterSpec& spec) {
  Json json = {{"name", spec.name}, {"type", ToString(spec.type)}, {"doc", spec.doc}};
  if (spec.default_value) {
    json["default"] = *spec.default_value;
  } else {
    json["required"] = true;
  }
  if (spec.allowed) json["allowed"] = *spec.allowed;
  if (spec.minimum) json["minimum"] = Limit(spec, *spec.minimum);
  if (spec.maximum) json["maximum"] = Limit(spec, *spec.maximum);
  if (spec.list_length > 0) json["length"] = spec.list_length;
  return json;
}

Json ValidateParameters(const Json& given, const std::vector<ParameterSpec>& schema) {
  if (!given.is_object()) throw InvalidRequest("parameters must be an object, not " + EchoValue(given));
  for (const auto& [name, value] : given.items()) {
    if (FindSpec(schema, name) == nullptr) RefuseUnknownName(name, schema);
  }
  Json parameters = Json::object();
  for (const ParameterSpec& spec : schema) {
    const auto found = given.find(spec.name);
    if (found != given.end()) {
      if (!found->is_null() || !IsNullable(spec)) CheckType(spec, *found);
      parameters[spec.name] = *found;
    } else if (spec.default_value) {
      parameters[spec.name] = *spec.default_value;
    } else {
      throw InvalidRequest("parameter " + Quoted(spec.name) + " is missing: it must be " + Expected(spec));
    }
  }
  // Ranges are checked after all types, so that the first error is the most basic one.
  for (const ParameterSpec& spec : schema) {
    if (!given.contains(spec.name)) continue;  // defaults need not be in range
    Json& value = parameters[spec.name];
    if (value.is_null()) continue;
    CheckValue(spec, value);
    if (spec.type == ParameterType::kNumber) value = value.get<double>();
  }
  return parameters;
}

}  // namespace cppool::protocol
