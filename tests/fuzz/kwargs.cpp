// The string form of parameters: each line of the input is a name, '=' and a text.
#include <algorithm>
#include <cstdint>

#include "protocol/request.h"
#include "tests/fuzz/attention.h"
#include "tests/fuzz/property.h"

namespace cppool::fuzz {
namespace {

using protocol::Json;
using protocol::RunRequest;

// Python's str(value).
std::string PythonText(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (!value.is_array()) return value.dump();
  std::string text;
  for (const Json& element : value) text += (text.empty() ? "" : ", ") + element.dump();
  return "(" + text + (value.size() == 1 ? ",)" : ")");
}

Json ReadLines(std::string_view text) {
  Json kwargs = Json::object();
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    kwargs[std::string(line.substr(0, equals))] = std::string(line.substr(equals + 1));
  }
  return kwargs;
}

// Requires that both forms of a request are accepted or refused in the same way.
void RequireSameRun(const RunRequest& strings, const RunRequest& typed, int world_size) {
  const Prepared one = Prepare(strings, world_size), other = Prepare(typed, world_size);
  Require(one.refusal == other.refusal, "both forms have the same refusal",
          one.refusal + " / " + other.refusal);
  if (one.run) Require(one.run->params_json == other.run->params_json, "both forms have the same parameters");
}

}  // namespace
}  // namespace cppool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cppool::fuzz;
  using namespace cppool::protocol;
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (!IsUtf8(text)) return 0;  // such a line is refused before its strings are read
  const Json kwargs = ReadLines(text);
  const std::vector<ParameterSpec>& schema = Registry().Find("attention")->schema;
  Json typed;
  try {
    typed = ParametersFromKwargs(kwargs, schema);
  } catch (const InvalidRequest& error) {
    RequireErrorText(error.what());
    return 0;
  }
  Json strings = Json::object();
  for (const auto& [name, value] : typed.items()) strings[name] = PythonText(value);
  Require(ParametersFromKwargs(strings, schema) == typed, "typed values written as strings read as the same",
          strings.dump());

  RunRequest run;
  run.params = kwargs;
  run.from_kwargs = true;
  RunRequest same;
  same.params = typed;
  for (const int world_size : {2, 4}) RequireSameRun(run, same, world_size);
  return 0;
}
