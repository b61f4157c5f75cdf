// `cppool list`: the cases that a daemon knows, and the parameters of one of them.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/command/command.h"
#include "client/command/libraries.h"
#include "client/suite/value_text.h"
#include "protocol/parameters.h"

namespace cppool::command {
namespace {

struct ListArguments {
  DaemonArguments daemon;
  std::string case_name;  // empty: all cases
  bool json = false;
};

// " from 1 to 8", " of at least 1", "".
std::string RangeOf(const Json& parameter) {
  const auto text = [&](const char* key) { return suite::TextFromValue(parameter.value(key, Json())); };
  const bool least = parameter.contains("minimum"), most = parameter.contains("maximum");
  if (least && most) return " from " + text("minimum") + " to " + text("maximum");
  if (least) return " of at least " + text("minimum");
  return most ? " of at most " + text("maximum") : "";
}

// "an integer from 1 to 65536", "bf16, fp16 or fp8".
std::string ValuesOf(const Json& parameter) {
  if (const auto allowed = parameter.find("allowed"); allowed != parameter.end() && !allowed->empty()) {
    std::string text;
    for (std::size_t i = 0; i < allowed->size(); ++i)
      text += (i == 0 ? "" : i + 1 < allowed->size() ? ", " : " or ") + suite::TextFromValue((*allowed)[i]);
    return text;
  }
  const std::string type = parameter.value("type", "");
  if (type == "integer") return "an integer" + RangeOf(parameter);
  if (type == "number") return "a number" + RangeOf(parameter);
  if (type == "boolean") return "true or false";
  if (type == "string") return "a text";
  if (type == "integer_list") {
    const std::string length =
        parameter.contains("length") ? suite::TextFromValue(parameter["length"]) + " " : std::string();
    return "a list of " + length + "integers" + RangeOf(parameter);
  }
  return type;
}

void PrintCase(std::ostream& out, const Json& one) {
  out << one.value("name", "") << ": " << one.value("doc", "") << "\n";
  for (const Json& parameter : one.value("parameters", Json::array())) {
    const bool required = !parameter.contains("default");
    out << "\n  " << parameter.value("name", "") << "  "
        << (required ? "(required)" : "= " + suite::TextFromValue(parameter["default"])) << "\n    "
        << ValuesOf(parameter) << "\n";
    if (const std::string doc = parameter.value("doc", ""); !doc.empty()) out << "    " << doc << "\n";
  }
}

int List(const ListArguments& arguments, const Streams& streams) {
  PoolOptions options = arguments.daemon.pool;
  options.world_size = 1;
  Pool pool(options);
  const std::optional<Libraries> libraries = MakeLibraries(
      arguments.daemon.libraries, {}, [&] { return pool.Hello(); }, streams.err, false);
  if (!libraries) return kFailure;
  Json cases;
  try {
    const Json answer = pool.List(libraries->load);
    if (answer.value("ok", false) == false) {
      streams.err << "cppool: " << NameSources(answer.value("error", ""), libraries->sources) << "\n";
      return kFailure;
    }
    cases = answer.value("cases", Json::array());
  } catch (const PoolError& error) {
    streams.err << "cppool: " << NameSources(error.what(), libraries->sources) << "\n";
    return kFailure;
  }
  std::vector<std::string> names;
  const Json* found = nullptr;
  for (const Json& one : cases) {
    names.push_back(one.value("name", ""));
    if (names.back() == arguments.case_name) found = &one;
  }
  if (!arguments.case_name.empty() && !found)
    throw suite::UsageError(protocol::Unknown("case", arguments.case_name, names));
  if (arguments.json) {
    PrintJson(streams.out, found ? *found : cases);
  } else if (found) {
    PrintCase(streams.out, *found);
  } else {
    for (const Json& one : cases)
      streams.out << one.value("name", "") << ": " << one.value("doc", "") << "\n";
    streams.out << "`cppool list CASE` lists the parameters of a case\n";
  }
  return kSuccess;
}

}  // namespace

void AddList(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<ListArguments>();
  arguments->daemon.pool.backend = "host";  // is there everywhere and starts at once
  CLI::App* list = app.add_subcommand("list", "Lists the cases, or the parameters of one");
  list->add_option("case", arguments->case_name, "The case whose parameters are listed")->check(IsUtf8);
  AddDaemonOptions(*list, &arguments->daemon);
  list->add_flag("--json", arguments->json, "The daemon's answer as JSON");
  list->callback([arguments, streams, exit_code] { *exit_code = List(*arguments, streams); });
}

}  // namespace cppool::command
