#include "daemon/case_registry.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstring>
#include <set>
#include <type_traits>

#include "daemon/library.h"
#include "daemon/start_error.h"
#include "kernels/float_environment.h"
#include "protocol/json_text.h"

namespace cppool::daemon {
namespace {

using protocol::Json;
using protocol::ParameterSpec;
using protocol::ParameterType;

constexpr const char* kEntry = "cppool_cases";
constexpr std::size_t kLeastCase =
    offsetof(cppool_case, features) + sizeof(cppool_case::features);  // in version 1

bool IsName(const char* name) {
  if (!name || !*name) return false;
  return std::all_of(name, name + std::char_traits<char>::length(name), [](unsigned char c) {
    return (c < 128 && std::isalnum(c)) || c == '_' || c == '-' || c == '.';
  });
}

ParameterType TypeOf(const cppool_parameter& parameter) {
  // The value comes from another compilation and may be no enumerator: read it as an integer.
  std::underlying_type_t<cppool_type> type;
  static_assert(sizeof(type) == sizeof(parameter.type));
  std::memcpy(&type, &parameter.type, sizeof(type));
  switch (type) {
    case CPPOOL_TYPE_INTEGER:
      return ParameterType::kInteger;
    case CPPOOL_TYPE_NUMBER:
      return ParameterType::kNumber;
    case CPPOOL_TYPE_BOOLEAN:
      return ParameterType::kBoolean;
    case CPPOOL_TYPE_STRING:
      return ParameterType::kString;
    case CPPOOL_TYPE_INTEGER_LIST:
      return ParameterType::kIntegerList;
  }
  throw StartError("its type is not a cppool_type");
}

Json ParseText(const char* text, const char* what) {
  try {
    return protocol::ParseJson(text);
  } catch (const protocol::InvalidRequest& error) {
    throw StartError(std::string(what) + " cannot be used: " + error.what());
  }
}

// Throws StartError unless the schema accepts `value`, which is a default or an allowed value.
void CheckValue(const ParameterSpec& spec, const Json& value, const char* what) {
  try {
    protocol::ValidateParameters(Json{{spec.name, value}}, {spec});
  } catch (const protocol::InvalidRequest& error) {
    throw StartError(std::string(what) + " does not fit: " + error.what());
  }
}

ParameterSpec Convert(const cppool_parameter& parameter) {
  ParameterSpec spec;
  spec.name = parameter.name;
  spec.type = TypeOf(parameter);
  spec.doc = parameter.doc ? parameter.doc : "";
  spec.list_length = parameter.list_length;
  if (parameter.minimum != 0 || parameter.maximum != 0) {
    if (!(parameter.minimum <= parameter.maximum)) throw StartError("its minimum is above its maximum");
    spec.minimum = parameter.minimum;
    spec.maximum = parameter.maximum;
  }
  if (parameter.allowed_json) {
    const Json allowed = ParseText(parameter.allowed_json, "allowed_json");
    if (!allowed.is_array() || allowed.empty()) throw StartError("allowed_json is not an array of values");
    for (const Json& value : allowed) CheckValue(spec, value, "an allowed value");
    spec.allowed.emplace(allowed.begin(), allowed.end());
  }
  if (parameter.default_json) {
    Json value = ParseText(parameter.default_json, "default_json");
    if (!value.is_null()) CheckValue(spec, value, "the default");
    spec.default_value = std::move(value);
  }
  return spec;
}

}  // namespace

ParameterSpec ToParameterSpec(const cppool_parameter& parameter) {
  if (!IsName(parameter.name))
    throw StartError(
        "a parameter's name is empty, or has characters other than letters, digits, '_', '-' and '.'");
  try {
    return Convert(parameter);
  } catch (const StartError& error) {
    throw StartError("parameter " + std::string(parameter.name) + ": " + error.what());
  }
}

void CaseRegistry::Add(const cppool_case* definition, const std::string& source, const std::string& library) {
  // The ABI comes first: with another one no other field can be read.
  if (definition->abi != CPPOOL_CASE_ABI || definition->struct_size < kLeastCase) {
    throw StartError(source + ": a case was built for version " + std::to_string(definition->abi) +
                     " of the case interface (" + std::to_string(definition->struct_size) +
                     " bytes), and this daemon has version " + std::to_string(CPPOOL_CASE_ABI) + " (" +
                     std::to_string(kLeastCase) +
                     " bytes or more): rebuild it against this cppool's cppool/case.h");
  }
  if (!IsName(definition->name)) {
    throw StartError(
        source + ": a case's name is empty, or has characters other than letters, digits, '_', '-' and '.'");
  }
  RegisteredCase added;
  added.definition = definition;
  added.name = definition->name;
  added.doc = definition->doc ? definition->doc : "";
  added.source = source;
  added.library = library;
  added.features = definition->features;
  if (const RegisteredCase* other = Find(added.name)) {
    throw StartError(source + ": the name of case '" + added.name + "' is taken (" + other->source +
                     "): give it another name");
  }
  if (!definition->run) throw StartError(source + ": case '" + added.name + "' has no run function");
  if (definition->parameter_count && !definition->parameters) {
    throw StartError(source + ": case '" + added.name + "' has a parameter_count but no parameters");
  }
  std::set<std::string> names;
  for (std::size_t i = 0; i < definition->parameter_count; ++i) {
    try {
      added.schema.push_back(ToParameterSpec(definition->parameters[i]));
      if (!names.insert(added.schema.back().name).second) {
        throw StartError("parameter " + added.schema.back().name + " is given twice");
      }
    } catch (const StartError& error) {
      throw StartError(source + ": case '" + added.name + "': " + error.what());
    }
  }
  cases_.emplace(added.name, std::move(added));
}

void CaseRegistry::AddLibrary(void* library, const std::string& path, const std::string& source) {
  using Entry = const cppool_case* const* (*)();
  const auto entry = reinterpret_cast<Entry>(FindEntry(library, path, kEntry, "cppool/case.h"));
  const kernels::FloatEnvironment kept;
  const cppool_case* const* cases = entry();
  if (!cases || !*cases) throw StartError(source + ": " + kEntry + "() returns no cases");
  for (; *cases; ++cases) Add(*cases, source, path);
}

CaseRegistry CaseRegistry::With(const CaseRegistry& others) const {
  CaseRegistry joined = others;
  for (const auto& [name, registered] : cases_) {
    const RegisteredCase* same = joined.Find(name);
    if (same && same->library.empty())
      throw StartError(registered.source + ": the name of case '" + name + "' is taken (" + same->source +
                       "): give it another name");
    joined.cases_[name] = registered;
  }
  return joined;
}

const RegisteredCase* CaseRegistry::Find(const std::string& name) const {
  const auto found = cases_.find(name);
  return found == cases_.end() ? nullptr : &found->second;
}

std::vector<std::string> CaseRegistry::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, unused] : cases_) names.push_back(name);
  return names;
}

}  // namespace cppool::daemon
