#include "protocol/request.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/digest.h"
#include "base/utf8.h"
#include "protocol/framing.h"
#include "protocol/json_parse.h"
#include "protocol/kernel_words.h"
#include "protocol/schema.h"
#include "protocol/text.h"

namespace cppool::protocol {
namespace {

using Names = std::vector<std::string>;

constexpr std::int64_t kLongestMs = 86'400'000;
constexpr double kFinestPrecision = 0.0001;

const Names& Operations() {
  static const Names names = {"hello", "list", "run", "validate", "stats", "shutdown"};
  return names;
}

const Names& KeysOf(const std::string& operation) {
  static const Names run = {"op",       "id",     "case",    "params", "kwargs", "deadline_ms", "warmup",
                            "repeat",   "checks", "perturb", "dump",   "inputs", "kernels",     "fault",
                            "sampling", "waits",  "profile", "load",   "trace",  "digests"};
  static const Names list = {"op", "id", "load"};
  static const Names other = {"op", "id"};
  return operation == "run" || operation == "validate" ? run : operation == "list" ? list : other;
}

std::string ReadOperation(const Json& json) {
  const auto found = json.find("op");
  if (found == json.end())
    throw InvalidRequest("the request has no \"op\" (known: " + Join(Operations()) + ")");
  if (!found->is_string()) {
    throw InvalidRequest("\"op\" must be a string, not " + EchoValue(*found) +
                         " (known: " + Join(Operations()) + ")");
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
    return std::find(names.begin(), names.end(), key) != names.end();
  };
  for (const auto& [key, value] : json.items()) {
    if (is_in(known, key)) continue;
    if (is_in(KeysOf("run"), key)) {
      throw InvalidRequest("the key " + Quoted(key) + " is for op \"run\", not " + Quoted(operation) +
                           " (known: " + Join(known) + ")");
    }
    throw InvalidRequest(Unknown("key", key, known, " for op " + Quoted(operation)));
  }
}

void ReadInteger(const Json& json, const char* key, std::int64_t minimum, std::int64_t maximum,
                 std::int64_t& out) {
  const auto found = json.find(key);
  if (found == json.end()) return;
  const bool fits = found->is_number_unsigned()
                        ? found->get<std::uint64_t>() <= static_cast<std::uint64_t>(maximum)
                    : found->is_number_integer() ? true
                                                 : false;
  const std::int64_t value = fits ? found->get<std::int64_t>() : 0;
  if (!fits || value < minimum || value > maximum) {
    const bool whole = found->is_number_float() && found->get<double>() == std::floor(found->get<double>());
    throw InvalidRequest(Quoted(key) + " must be an integer from " + std::to_string(minimum) + " to " +
                         std::to_string(maximum) + ", not " + EchoValue(*found) +
                         (whole ? " (an integer is written without fraction or exponent)" : ""));
  }
  out = value;
}

// `what`: "folder" or "file".
void ReadPath(const Json& json, const char* key, const std::string& what, std::string& out) {
  const auto found = json.find(key);
  if (found == json.end()) return;
  if (!found->is_string() || found->get_ref<const std::string&>().empty())
    throw InvalidRequest(Quoted(key) + " must be a " + what + "'s path, not " + EchoValue(*found));
  out = found->get<std::string>();
  if (out.find('\0') != std::string::npos)  // a path would end there
    throw InvalidRequest(Quoted(key) + " must be a " + what +
                         "'s path, without a NUL character: " + EchoValue(*found));
}

void ReadKernels(const Json& json, std::string& out) {
  const auto found = json.find("kernels");
  if (found == json.end()) return;
  const auto refuse = [&](const char* what) {
    throw InvalidRequest(std::string("\"kernels\" must be ") + kKernelWordsAllowed + ", " + what +
                         EchoValue(*found));
  };
  if (!found->is_string() || !NameKernels(found->get_ref<const std::string&>())) refuse("not ");
  out = found->get<std::string>();
  if (out.find('\0') != std::string::npos) refuse("without a NUL character: ");
}

// A path, or a list of paths.
std::vector<std::string> ReadFiles(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end()) return {};
  std::vector<std::string> files;
  for (const Json& file : found->is_array() ? *found : Json::array({*found})) {
    if (!file.is_string() || file.get_ref<const std::string&>().empty() ||
        file.get_ref<const std::string&>().find('\0') != std::string::npos)
      throw InvalidRequest(Quoted(key) +
                           " must be the path of a shared library, or a list of such paths, not " +
                           EchoValue(*found));
    files.push_back(file.get<std::string>());
  }
  if (files.size() > kMaxLibraries)
    throw InvalidRequest(Quoted(key) + " names " + std::to_string(files.size()) + " libraries, more than " +
                         std::to_string(kMaxLibraries));
  return files;
}

std::map<std::string, std::string> ReadDigests(const Json& json, const RunRequest& run) {
  const auto found = json.find("digests");
  if (found == json.end()) return {};
  if (!found->is_object())
    throw InvalidRequest("\"digests\" must be an object of digests by file, not " + EchoValue(*found));
  std::map<std::string, std::string> digests;
  for (const auto& [file, digest] : found->items()) {
    if (std::find(run.load.begin(), run.load.end(), file) == run.load.end() &&
        (file.empty() || file != ParseKernels(run.kernels).path))
      throw InvalidRequest("\"digests\" has a file that \"load\" and \"kernels\" do not name: " +
                           Quoted(file));
    if (!digest.is_string() || !base::IsDigest(digest.get_ref<const std::string&>()))
      throw InvalidRequest("the digest of " + Quoted(file) + " must be 16 of the characters 0-9a-f, not " +
                           EchoValue(digest));
    digests[file] = digest.get<std::string>();
  }
  return digests;
}

FaultRequest ReadFault(const Json& json) {
  if (!json.is_object()) throw InvalidRequest("\"fault\" must be an object, not " + EchoValue(json));
  static const Names known = {"kind", "rank", "stage", "count"};
  for (const auto& [key, value] : json.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      throw InvalidRequest(Unknown("key", key, known, " in \"fault\""));
    }
  }
  FaultRequest fault;
  const auto kind = json.find("kind"), stage = json.find("stage");
  if (kind == json.end()) throw InvalidRequest("\"fault\" has no \"kind\"");
  if (!kind->is_string())
    throw InvalidRequest("the \"kind\" of \"fault\" must be a string, not " + EchoValue(*kind));
  fault.kind = kind->get<std::string>();
  if (stage != json.end()) {
    if (!stage->is_string() || stage->get_ref<const std::string&>().empty()) {
      throw InvalidRequest("the \"stage\" of \"fault\" must be the name of a mark, or how it begins, not " +
                           EchoValue(*stage));
    }
    fault.stage = stage->get<std::string>();
  }
  ReadInteger(json, "rank", 0, 1'000'000, fault.rank);
  ReadInteger(json, "count", 1, 1'000'000, fault.count);
  return fault;
}

void ReadBoolean(const Json& json, const char* key, bool& out) {
  const auto found = json.find(key);
  if (found == json.end()) return;
  if (!found->is_boolean())
    throw InvalidRequest(Quoted(key) + " must be true or false, not " + EchoValue(*found));
  out = found->get<bool>();
}

SamplingRequest ReadSampling(const Json& json) {
  if (!json.is_object()) throw InvalidRequest("\"sampling\" must be an object, not " + EchoValue(json));
  static const Names known = {"precision", "max_ms"};
  for (const auto& [key, value] : json.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end())
      throw InvalidRequest(Unknown("key", key, known, " in \"sampling\""));
  }
  SamplingRequest sampling;
  if (const auto precision = json.find("precision"); precision != json.end()) {
    sampling.precision = precision->is_number() ? precision->get<double>() : 0;
    if (!(sampling.precision >= kFinestPrecision && sampling.precision <= 1))
      throw InvalidRequest("the \"precision\" of \"sampling\" must be a number from 0.0001 to 1, not " +
                           EchoValue(*precision));
  }
  ReadInteger(json, "max_ms", 1, kLongestMs, sampling.max_ms);
  return sampling;
}

RunRequest ReadRun(const Json& json) {
  RunRequest run;
  const auto params = json.find("params"), kwargs = json.find("kwargs"), name = json.find("case");
  if (params != json.end() && kwargs != json.end()) {
    throw InvalidRequest("\"params\" and \"kwargs\" are two forms of the same: give one");
  }
  if (name != json.end()) {
    if (!name->is_string() || name->get_ref<const std::string&>().empty()) {
      throw InvalidRequest("\"case\" must be a case's name, not " + EchoValue(*name));
    }
    if (kwargs != json.end() && *name != run.case_name) {
      throw InvalidRequest("\"kwargs\" is for the case \"attention\", not " + EchoValue(*name) +
                           ": use \"params\"");
    }
    run.case_name = name->get<std::string>();
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
  ReadInteger(json, "deadline_ms", 1, kLongestMs, run.deadline_ms);
  ReadInteger(json, "warmup", 0, 1000, run.warmup);
  if (const auto sampling = json.find("sampling"); sampling != json.end()) {
    run.sampling = ReadSampling(*sampling);
    run.repeat = kMaxRepeat;
  }
  ReadInteger(json, "repeat", 1, kMaxRepeat, run.repeat);
  ReadBoolean(json, "checks", run.checks);
  ReadBoolean(json, "waits", run.waits);
  ReadBoolean(json, "profile", run.profile);
  if (json.contains("perturb")) {
    std::int64_t seed = 0;
    ReadInteger(json, "perturb", 0, INT64_MAX, seed);
    run.perturb = static_cast<std::uint64_t>(seed);
  }
  ReadPath(json, "dump", "folder", run.dump);
  ReadPath(json, "inputs", "folder", run.inputs);
  ReadPath(json, "trace", "file", run.trace);
  ReadKernels(json, run.kernels);
  if (const auto fault = json.find("fault"); fault != json.end()) run.fault = ReadFault(*fault);
  run.load = ReadFiles(json, "load");
  run.digests = ReadDigests(json, run);
  return run;
}

Operation ReadOperands(const Json& json) {
  const std::string operation = ReadOperation(json);
  CheckKeys(json, operation);
  if (operation == "hello") return HelloRequest{};
  if (operation == "list") return ListRequest{ReadFiles(json, "load")};
  if (operation == "stats") return StatsRequest{};
  if (operation == "shutdown") return ShutdownRequest{};
  if (operation == "validate") return ValidateRequest{ReadRun(json)};
  return ReadRun(json);
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

class Serializer {
 public:
  explicit Serializer(Json& to) : json_(to) {}
  void operator()(const HelloRequest&) const { json_["op"] = "hello"; }
  void operator()(const ListRequest& list) const {
    json_["op"] = "list";
    if (!list.load.empty()) json_["load"] = list.load;
  }
  void operator()(const StatsRequest&) const { json_["op"] = "stats"; }
  void operator()(const ShutdownRequest&) const { json_["op"] = "shutdown"; }
  void operator()(const RunRequest& run) const {
    json_["op"] = "run";
    AddRun(run);
  }
  void operator()(const ValidateRequest& validate) const {
    json_["op"] = "validate";
    AddRun(validate.run);
  }

 private:
  void AddRun(const RunRequest& run) const {
    json_["case"] = run.case_name;
    json_[run.from_kwargs ? "kwargs" : "params"] = run.params;
    json_["deadline_ms"] = run.deadline_ms;
    json_["warmup"] = run.warmup;
    json_["repeat"] = run.repeat;
    json_["checks"] = run.checks;
    if (run.perturb) json_["perturb"] = *run.perturb;
    if (!run.dump.empty()) json_["dump"] = run.dump;
    if (!run.inputs.empty()) json_["inputs"] = run.inputs;
    if (!run.kernels.empty()) json_["kernels"] = run.kernels;
    if (run.fault) AddFault(*run.fault);
    if (!run.load.empty()) json_["load"] = run.load;
    if (run.sampling)
      json_["sampling"] = {{"precision", run.sampling->precision}, {"max_ms", run.sampling->max_ms}};
    if (run.waits) json_["waits"] = true;
    if (run.profile) json_["profile"] = true;
    if (!run.trace.empty()) json_["trace"] = run.trace;
    if (!run.digests.empty()) json_["digests"] = run.digests;
  }

  void AddFault(const FaultRequest& fault) const {
    Json& json = json_["fault"] = {{"kind", fault.kind}, {"rank", fault.rank}, {"count", fault.count}};
    if (!fault.stage.empty()) json["stage"] = fault.stage;
  }

  Json& json_;
};

}  // namespace

Request ParseRequest(std::string_view line) {
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
    return Request{id, ReadOperands(json)};
  } catch (const RequestError&) {
    throw;
  } catch (const InvalidRequest& error) {
    throw RequestError(error.what(), std::move(id));
  }
}

std::string SerializeRequest(const Request& request) {
  Json json = Json::object();
  if (request.id) json["id"] = *request.id;
  std::visit(Serializer{json}, request.operation);
  RefuseWhatJsonCannotSay(json);
  return json.dump();
}

}  // namespace cppool::protocol
