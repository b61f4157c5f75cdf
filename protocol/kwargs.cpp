// The string form of parameters: Transformer Engine's test harness sends str(value) of every Python value.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <utility>

#include "protocol/schema.h"
#include "protocol/text.h"

namespace cppool::protocol {
namespace {

constexpr std::array<std::string_view, 5> kFp8Flags = {"fp8_bwd", "fp8_dpa", "fp8_mha", "scaling_mode",
                                                       "f16_O"};

bool IsFp8Flag(std::string_view name) { return std::ranges::find(kFp8Flags, name) != kFp8Flags.end(); }

// Names that kwargs may have and that are not parameters of the case.
std::vector<std::string> OtherNames(const std::vector<ParameterSpec>& schema) {
  std::vector<std::string> names;
  if (FindSpec(schema, "pad_between_seqs")) names.emplace_back("fa_pad_between_seqs");
  if (!FindSpec(schema, "log_level")) names.emplace_back("log_level");
  for (const std::string_view flag : kFp8Flags) {
    if (!FindSpec(schema, flag)) names.emplace_back(flag);
  }
  return names;
}

[[noreturn]] void Unreadable(const std::string& name, const std::string& text, const std::string& wanted) {
  throw InvalidRequest("kwargs: " + Quoted(name) + " must read as " + wanted + ", not " + Quoted(text));
}

// All of `text` as a number, whatever the locale is.
template <typename Number>
std::optional<Number> Read(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::string_view Trim(std::string_view text) {
  const std::size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// "(-1, 0)", "[512, 512]" or "(3,)".
std::optional<Json> ReadList(std::string_view text) {
  if (text.size() < 2 ||
      !((text.front() == '(' && text.back() == ')') || (text.front() == '[' && text.back() == ']'))) {
    return std::nullopt;
  }
  text = Trim(text.substr(1, text.size() - 2));
  if (text == ",") return std::nullopt;
  if (!text.empty() && text.back() == ',') text.remove_suffix(1);
  Json list = Json::array();
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::optional<std::int64_t> element = Read<std::int64_t>(Trim(text.substr(0, comma)));
    if (!element) return std::nullopt;
    list.push_back(*element);
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
    if (text.empty()) return std::nullopt;
  }
  return list;
}

Json Typed(const ParameterSpec& spec, const std::string& text) {
  switch (spec.type) {
    case ParameterType::kString:
      return text;
    case ParameterType::kBoolean:
      if (text == "True" || text == "true") return true;
      if (text == "False" || text == "false") return false;
      Unreadable(spec.name, text, "True or False");
    case ParameterType::kInteger:
      if (const auto integer = Read<std::int64_t>(text)) return *integer;
      Unreadable(spec.name, text, "an integer of 64 bits");
    case ParameterType::kNumber:
      if (const auto number = Read<double>(text); number && std::isfinite(*number)) return *number;
      Unreadable(spec.name, text, "a finite number");
    case ParameterType::kIntegerList:
      if (const auto list = ReadList(text)) return *list;
      Unreadable(spec.name, text, "a list of integers such as (-1, 0)");
  }
  return {};
}

// What Transformer Engine's worker makes of the flags of dtype fp8: it drops those that a recipe does not
// have, and where nothing is left to be fp8, its 16-bit dtype runs.
void ReadFp8AsWorker(Json& parameters, std::vector<std::string>* warnings) {
  const std::string mode = parameters.value("scaling_mode", "delayed");
  if (mode == "mxfp8") parameters.erase("fp8_mha");
  if (mode == "mxfp8" || mode == "delayed") parameters.erase("f16_O");
  if (parameters.value("fp8_dpa", false) || parameters.value("fp8_mha", false)) return;
  parameters["dtype"] = "bf16";
  for (const std::string_view flag : kFp8Flags) parameters.erase(std::string(flag));
  if (warnings)
    warnings->push_back(
        "dtype 'fp8' ran as bf16, as in Transformer Engine: fp8_dpa is False, and fp8_mha is False or is "
        "ignored with "
        "scaling_mode 'mxfp8'");
}

}  // namespace

void RequireStrings(const Json& kwargs) {
  if (!kwargs.is_object())
    throw InvalidRequest("\"kwargs\" must be an object of strings, not " + EchoValue(kwargs));
  for (const auto& [name, value] : kwargs.items()) {
    if (!value.is_string()) {
      throw InvalidRequest("kwargs: " + Quoted(name) + " must be a string, as all kwargs, not " +
                           EchoValue(value));
    }
  }
}

Json ParametersFromKwargs(const Json& kwargs, const std::vector<ParameterSpec>& schema,
                          std::vector<std::string>* warnings) {
  RequireStrings(kwargs);
  std::vector<std::pair<const ParameterSpec*, const std::string*>> given;
  for (const auto& [given_name, value] : kwargs.items()) {
    const std::string& text = value.get_ref<const std::string&>();
    const std::string name = given_name == "fa_pad_between_seqs" ? "pad_between_seqs" : given_name;
    const ParameterSpec* spec = FindSpec(schema, name);
    // The harness sends its log level, and the fp8 flags with every dtype. A case without fp8 flags refuses
    // dtype fp8 itself.
    if (spec == nullptr && (name == "log_level" || IsFp8Flag(name))) continue;
    if (IsFp8Flag(name) && kwargs.value("dtype", "") != "fp8") continue;
    if (spec == nullptr) RefuseUnknownName(given_name, schema, OtherNames(schema));
    if (name != given_name && kwargs.contains(name)) {
      throw InvalidRequest("kwargs: " + Quoted(given_name) + " and " + Quoted(name) +
                           " are the same parameter: give one");
    }
    if (text != "None") given.emplace_back(spec, &text);
  }
  // Values are read after all names, so that the first error is the most basic one.
  Json parameters = Json::object();
  for (const auto& [spec, text] : given) parameters[spec->name] = Typed(*spec, *text);
  if (parameters.value("dtype", "") == "fp8" && FindSpec(schema, "fp8_dpa"))
    ReadFp8AsWorker(parameters, warnings);
  return parameters;
}

}  // namespace cppool::protocol
