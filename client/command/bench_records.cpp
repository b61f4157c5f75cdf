#include "client/command/bench_records.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/new_file.h"
#include "client/command/command.h"
#include "client/suite/value_text.h"
#include "protocol/json_text.h"

namespace cppool::command {
namespace {

constexpr char kFormat[] = "cppool bench";
constexpr int kFormatVersion = 1;

Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(); }

Json ToJson(const base::Ratio& ratio) {
  return {{"value", Number(ratio.value)},
          {"low", Number(ratio.interval.low)},
          {"high", Number(ratio.interval.high)}};
}

Json ToJson(const std::map<std::string, base::Ratio>& ratios) {
  Json json = Json::object();
  for (const auto& [stage, ratio] : ratios) json[stage] = ToJson(ratio);
  return json;
}

Json ToJson(const Stage& stage) {
  const StageTimes times = stage.times();
  return {{"ms", Number(times.ms)},
          {"tflops", Number(stage.rate())},
          {"precision", Number(times.precision)},
          {"quartiles", {Number(times.quartile_1), Number(times.quartile_3)}},
          {"samples", times.count},
          {"rounds", stage.rounds},
          {"exposed_ms", Number(stage.exposed * stage.ms())}};
}

Json ToJson(const Measurement& measured, const std::vector<std::string>& shown) {
  Json json = Json::object();
  if (!measured.error.empty()) {
    json["error"] = measured.error;
    json["skipped"] = measured.skipped;
    return json;
  }
  for (const auto& [name, stage] : measured.stages) json["stages"][name] = ToJson(stage);
  json["together"] = {{"ms", Number(measured.Milliseconds(shown))}, {"tflops", Number(measured.Rate(shown))}};
  json["precise"] = measured.precise;
  return json;
}

std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string CsvLine(const std::vector<std::string>& fields) {
  std::string line;
  for (const std::string& field : fields) line += (&field == &fields.front() ? "" : ",") + CsvField(field);
  return line + "\r\n";
}

std::string CsvNumber(double value) {
  if (!std::isfinite(value)) return "";
  std::ostringstream text;
  text.precision(9);
  text << value;
  return text.str();
}

const base::Ratio* Find(const std::map<std::string, base::Ratio>& ratios, const std::string& stage) {
  const auto found = ratios.find(stage);
  return found == ratios.end() ? nullptr : &found->second;
}

// A row is the same as one of another bench when these are equal.
Json KeyOf(const Json& row) {
  Json key = Json::array();
  for (const char* member : {"case", "world_size", "params", "kernels"})
    key.push_back(row.is_object() ? row.value(member, Json()) : Json());
  return key;
}

// Returns the rounds of a stage in a row of a file; empty when there are none.
std::vector<double> RoundsOf(const Json& row, const std::string& stage) {
  std::vector<double> rounds;
  const auto path = Json::json_pointer("/measured/stages");
  if (!row.contains(path) || !row[path].contains(stage)) return rounds;
  for (const Json& round : row[path][stage].value("rounds", Json::array()))
    rounds.push_back(round.is_number() ? round.get<double>() : kUnknown);
  return rounds;
}

}  // namespace

Json BenchRowJson(const BenchRow& row, const BenchPlan& plan) {
  const std::vector<std::string> shown = ShownStages({row});
  const suite::Cell& cell = row.point.cell;
  Json json = {{"case", cell.case_name},
               {"world_size", cell.world_size},
               {"params", cell.params},
               {"kernels", row.kernels.empty() ? Json() : Json(row.kernels)},
               {"ran", row.measured.kernels},
               {"warmup", plan.warmup},
               {"repeat", plan.repeat ? Json(*plan.repeat) : Json()},
               {"measured", ToJson(row.measured, shown)},
               {"one_gpu", ToJson(row.one_gpu, shown)},
               {"efficiency", Json::object()},
               {"errors", Json::object()},
               {"ratio", ToJson(row.ratios)},
               {"command", row.bench}};
  for (const std::string& stage : shown) json["efficiency"][stage] = Number(Efficiency(row, {stage}));
  json["efficiency"]["together"] = Number(Efficiency(row, shown));
  for (const auto& [tensor, error] : row.measured.errors) json["errors"][tensor] = Number(error);
  if (row.baseline)
    json["baseline"] = {{"verdict", ToString(row.baseline->verdict)},
                        {"ratio", ToJson(row.baseline->ratios)}};
  return json;
}

Json PlanJson(const BenchPlan& plan) {
  Json json = {{"warmup", plan.warmup}};
  if (plan.repeat)
    json["repeat"] = *plan.repeat;
  else
    json.update({{"precision", plan.precision}, {"seconds", plan.seconds}});
  return json;
}

Json BenchSummaryJson(const BenchResults& results) {
  Json summary = {{"points", results.rows.size()}, {"worlds", Json::array()}, {"notes", results.notes}};
  for (const auto& [size, hello] : results.worlds) summary["worlds"].push_back(hello);
  summary.update(DescribeOrigin(results.begin));
  summary["plan"] = PlanJson(results.plan);
  summary["libraries"] = results.libraries;
  if (!results.interrupted.empty()) summary["interrupted"] = results.interrupted;
  return {{"summary", summary}};
}

std::string BenchCsvHeader(const std::vector<SweepAxis>& axes) {
  std::vector<std::string> names = {"case", "world_size", "kernels"};
  for (const SweepAxis& axis : axes) names.push_back(axis.key);
  names.insert(names.end(),
               {"stage", "ms", "precision", "quartile_1", "quartile_3", "samples", "tflops", "efficiency",
                "exposed_ms", "error", "ratio", "ratio_low", "ratio_high", "verdict", "not_measured"});
  return CsvLine(names);
}

std::string BenchCsvLines(const BenchRow& row, const std::vector<SweepAxis>& axes) {
  const suite::Cell& cell = row.point.cell;
  std::vector<std::string> begin = {cell.case_name, std::to_string(cell.world_size), row.kernels};
  for (const SweepAxis& axis : axes)
    begin.push_back(cell.params.contains(axis.key) ? suite::TextFromValue(cell.params[axis.key]) : "");
  if (!row.measured.error.empty()) {
    begin.resize(begin.size() + 14);
    begin.push_back(row.measured.error);
    return CsvLine(begin);
  }
  std::string lines;
  for (const auto& [name, stage] : row.measured.stages) {
    std::vector<std::string> fields = begin;
    const auto* ratio = Find(row.ratios, name);
    const StageTimes times = stage.times();
    fields.insert(fields.end(),
                  {name, CsvNumber(times.ms), CsvNumber(times.precision), CsvNumber(times.quartile_1),
                   CsvNumber(times.quartile_3), std::to_string(times.count), CsvNumber(stage.rate()),
                   CsvNumber(Efficiency(row, {name})), CsvNumber(stage.exposed * times.ms),
                   CsvNumber(WorstError(row.measured)), ratio ? CsvNumber(ratio->value) : "",
                   ratio ? CsvNumber(ratio->interval.low) : "", ratio ? CsvNumber(ratio->interval.high) : "",
                   row.baseline ? std::string(ToString(row.baseline->verdict)) : "", ""});
    lines += CsvLine(fields);
  }
  return lines;
}

Json BenchJson(const BenchResults& results) {
  Json content = {{"format", kFormat}, {"version", kFormatVersion}, {"rows", Json::array()}};
  content.update(BenchSummaryJson(results));
  for (const BenchRow& row : results.rows) content["rows"].push_back(BenchRowJson(row, results.plan));
  return content;
}

void SaveBench(const std::string& file, const BenchResults& results) {
  base::NewFile saved(file);
  saved.Write(protocol::JsonText(BenchJson(results)) + "\n");
  saved.Commit();
}

Json ReadSavedBench(const char* option, const std::string& file) {
  const auto refuse = [&](const std::string& why) {
    throw suite::UsageError(std::string(option) + ": " + why);
  };
  errno = 0;
  std::ifstream in(file);
  if (!in) refuse("cannot read " + file + ": " + std::strerror(errno));
  std::ostringstream text;
  text << in.rdbuf();
  Json content = Json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  const auto is = [&](const char* key, const Json& value) {
    return content.is_object() && content.contains(key) && content[key] == value;
  };
  if (!is("format", kFormat) || !content.contains("rows") || !content["rows"].is_array())
    refuse(file + " is not a file that `cppool bench --save` has written");
  if (!is("version", kFormatVersion)) refuse(file + " is of another version of cppool: save it again");
  return content;
}

const Json* FindRow(const Json& saved, const Json& row) {
  const Json key = KeyOf(row);
  for (const Json& then : saved.at("rows"))
    if (KeyOf(then) == key) return &then;
  return nullptr;
}

const Json* FindRow(const Json& saved, const BenchRow& row) { return FindRow(saved, BenchRowJson(row, {})); }

Baseline::Baseline(const std::string& file, double slower_than)
    : slower_than_(slower_than), content_(ReadSavedBench("--baseline", file)) {}

bool Baseline::Has(const BenchRow& row) const {
  const Json* const then = FindRow(content_, row);
  const std::vector<std::string> stages = ShownStages({row});
  return then && std::ranges::any_of(
                     stages, [&](const std::string& stage) { return !RoundsOf(*then, stage).empty(); });
}

std::optional<Comparison> Baseline::Compare(const BenchRow& row) const {
  const Json* const then = FindRow(content_, row);
  if (then == nullptr) return std::nullopt;
  Comparison comparison;
  bool faster = false;
  for (const std::string& stage : ShownStages({row})) {
    const auto measured = row.measured.stages.find(stage);
    if (measured == row.measured.stages.end()) continue;
    const std::vector<double>& rounds = measured->second.rounds;
    const std::vector<double> rounds_then = RoundsOf(*then, stage);
    const auto ratio = base::UnpairedRatio(rounds, rounds_then);
    if (!ratio) continue;
    comparison.ratios[stage] = *ratio;
    // The interval is too narrow where rounds depend on each other, as on a machine whose load changes.
    const bool each_round = *std::ranges::min_element(rounds) > base::Median(rounds_then);
    if (each_round && ratio->interval.low > 1 + slower_than_) comparison.slower.insert(stage);
    faster = faster || ratio->interval.high < 1 / (1 + slower_than_);
  }
  if (comparison.ratios.empty()) return std::nullopt;
  comparison.verdict = !comparison.slower.empty() ? BenchVerdict::kSlower
                       : faster                   ? BenchVerdict::kFaster
                                                  : BenchVerdict::kSame;
  return comparison;
}

std::string Baseline::Differences(const std::map<int, Json>& worlds) const {
  const Json then = content_.value("summary", Json::object()).value("worlds", Json::array());
  for (const auto& [size, now] : worlds)
    for (const Json& world : then)
      if (world.is_object() && world.value("world_size", Json()) == size &&
          DescribeWorld(world) != DescribeWorld(now))
        return "the baseline's world size " + std::to_string(size) +
               " was another one: " + DescribeWorld(world);
  return "";
}

}  // namespace cppool::command
