#include "client/command/bench_resume.h"

#include <filesystem>
#include <vector>

#include "base/new_file.h"
#include "client/command/command.h"
#include "client/suite/value_text.h"
#include "protocol/json_text.h"

namespace cppool::command {
namespace {

constexpr char kAnother[] = ": give --resume another file, or remove this one";

double NumberOf(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? found->get<double>() : kUnknown;
}

// The reverse of a stage's JSON (bench_records.cpp).
Stage ToStage(const Json& json) {
  Stage stage;
  StageTimes times{NumberOf(json, "ms"), NumberOf(json, "precision"), kUnknown, kUnknown,
                   json.at("samples").get<std::size_t>()};
  const Json& quartiles = json.at("quartiles");
  if (quartiles.at(0).is_number()) times.quartile_1 = quartiles.at(0);
  if (quartiles.at(1).is_number()) times.quartile_3 = quartiles.at(1);
  stage.rounds = json.at("rounds").get<std::vector<double>>();
  stage.work = NumberOf(json, "tflops") * times.ms / 1000;
  stage.exposed = NumberOf(json, "exposed_ms") / times.ms;
  stage.saved = times;
  return stage;
}

// Nothing when it was not measured.
std::optional<Measurement> ToMeasurement(const Json& json) {
  if (!json.contains("stages")) return std::nullopt;
  Measurement measured;
  for (const auto& [name, stage] : json.at("stages").items()) measured.stages[name] = ToStage(stage);
  measured.precise = json.at("precise");
  return measured;
}

}  // namespace

ResumedBench::ResumedBench(const std::string& file, const BenchPlan& plan) : file_(file) {
  if (const std::string why = base::WhyNotWritable(file); !why.empty())
    throw suite::UsageError("--resume: cannot write " + file + ": " + why);
  if (!std::filesystem::exists(file)) return;
  content_ = ReadSavedBench("--resume", file);
  const Json summary = content_.value("summary", Json::object());
  const Json then = summary.value("plan", Json()), now = PlanJson(plan);
  if (!then.is_object()) Refuse("does not say how it was measured");
  for (const auto& [member, value] : now.items())
    if (then.value(member, Json()) != value)
      Refuse("was measured with a " + member + " of " + protocol::JsonText(then.value(member, Json())) +
             ", and this bench has " + protocol::JsonText(value));
}

void ResumedBench::Refuse(const std::string& why) const {
  throw suite::UsageError("--resume: " + file_ + " " + why + kAnother);
}

void ResumedBench::Check(const BenchResults& now) const {
  const Json summary = content_.is_null() ? Json::object() : content_.value("summary", Json::object());
  const Json worlds = summary.value("worlds", Json::array());
  for (const Json& then : worlds) {
    const auto found = now.worlds.find(then.is_object() ? then.value("world_size", 0) : 0);
    if (found == now.worlds.end()) continue;
    const Json& world = found->second;
    if (DescribeWorld(then) != DescribeWorld(world))
      Refuse("was measured on " + DescribeWorld(then) + ", and this is " + DescribeWorld(world));
    if (then.value("version", Json()) != world.value("version", Json()))
      Refuse("was measured by cppool " + protocol::JsonText(then.value("version", Json())) +
             ", and this is " + protocol::JsonText(world.value("version", Json())));
  }
  const Json libraries = summary.value("libraries", Json::object());
  for (const auto& [name, digest] : now.libraries)
    if (libraries.contains(name) && libraries[name] != digest)
      Refuse("was measured with another content of " + name);
}

bool ResumedBench::Take(BenchRow* row) const try {
  const Json* const then = content_.is_null() ? nullptr : FindRow(content_, *row);
  if (then == nullptr) return false;
  auto measured = ToMeasurement(then->at("measured"));
  if (!measured) return false;
  measured->kernels = then->at("ran");
  // An error that is not finite is saved as null.
  for (const auto& [tensor, error] : then->at("errors").items())
    measured->errors[tensor] = error.is_number() ? error.get<double>() : HUGE_VAL;
  row->measured = std::move(*measured);
  row->one_gpu = ToMeasurement(then->at("one_gpu")).value_or(Measurement{});
  return true;
} catch (const Json::exception&) {
  return false;  // edited by hand
}

void ResumedBench::Save(const BenchResults& results) const {
  Json content = BenchJson(results);
  if (!content_.is_null()) {
    Json rows = content["rows"];
    for (const Json& row : content_.at("rows"))
      if (FindRow(content, row) == nullptr) rows.push_back(row);
    content["rows"] = std::move(rows);
    Json libraries = content_.at("summary").value("libraries", Json::object());
    libraries.update(content["summary"]["libraries"]);
    content["summary"]["libraries"] = std::move(libraries);
  }
  base::NewFile file(file_);
  file.Write(protocol::JsonText(content) + "\n");
  file.Commit();
}

}  // namespace cppool::command
