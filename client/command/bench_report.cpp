#include "client/command/bench_report.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "client/command/command.h"
#include "client/command/text.h"

namespace cppool::command {
namespace {

// The stages that are shown: those of attention where they are, else all that have a rate, else all.
std::vector<std::string> ShownStages(const std::vector<BenchPoint>& points) {
  std::vector<std::string> all, rated;
  const auto add = [](std::vector<std::string>* list, const std::string& stage) {
    if (std::find(list->begin(), list->end(), stage) == list->end()) list->push_back(stage);
  };
  for (const BenchPoint& point : points)
    for (const auto& [stage, timing] : point.measured.stages) {
      add(&all, stage);
      if (std::isfinite(timing.tflops)) add(&rated, stage);
    }
  const auto has = [&](const char* stage) { return std::find(all.begin(), all.end(), stage) != all.end(); };
  if (has("forward") && has("backward")) return {"forward", "backward"};
  if (has("forward")) return {"forward"};
  return rated.empty() ? all : rated;
}

// The rate of each GPU against that of one GPU with the whole problem.
double Efficiency(const BenchPoint& point, const std::vector<std::string>& stages) {
  return point.measured.Together(stages).tflops / point.one_gpu.Together(stages).tflops;
}

Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(); }

Json ToJson(const Timing& timing) { return {{"ms", Number(timing.ms)}, {"tflops", Number(timing.tflops)}}; }

Json ToJson(const Measurement& measured, const std::vector<std::string>& shown) {
  Json json = Json::object();
  if (!measured.error.empty()) json["error"] = measured.error;
  for (const auto& [stage, timing] : measured.stages) json["stages"][stage] = ToJson(timing);
  json["together"] = ToJson(measured.Together(shown));
  return json;
}

std::string Rate(double tflops) { return Fixed(tflops, tflops < 10 ? 4 : 1); }

std::string Percent(double share) { return std::isfinite(share) ? Fixed(100 * share, 1) + " %" : "-"; }

void PrintRow(std::ostream& out, const std::vector<std::string>& cells) {
  for (const std::string& cell : cells) out << "| " << cell << " ";
  out << "|\n";
}

std::vector<std::string> HeaderOf(const BenchResults& results, const std::vector<std::string>& stages) {
  std::vector<std::string> header;
  for (const SweepAxis& axis : results.axes)
    if (axis.values.size() > 1) header.push_back(axis.key);
  header.emplace_back("W");
  for (const std::string& stage : stages) header.insert(header.end(), {stage + " ms", stage + " TFLOP/s"});
  if (stages.size() > 1) header.emplace_back("both TFLOP/s");
  for (const std::string& stage : stages) header.push_back(stage + " efficiency");
  if (stages.size() > 1) header.emplace_back("both efficiency");
  return header;
}

std::vector<std::string> RowOf(const BenchPoint& point, const std::vector<std::string>& stages) {
  std::vector<std::string> row;
  for (const Json& value : point.point.swept) row.push_back(TextFromValue(value));
  row.push_back(std::to_string(point.point.cell.world_size));
  for (const std::string& stage : stages) {
    const Timing timing = point.measured.Together({stage});
    row.insert(row.end(), {Fixed(timing.ms, 3), Rate(timing.tflops)});
  }
  if (stages.size() > 1) row.push_back(Rate(point.measured.Together(stages).tflops));
  for (const std::string& stage : stages) row.push_back(Percent(Efficiency(point, {stage})));
  if (stages.size() > 1) row.push_back(Percent(Efficiency(point, stages)));
  return row;
}

}  // namespace

Timing Measurement::Together(const std::vector<std::string>& names) const {
  double ms = 0, work = 0;
  for (const std::string& name : names) {
    const auto found = stages.find(name);
    if (found == stages.end()) return {};
    ms += found->second.ms;
    work += found->second.ms * found->second.tflops;
  }
  return {ms, work / ms};
}

Measurement MeasurementOf(const Result& result) {
  Measurement measurement;
  for (const Rank& rank : result.ranks)
    for (const auto& [stage, ms] : rank.gpu_ms) {
      if (stage.find('/') != std::string::npos) continue;
      Timing& timing = measurement.stages[stage];
      if (!(timing.ms >= ms)) timing.ms = ms;
    }
  for (const auto& [stage, tflops] : result.tflops)
    if (const auto found = measurement.stages.find(stage); found != measurement.stages.end())
      found->second.tflops = tflops;
  return measurement;
}

void PrintBenchJson(std::ostream& out, const BenchResults& results) {
  const std::vector<std::string> stages = ShownStages(results.points);
  for (const BenchPoint& point : results.points) {
    const Cell& cell = point.point.cell;
    Json json = {{"case", cell.case_name},
                 {"world_size", cell.world_size},
                 {"params", cell.params},
                 {"warmup", results.warmup},
                 {"repeat", results.repeat},
                 {"measured", ToJson(point.measured, stages)},
                 {"one_gpu", ToJson(point.one_gpu, stages)},
                 {"command", point.bench}};
    for (const std::string& stage : stages) json["efficiency"][stage] = Number(Efficiency(point, {stage}));
    json["efficiency"]["together"] = Number(Efficiency(point, stages));
    PrintJson(out, json);
  }
  Json summary = {{"points", results.points.size()}, {"worlds", Json::array()}};
  for (const auto& [size, hello] : results.worlds) summary["worlds"].push_back(hello);
  if (!results.interrupted.empty()) summary["interrupted"] = results.interrupted;
  PrintJson(out, {{"summary", summary}});
}

void PrintBenchTable(std::ostream& out, const BenchResults& results) {
  const std::vector<std::string> stages = ShownStages(results.points);
  const std::vector<std::string> header = HeaderOf(results, stages);
  PrintRow(out, header);
  PrintRow(out, std::vector<std::string>(header.size(), "---"));
  std::set<std::string> notes;
  bool any = false;
  for (const BenchPoint& point : results.points) {
    PrintRow(out, RowOf(point, stages));
    any = any || point.measured.error.empty();
    if (!point.measured.error.empty())
      notes.insert("not measured: " + point.measured.error + "\n  repeat: " + point.run);
    else if (!point.one_gpu.error.empty())
      notes.insert("no efficiency, because the run on one GPU failed: " + point.one_gpu.error);
  }
  out << "\n";
  std::string fixed;
  for (const SweepAxis& axis : results.axes)
    if (axis.values.size() == 1) fixed += " " + axis.key + "=" + TextFromValue(axis.values[0]);
  if (any)
    out << "Verified once. Times are the median of " << results.repeat << " iterations after "
        << results.warmup
        << " for warm-up, on the slowest rank; rates are per GPU; efficiency is the rate divided by that of "
           "the same problem on one GPU."
        << (fixed.empty() ? "" : " With" + fixed + ".") << "\n";
  for (const auto& [size, hello] : results.worlds)
    out << "world size " << size << ": " << DescribeWorld(hello) << "\n";
  for (const std::string& note : notes) out << note << "\n";
  if (!results.interrupted.empty()) out << results.interrupted << "\n";
  out << std::flush;
}

}  // namespace cppool::command
