#include "protocol/request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iterator>
#include <type_traits>
#include <utility>

#include "base/digest.h"
#include "base/utf8.h"
#include "base/words.h"
#include "protocol/framing.h"
#include "protocol/json_parse.h"
#include "protocol/json_text.h"
#include "protocol/run_record.h"
#include "protocol/schema.h"
#include "protocol/text.h"

namespace cppool::protocol {
namespace {

using Names = std::vector<std::string>;

const Names& Operations() {  // in the order of Operation
  static const Names names = {"hello", "list", "run", "validate", "stats", "shutdown", "cancel", "status"};
  return names;
}

const Names& KeysOf(const std::string& operation) {
  static const Names run = [] {
    Names names = {"op", "id", "params", "kwargs"};
    ForEach(kRunMembers, [&](const auto& member) { names.emplace_back(member.name); });
    return names;
  }();
  static const Names list = {"op", "id", "load"};
  static const Names cancel = {"op", "id", "cancels"};
  static const Names other = {"op", "id"};
  if (operation == "run" || operation == "validate") return run;
  return operation == "list" ? list : operation == "cancel" ? cancel : other;
}

std::string ReadOperation(const Json& json) {
  const auto found = json.find("op");
  if (found == json.end())
    throw InvalidRequest("the request has no \"op\" (known: " + base::Join(Operations()) + ")");
  if (!found->is_string()) {
    throw InvalidRequest("\"op\" must be a string, not " + EchoValue(*found) +
                         " (known: " + base::Join(Operations()) + ")");
  }
  std::string operation = found->get<std::string>();
  for (const std::string& known : Operations()) {
    if (operation == known) return operation;
  }
  throw InvalidRequest(Unknown("op", operation, Operations()));
}

void CheckKeys(const Json& json, const std::string& operation) {
  const Names& known = KeysOf(operation);
  const auto is_in = [](const Names& names, const std::string& key) {
    return std::ranges::find(names, key) != names.end();
  };
  for (const auto& [key, value] : json.items()) {
    if (is_in(known, key)) continue;
    if (is_in(KeysOf("run"), key)) {
      throw InvalidRequest("the key " + Quoted(key) + " is for op \"run\", not " + Quoted(operation) +
                           " (known: " + base::Join(known) + ")");
    }
    throw InvalidRequest(Unknown("key", key, known, " for op " + Quoted(operation)));
  }
}

std::int64_t ReadInteger(const Json& json, const std::string& place, const Integers& range) {
  const bool fits = json.is_number_unsigned()
                        ? json.get<std::uint64_t>() <= static_cast<std::uint64_t>(range.maximum)
                        : json.is_number_integer();
  const std::int64_t value = fits ? json.get<std::int64_t>() : 0;
  if (!fits || value < range.minimum || value > range.maximum) {
    const bool whole = json.is_number_float() && json.get<double>() == std::floor(json.get<double>());
    throw InvalidRequest(place + " must be an integer from " + std::to_string(range.minimum) + " to " +
                         std::to_string(range.maximum) + ", not " + EchoValue(json) +
                         (whole ? " (an integer is written without fraction or exponent)" : ""));
  }
  return value;
}

// A path, or a list of paths.
std::vector<std::string> ReadFiles(const Json& json, const char* name) {
  std::vector<std::string> files;
  for (const Json& file : json.is_array() ? json : Json::array({json})) {
    if (!file.is_string() || file.get_ref<const std::string&>().empty() ||
        file.get_ref<const std::string&>().find('\0') != std::string::npos)
      throw InvalidRequest(Quoted(name) +
                           " must be the path of a shared library, or a list of such paths, not " +
                           EchoValue(json));
    files.push_back(file.get<std::string>());
  }
  if (files.size() > kMaxLibraries)
    throw InvalidRequest(Quoted(name) + " names " + std::to_string(files.size()) + " libraries, more than " +
                         std::to_string(kMaxLibraries));
  return files;
}

// A member's place, as the errors name it: "dump", or the "kind" of "fault".
struct Place {
  const char* name;
  const char* object = nullptr;  // null: the request

  std::string text() const { return object ? "the " + Quoted(name) + " of " + Quoted(object) : Quoted(name); }
};

// One for each kind of values that a member may have.
template <typename Value>
void Read(const Json& json, const Place& place, const Integers& range, Value& out) {
  out = static_cast<Value>(ReadInteger(json, place.text(), range));
}

std::string Decimal(double value) {
  char text[32];
  return {text, std::to_chars(text, std::end(text), value, std::chars_format::fixed).ptr};
}

void Read(const Json& json, const Place& place, const Numbers& range, double& out) {
  const double value = json.is_number() ? json.get<double>() : std::nan("");
  if (!(value >= range.minimum && value <= range.maximum))
    throw InvalidRequest(place.text() + " must be a number from " + Decimal(range.minimum) + " to " +
                         Decimal(range.maximum) + ", not " + EchoValue(json));
  out = value;
}

void Read(const Json& json, const Place& place, Any, bool& out) {
  if (!json.is_boolean())
    throw InvalidRequest(place.text() + " must be true or false, not " + EchoValue(json));
  out = json.get<bool>();
}

void Read(const Json& json, const Place& place, const Text& text, std::string& out) {
  const auto refuse = [&](const char* what) {
    throw InvalidRequest(place.text() + " must be " + text.what + what + EchoValue(json));
  };
  const std::string* given = json.get_ptr<const std::string*>();
  if (given && given->empty() && text.required) throw InvalidRequest(place.text() + " must not be empty");
  if (!given || given->empty()) refuse(", not ");
  if (text.is_path && given->find('\0') != std::string::npos) refuse(", without a NUL character: ");
  out = *given;
}

void Read(const Json& json, const Place& place, Libraries, std::vector<std::string>& out) {
  out = ReadFiles(json, place.name);
}

void Read(const Json& json, const Place& place, Digests, std::map<std::string, std::string>& out) {
  if (!json.is_object())
    throw InvalidRequest(place.text() + " must be an object of digests by file, not " + EchoValue(json));
  for (const auto& [file, digest] : json.items()) {
    if (!digest.is_string() || !base::IsDigest(digest.get_ref<const std::string&>()))
      throw InvalidRequest("the digest of " + Quoted(file) + " must be 16 of the characters 0-9a-f, not " +
                           EchoValue(digest));
    out[file] = digest.get<std::string>();
  }
}

void Read(const Json& json, const Place&, PythonCase, std::string& out) {
  CheckPythonCase(json);
  out = json.dump();
}

template <typename... Members, typename Record>
void Read(const Json& json, const Place& place, const std::tuple<Members...>& table,
          std::optional<Record>& out);

template <typename Values>
bool IsRequired(const Values& values) {
  if constexpr (std::is_same_v<Values, Text>) return values.required;
  return false;
}

template <typename Table, typename Record>
void ReadMembers(const Json& json, const char* object, const Table& table, Record& record) {
  ForEach(table, [&](const auto& member) {
    const Place place{member.name, object};
    if (const auto found = json.find(member.name); found != json.end())
      Read(*found, place, member.values, record.*member.value);
    else if (IsRequired(member.values))
      throw InvalidRequest(Quoted(object) + " has no " + Quoted(member.name));
  });
}

template <typename... Members, typename Record>
void Read(const Json& json, const Place& place, const std::tuple<Members...>& table,
          std::optional<Record>& out) {
  if (!json.is_object()) throw InvalidRequest(place.text() + " must be an object, not " + EchoValue(json));
  const Names known = NamesOf(table);
  for (const auto& [key, value] : json.items()) {
    if (std::ranges::find(known, key) == known.end())
      throw InvalidRequest(Unknown("key", key, known, " in " + place.text()));
  }
  ReadMembers(json, place.name, table, out.emplace());
}

// The members of RunOptions.
void ReadOptions(const Json& json, RunRequest& run) {
  ReadMembers(json, nullptr, kRunMembers, run);
  if (run.sampling && json.contains("repeat"))
    run.sampling->most = std::exchange(run.repeat, RunOptions().repeat);
  try {
    if (!run.kernels.empty()) run.choice = ParseKernels(run.kernels);
  } catch (const InvalidRequest& error) {
    throw InvalidRequest(std::string("\"kernels\" ") + error.what());
  }
}

void CheckDigests(const RunRequest& run) {
  const std::vector<std::string> named = NamedLibraries(run);
  for (const auto& [file, digest] : run.digests)
    if (std::ranges::find(named, file) == named.end())
      throw InvalidRequest("\"digests\" has a file that \"load\" and \"kernels\" do not name: " +
                           Quoted(file));
}

void CheckProgress(const Json& json, const RunRequest& run) {
  if (run.progress && !json.contains("id"))
    throw InvalidRequest("\"progress\" needs an \"id\", which the lines on the progress have");
}

template <std::size_t size>
bool IsIn(const std::array<std::string_view, size>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// A case in Python has none of what cases of libraries have, and the other way round.
void CheckKind(const Json& json) {
  const bool python = json.contains("python");
  const auto check = [&](std::string_view name) {
    if (IsIn(kOfBoth, name) || IsIn(kOfProcesses, name) == python || !json.contains(name)) return;
    throw InvalidRequest(python
                             ? Quoted(name) + " is for cases of libraries, and \"python\" names one in Python"
                             : Quoted(name) + " is for a case in Python: it needs \"python\"");
  };
  for (const char* name : {"params", "kwargs"}) check(name);
  ForEach(kRunMembers, [&](const auto& member) { check(member.name); });
}

RunRequest ReadRun(const Json& json, const RunOptions& defaults) {
  CheckKind(json);
  RunRequest run;
  if (json.contains("python")) {
    run.deadline = defaults.deadline;
    ReadOptions(json, run);
    run.case_name = NameOfPythonCase(json.at("python"));
    CheckProgress(json, run);
    return run;
  }
  static_cast<RunOptions&>(run) = defaults;
  const auto params = json.find("params"), kwargs = json.find("kwargs"), name = json.find("case");
  if (params != json.end() && kwargs != json.end()) {
    throw InvalidRequest("\"params\" and \"kwargs\" are two forms of the same: give one");
  }
  if (kwargs != json.end() && name != json.end() && name->is_string() && *name != run.case_name) {
    throw InvalidRequest("\"kwargs\" is for the case \"attention\", not " + EchoValue(*name) +
                         ": use \"params\"");
  }
  if (params != json.end()) {
    if (!params->is_object()) throw InvalidRequest("\"params\" must be an object, not " + EchoValue(*params));
    run.params = *params;
  }
  if (kwargs != json.end()) {
    RequireStrings(*kwargs);
    run.params = *kwargs;
    run.from_kwargs = true;
  }
  ReadOptions(json, run);
  CheckProgress(json, run);
  CheckDigests(run);
  return run;
}

Operation ReadOperands(const Json& json, const RunOptions& defaults) {
  const std::string operation = ReadOperation(json);
  CheckKeys(json, operation);
  if (operation == "hello") return HelloRequest{};
  if (operation == "list") {
    const auto load = json.find("load");
    return ListRequest{load == json.end() ? defaults.load : ReadFiles(*load, "load")};
  }
  if (operation == "stats") return StatsRequest{};
  if (operation == "shutdown") return ShutdownRequest{};
  if (operation == "status") return StatusRequest{};
  if (operation == "cancel") {
    const auto found = json.find("cancels");
    if (found == json.end())
      throw InvalidRequest("\"cancel\" has no \"cancels\": the id of a run that waits or runs");
    return CancelRequest{*found};
  }
  if (operation == "validate") return ValidateRequest{ReadRun(json, defaults)};
  return ReadRun(json, defaults);
}

// Without recursion: the nesting is the caller's.
void RefuseWhatJsonCannotSay(const Json& json) {
  std::vector<const Json*> pending = {&json};
  const auto check_text = [](const std::string& text) {
    if (base::ValidUtf8Prefix(text) < text.size())
      throw InvalidRequest("a request is UTF-8, which this is not: " + Quoted(text));
  };
  while (!pending.empty()) {
    const Json& value = *pending.back();
    pending.pop_back();
    if (value.is_number_float() && !std::isfinite(value.get<double>())) {
      throw InvalidRequest("a request cannot hold NaN or an infinity");
    }
    if (value.is_string()) check_text(value.get_ref<const std::string&>());
    if (!value.is_structured()) continue;
    for (auto item = value.begin(); item != value.end(); ++item) {
      if (value.is_object()) check_text(item.key());
      pending.push_back(&*item);
    }
  }
}

template <typename Value, typename Values>
Json Written(const Value& value, const Values&) {
  return value;
}
Json Written(const std::chrono::milliseconds& value, const Integers&) { return value.count(); }
Json Written(const std::optional<std::uint64_t>& value, const Integers&) { return *value; }
Json Written(const std::string& value, const PythonCase&) {
  try {
    return ParseJson(value);
  } catch (const InvalidRequest& error) {
    throw InvalidRequest(std::string("RunOptions::python is no JSON: ") + error.what());
  }
}

template <typename Record, typename... Members>
Json Written(const std::optional<Record>& record, const std::tuple<Members...>& table);

template <typename Table, typename Record>
void WriteMembers(const Record& record, const Table& table, Json& json) {
  static const Record defaults;
  ForEach(table, [&](const auto& member) {
    const auto& value = record.*member.value;
    if (member.sent == Sent::kAlways || !IsDefault(value, defaults.*member.value))
      json[member.name] = Written(value, member.values);
  });
}

template <typename Record, typename... Members>
Json Written(const std::optional<Record>& record, const std::tuple<Members...>& table) {
  Json json = Json::object();
  WriteMembers(*record, table, json);
  return json;
}

void WriteOptions(const RunOptions& options, Json& json) {
  WriteMembers(options, kRunMembers, json);
  if (options.sampling) json["repeat"] = options.sampling->most;
  if (!options.python.empty()) json.erase("case");
}

}  // namespace

const std::string& NameOf(const Operation& operation) { return Operations().at(operation.index()); }

const RunRequest* RunOf(const Operation& operation) {
  if (const auto* validate = std::get_if<ValidateRequest>(&operation)) return &validate->run;
  return std::get_if<RunRequest>(&operation);
}

std::vector<std::string> NamedLibraries(const RunRequest& request) {
  std::vector<std::string> files = request.load;
  if (request.choice.from == KernelChoice::From::kLibrary) files.push_back(request.choice.path);
  return files;
}

Request ParseRequest(std::string_view line, const RunOptions& defaults) {
  std::optional<Json> id;
  try {
    if (line.size() > kMaxRequestBytes) {
      throw InvalidRequest("the line has " + std::to_string(line.size()) + " bytes, more than " +
                           std::to_string(kMaxRequestBytes));
    }
    const ParsedText parsed = ParseText(line, kMaxNesting);
    const Json& json = parsed.value;
    if (!json.is_object()) {
      if (!parsed.overflow.empty()) throw InvalidRequest(parsed.overflow);
      throw InvalidRequest("a request is a JSON object, not " + TypeName(json) + ": " + EchoValue(json));
    }
    if (!parsed.id_problem.empty()) throw InvalidRequest(parsed.id_problem);
    if (const auto found = json.find("id"); found != json.end()) id = *found;
    if (!parsed.overflow.empty()) throw InvalidRequest(parsed.overflow);
    if (parsed.duplicate) throw InvalidRequest("the key " + Quoted(*parsed.duplicate) + " is given twice");
    return Request{id, ReadOperands(json, defaults)};
  } catch (const RequestError&) {
    throw;
  } catch (const InvalidRequest& error) {
    throw RequestError(error.what(), std::move(id));
  }
}

RunRequest MakeRun(const RunOptions& options, Json params) {
  Json json = Json::object();
  WriteOptions(options, json);
  RunRequest run;
  ReadOptions(json, run);
  run.params = std::move(params);
  return run;
}

std::string SerializeRequest(const Request& request) {
  Json json = Json::object();
  if (request.id) json["id"] = *request.id;
  json["op"] = NameOf(request.operation);
  if (const auto* list = std::get_if<ListRequest>(&request.operation); list && !list->load.empty())
    json["load"] = list->load;
  if (const auto* cancel = std::get_if<CancelRequest>(&request.operation)) json["cancels"] = cancel->cancels;
  if (const RunRequest* run = RunOf(request.operation)) {
    if (run->python.empty()) json[run->from_kwargs ? "kwargs" : "params"] = run->params;
    WriteOptions(*run, json);
  }
  RefuseWhatJsonCannotSay(json);
  return json.dump();
}

}  // namespace cppool::protocol
