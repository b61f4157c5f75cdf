#include "protocol/response.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <limits>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "base/digest.h"
#include "protocol/text.h"

namespace cppool {

std::string DescribeIndex(const Json& index) {
  if (!index.is_object()) return index.dump();
  std::vector<std::string> names = {"sequence", "batch", "head", "kv_head", "token", "query", "key", "dim"};
  for (const auto& [name, value] : index.items())
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  std::string text;
  for (const std::string& name : names)
    if (index.contains(name)) text += (text.empty() ? "" : ", ") + name + " " + index.at(name).dump();
  return text;
}

std::string DescribeWorst(const Check& check) {
  std::ostringstream text;
  if (check.worst)
    text << "worst at " << DescribeIndex(check.worst->index) << ": got " << std::setprecision(9)
         << check.worst->got << ", wanted " << check.worst->wanted;
  std::string out = check.where;
  if (check.bad) {
    out = *check.bad == 0
              ? "no element alone is out"
              : std::to_string(*check.bad) + (*check.bad == 1 ? " element is out" : " elements are out");
    if (!check.where.empty()) out += ": " + check.where;
  }
  return text.str() + (check.worst && !out.empty() ? "; " : "") + out;
}

}  // namespace cppool

namespace cppool::protocol {
namespace {

// In the order of Status.
constexpr auto kStatuses = std::to_array<std::string_view>({"passed", "failed", "skipped", "error"});
static_assert(kStatuses.size() == static_cast<std::size_t>(Status::kError) + 1);

constexpr std::array<std::pair<const char*, std::uint64_t Leaks::*>, 6> kLeaks = {{
    {"allocations", &Leaks::allocations},
    {"device_bytes", &Leaks::device_bytes},
    {"host_bytes", &Leaks::host_bytes},
    {"threads", &Leaks::threads},
    {"fds", &Leaks::fds},
    {"processes", &Leaks::processes},
}};

using Times = std::vector<std::pair<std::string, double>>;

// NaN and infinities become null here and not only in the text, so that a value equals what is read back from
// its text.
Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(); }

using Samples = decltype(Rank::samples);

Json ToJson(const Samples& samples) {
  Json json = Json::object();
  for (const auto& [stage, values] : samples) {
    Json& list = json[stage] = Json::array();
    for (const double value : values) list.push_back(Number(value));
  }
  return json;
}

Json ToJson(const Times& times) {
  Json json = Json::object();
  for (const auto& [stage, value] : times) json[stage] = Number(value);
  return json;
}

Json ToJson(const Rank& rank) {
  Json json = rank.extra.is_object() ? rank.extra : Json::object();
  json["rank"] = rank.rank;
  json["ok"] = rank.ok;
  json["error"] = rank.error.empty() ? Json() : Json(rank.error);
  json["gpu_ms"] = ToJson(rank.gpu_ms);
  if (!rank.samples.empty()) json["samples"] = ToJson(rank.samples);
  if (!rank.traceback.empty()) json["traceback"] = rank.traceback;
  if (!rank.output.empty()) json["output"] = rank.output;
  return json;
}

// Reads the members of one object; errors name their path, "ranks[1].ok".
class Reader {
 public:
  Reader(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json.is_object()) Refuse(path_.empty() ? "the response" : path_, "an object", json);
  }

  const Json* Find(const char* name) const {
    const auto found = json_.find(name);
    return found == json_.end() ? nullptr : &*found;
  }
  const Json& Get(const char* name) const {
    const Json* found = Find(name);
    if (found == nullptr) throw std::runtime_error("the response has no " + Quoted(Path(name)));
    return *found;
  }
  bool Boolean(const char* name) const {
    const Json& value = Get(name);
    if (!value.is_boolean()) Refuse(Path(name), "true or false", value);
    return value.get<bool>();
  }
  std::string String(const char* name) const {
    const Json& value = Get(name);
    if (!value.is_string()) Refuse(Path(name), "a string", value);
    return value.get<std::string>();
  }
  std::string StringOrNull(const char* name) const {
    return Get(name).is_null() ? std::string() : String(name);
  }
  int Integer(const char* name) const {
    const Json& value = Get(name);
    const double number = value.is_number_integer() ? value.get<double>() : 0.5;
    if (number != std::floor(number) || std::abs(number) > std::numeric_limits<int>::max()) {
      Refuse(Path(name), "an integer", value);
    }
    return value.get<int>();
  }
  double Double(const char* name) const { return Double(Path(name), Get(name)); }
  Times Stages(const char* name) const {
    const Json& value = Get(name);
    if (!value.is_object()) Refuse(Path(name), "an object", value);
    Times times;
    for (const auto& [stage, number] : value.items())
      times.emplace_back(stage, Double(Path(name) + "." + stage, number));
    return times;
  }
  // Nothing when there is no such member.
  Samples StageSamples(const char* name) const {
    Samples samples;
    const Json* value = Find(name);
    if (value == nullptr) return samples;
    if (!value->is_object()) Refuse(Path(name), "an object", *value);
    for (const auto& [stage, list] : value->items()) {
      const std::string path = Path(name) + "." + stage;
      if (!list.is_array()) Refuse(path, "a list", list);
      auto& values = samples.emplace_back(stage, std::vector<double>()).second;
      for (const Json& number : list) values.push_back(Double(path, number));
    }
    return samples;
  }
  // Calls `read` with a Reader of each object of a list.
  template <typename Read>
  void Each(const char* name, const Read& read) const {
    const Json& list = Get(name);
    if (!list.is_array()) Refuse(Path(name), "a list", list);
    for (std::size_t i = 0; i < list.size(); ++i)
      read(Reader(list[i], Path(name) + "[" + std::to_string(i) + "]"));
  }
  const Json& json() const { return json_; }
  std::string Path(const char* name) const { return path_.empty() ? name : path_ + "." + name; }
  [[noreturn]] static void Refuse(const std::string& path, const std::string& wanted, const Json& value) {
    throw std::runtime_error("in the response, " + Quoted(path) + " must be " + wanted + ", not " +
                             EchoValue(value));
  }

 private:
  static double Double(const std::string& path, const Json& value) {
    if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (!value.is_number()) Refuse(path, "a number or null", value);
    return value.get<double>();
  }

  const Json& json_;
  std::string path_;
};

Failure ReadFailure(const Reader& reader) {
  Failure failure;
  const std::string kind = reader.String("kind");
  if (kind.empty()) Reader::Refuse(reader.Path("kind"), "a kind of failure", kind);
  const std::optional<FailureKind> known = ParseFailureKind(kind);
  if (known) {
    failure.kind = *known;
  } else {
    failure.unknown_kind = kind;
  }
  if (!reader.Get("rank").is_null()) failure.rank = reader.Integer("rank");
  failure.stage = reader.StringOrNull("stage");
  failure.detail = reader.String("detail");
  if (reader.Find("node") != nullptr) failure.node = reader.String("node");
  return failure;
}

Rank ReadRank(const Reader& reader) {
  Rank rank;
  rank.rank = reader.Integer("rank");
  rank.ok = reader.Boolean("ok");
  rank.error = reader.StringOrNull("error");
  rank.gpu_ms = reader.Stages("gpu_ms");
  rank.samples = reader.StageSamples("samples");
  if (reader.Find("traceback")) rank.traceback = reader.String("traceback");
  if (reader.Find("output")) rank.output = reader.String("output");
  rank.extra = reader.json();
  for (const char* known : {"rank", "ok", "error", "gpu_ms", "samples", "traceback", "output"})
    rank.extra.erase(known);
  return rank;
}

Check ReadCheck(const Reader& reader) {
  Check check;
  check.tensor = reader.String("tensor");
  check.against = reader.String("against");
  check.rank = reader.Integer("rank");
  check.max_abs_err = reader.Double("max_abs_err");
  check.rel_err = reader.Double("rel_err");
  check.tolerance = reader.Double("tolerance");
  check.ok = reader.Boolean("ok");
  if (reader.Find("ratio")) check.ratio = reader.Double("ratio");
  if (reader.Find("worst")) {
    const Reader worst(reader.Get("worst"), reader.Path("worst"));
    const Json& index = worst.Get("index");
    if (!IsIndex(index)) Reader::Refuse(worst.Path("index"), "a list or an object of integers", index);
    check.worst = Worst{index, worst.Double("got"), worst.Double("wanted")};
  }
  if (const Json* bad = reader.Find("bad")) {
    if (!bad->is_number_unsigned()) Reader::Refuse(reader.Path("bad"), "an integer from 0 on", *bad);
    check.bad = bad->get<std::uint64_t>();
  }
  if (reader.Find("where")) check.where = reader.String("where");
  if (check.ok && !(std::isfinite(check.max_abs_err) && std::isfinite(check.rel_err)))
    throw std::runtime_error("in the response, " + Quoted(reader.Path("ok")) +
                             " is true, and the error is not finite");
  return check;
}

}  // namespace

bool IsIndex(const Json& index) {
  return index.is_structured() &&
         std::ranges::all_of(index, [](const Json& each) { return each.is_number_integer(); });
}

std::optional<Status> ParseStatus(std::string_view word) {
  const auto found = std::ranges::find(kStatuses, word);
  if (found == kStatuses.end()) return std::nullopt;
  return static_cast<Status>(found - kStatuses.begin());
}

Json ToJson(const Check& check, Json (*number)(double)) {
  Json json = {{"tensor", check.tensor},
               {"against", check.against},
               {"rank", check.rank},
               {"max_abs_err", number(check.max_abs_err)},
               {"rel_err", number(check.rel_err)},
               {"tolerance", number(check.tolerance)},
               {"ok", check.ok}};
  if (check.ratio) json["ratio"] = number(*check.ratio);
  if (check.worst)
    json["worst"] = {{"index", check.worst->index},
                     {"got", number(check.worst->got)},
                     {"wanted", number(check.worst->wanted)}};
  if (check.bad) json["bad"] = *check.bad;
  if (!check.where.empty()) json["where"] = check.where;
  return json;
}

void SetId(Json& answer, const std::optional<Json>& id) {
  answer.erase("id");
  if (id) answer["id"] = *id;
}

bool FailedWith(const Json& answer, FailureKind kind) {
  const Json failure = answer.value("failure", Json());
  return failure.is_object() && failure.value("kind", "") == ToString(kind);
}

Json ToJson(const RunResult& result, const std::optional<Json>& id) {
  const bool passed = result.status == Status::kPassed;
  Json json = {{"ok", passed}, {"status", ToString(result.status)}};
  SetId(json, id);
  if (!passed) json["error"] = result.error;
  if (result.failure) json["failure"] = ToJson(*result.failure);
  if (result.fatal) json["fatal"] = true;
  json["ranks"] = Json::array();
  for (const Rank& rank : result.ranks) json["ranks"].push_back(ToJson(rank));
  json["checks"] = Json::array();
  for (const Check& check : result.checks) json["checks"].push_back(ToJson(check, Number));
  json["tflops"] = ToJson(result.tflops);
  json["wall_ms"] = Number(result.wall_ms);
  if (result.seed) json["seed"] = *result.seed;
  if (!result.stopped.empty()) json["stopped"] = result.stopped;
  if (!result.kernels.is_null()) json["kernels"] = result.kernels;
  if (!result.respawn.empty()) json["respawn"] = result.respawn;
  if (!result.warnings.empty()) json["warnings"] = result.warnings;
  for (const auto& [name, amount] : kLeaks)
    if (result.leaks.*amount > 0) json["leaks"][name] = result.leaks.*amount;
  if (!result.replaced.empty()) json["replaced"] = result.replaced;
  if (!result.differed.is_null()) json["differed"] = result.differed;
  if (!result.left.is_null()) json["left"] = result.left;
  return json;
}

RunResult RunResultFromJson(const Json& json) {
  const Reader reader(json, "");
  RunResult result;
  const std::string status = reader.String("status");
  const std::optional<Status> known = ParseStatus(status);
  if (!known) Reader::Refuse("status", "passed, failed, skipped or error", status);
  result.status = *known;
  const bool passed = result.status == Status::kPassed;
  if (reader.Boolean("ok") != passed) {
    throw std::runtime_error("in the response, \"ok\" and \"status\" contradict each other: " +
                             EchoValue(json["ok"]) + ", " + Quoted(status));
  }
  if (!passed) {
    result.error = reader.String("error");
    result.failure = ReadFailure(Reader(reader.Get("failure"), "failure"));
  }
  if (reader.Find("fatal") != nullptr) result.fatal = reader.Boolean("fatal");
  // The answer to a request that was refused has none of these.
  if (reader.Find("ranks") != nullptr) {
    reader.Each("ranks", [&](const Reader& rank) { result.ranks.push_back(ReadRank(rank)); });
  }
  if (reader.Find("checks") != nullptr) {
    reader.Each("checks", [&](const Reader& check) { result.checks.push_back(ReadCheck(check)); });
  }
  const auto holds = [](const auto& part) { return part.ok; };
  if (passed && !(std::ranges::all_of(result.ranks, holds) && std::ranges::all_of(result.checks, holds))) {
    throw std::runtime_error("in the response, \"status\" is passed, and a rank or a check is not ok");
  }
  if (reader.Find("tflops") != nullptr) result.tflops = reader.Stages("tflops");
  if (reader.Find("wall_ms") != nullptr) result.wall_ms = reader.Double("wall_ms");
  if (const Json* seed = reader.Find("seed")) {
    if (!seed->is_number_unsigned() && !(seed->is_number_integer() && *seed >= 0)) {
      Reader::Refuse("seed", "an integer from 0", *seed);
    }
    result.seed = seed->get<std::uint64_t>();
  }
  if (reader.Find("stopped") != nullptr) result.stopped = reader.String("stopped");
  CheckDigests(json);
  if (const Json* kernels = reader.Find("kernels")) result.kernels = *kernels;
  if (const Json* warnings = reader.Find("warnings")) {
    if (!warnings->is_array()) Reader::Refuse("warnings", "a list", *warnings);
    for (const Json& warning : *warnings) {
      if (!warning.is_string()) Reader::Refuse("warnings", "a list of strings", *warnings);
      result.warnings.push_back(warning.get<std::string>());
    }
  }
  if (reader.Find("replaced")) result.replaced = reader.String("replaced");
  for (const auto& [name, member] :
       {std::pair{"differed", &RunResult::differed}, {"left", &RunResult::left}}) {
    const Json* found = reader.Find(name);
    if (found && !found->is_object()) Reader::Refuse(name, "an object", *found);
    if (found) result.*member = *found;
  }
  if (const Json* found = reader.Find("leaks")) {
    const Reader leaks(*found, "leaks");
    for (const auto& [name, amount] : kLeaks) {
      const Json* value = leaks.Find(name);
      if (value == nullptr) continue;
      if (!value->is_number_unsigned()) Reader::Refuse(leaks.Path(name), "an integer from 0", *value);
      result.leaks.*amount = value->get<std::uint64_t>();
    }
  }
  return result;
}

void CheckDigests(const Json& response) {
  const Reader reader(response, "");
  const auto check = [](const Reader& library) {
    const Json* digest = library.Find("digest");
    if (digest && !(digest->is_string() && base::IsDigest(digest->get_ref<const std::string&>())))
      Reader::Refuse(library.Path("digest"), "16 of the characters 0-9a-f", *digest);
  };
  if (reader.Find("libraries") != nullptr) reader.Each("libraries", check);
  if (const Json* kernels = reader.Find("kernels")) check(Reader(*kernels, "kernels"));
}

Json OkResponse(Json members, const std::optional<Json>& id) {
  members["ok"] = true;
  SetId(members, id);
  return members;
}

Json ErrorResponse(const Failure& failure, const std::optional<Json>& id, bool fatal) {
  Json json = {{"ok", false},
               {"status", ToString(Status::kError)},
               {"error", failure.detail},
               {"failure", ToJson(failure)}};
  SetId(json, id);
  if (fatal) json["fatal"] = true;
  return json;
}

std::string SerializeResponse(const Json& response, std::string_view sentinel) {
  std::string line(sentinel);
  line += JsonText(response);
  line += '\n';
  return line;
}

}  // namespace cppool::protocol

namespace cppool {

std::string_view ToString(Status status) { return protocol::kStatuses.at(static_cast<std::size_t>(status)); }

std::ostream& operator<<(std::ostream& out, Status status) { return out << ToString(status); }

}  // namespace cppool
