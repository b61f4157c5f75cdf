#include "client/command/bench_report.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "client/command/command.h"
#include "client/suite/value_text.h"

namespace cppool::command {
namespace {

std::string Rate(double tflops) { return Fixed(tflops, tflops < 10 ? 4 : 1); }

std::string Percent(double share) { return std::isfinite(share) ? Fixed(100 * share, 1) + " %" : "-"; }

std::string Time(const Measurement& measured, const std::string& name) {
  const auto stage = measured.stages.find(name);
  if (stage == measured.stages.end()) return "-";
  const auto precision = base::MedianPrecision(stage->second.samples);
  return Fixed(stage->second.ms(), 3) + (precision ? " ± " + Percent(*precision) : "");
}

std::string Exposed(const Measurement& measured, const std::string& name) {
  const auto stage = measured.stages.find(name);
  return stage == measured.stages.end() ? "-" : Percent(stage->second.exposed);
}

std::string RatioText(const std::map<std::string, base::Ratio>& ratios, const std::string& stage) {
  const auto ratio = ratios.find(stage);
  if (ratio == ratios.end()) return "-";
  const auto& [value, interval] = ratio->second;
  return Fixed(value, 3) + " (" + Fixed(interval.low, 3) + " to " + Fixed(interval.high, 3) + ")";
}

std::size_t SamplesOf(const Measurement& measured) {
  std::size_t most = 0;
  for (const auto& [name, stage] : measured.stages) most = std::max(most, stage.samples.size());
  return most;
}

void PrintRow(std::ostream& out, const std::vector<std::string>& cells) {
  for (const std::string& cell : cells) out << "| " << cell << " ";
  out << "|\n";
}

// Knows the columns of a table: their heads, and the cell of a row in each.
class Columns {
 public:
  Columns(const BenchResults& results, const std::vector<std::string>& stages) {
    const bool several = stages.size() > 1, compares = results.kernels.size() > 1;
    const auto any = [&](const auto& has) {
      return std::any_of(results.rows.begin(), results.rows.end(), has);
    };
    std::size_t swept = 0;
    for (const SweepAxis& axis : results.axes)
      if (axis.values.size() > 1)
        Add(axis.key,
            [at = swept++](const BenchRow& row) { return suite::TextFromValue(row.point.swept[at]); });
    if (compares) Add("kernels", [](const BenchRow& row) { return row.kernels; });
    Add("W", [](const BenchRow& row) { return std::to_string(row.point.cell.world_size); });
    Add("samples", [&](const BenchRow& row) {
      return std::to_string(SamplesOf(row.measured)) +
             (results.plan.repeat || row.measured.precise || !row.measured.error.empty() ? "" : " !");
    });
    for (const std::string& stage : stages) {
      Add(stage + " ms", [=](const BenchRow& row) { return Time(row.measured, stage); });
      Add(stage + " TFLOP/s", [=](const BenchRow& row) { return Rate(row.measured.Rate({stage})); });
    }
    if (several) Add("both TFLOP/s", [=](const BenchRow& row) { return Rate(row.measured.Rate(stages)); });
    for (const std::string& stage : stages)
      Add(stage + " efficiency", [=](const BenchRow& row) { return Percent(Efficiency(row, {stage})); });
    if (several)
      Add("both efficiency", [=](const BenchRow& row) { return Percent(Efficiency(row, stages)); });
    if (any([](const BenchRow& row) { return row.point.cell.world_size > 1; }))
      for (const std::string& stage : stages)
        Add(stage + " exposed", [=](const BenchRow& row) { return Exposed(row.measured, stage); });
    if (any([](const BenchRow& row) { return !row.measured.errors.empty(); }))
      Add("error", [](const BenchRow& row) { return Fixed(WorstError(row.measured), 2); });
    if (compares)
      for (const std::string& stage : stages)
        Add(stage + " ratio", [=](const BenchRow& row) { return RatioText(row.ratios, stage); });
    if (results.baseline.empty()) return;
    for (const std::string& stage : stages)
      Add(stage + " now/then",
          [=](const BenchRow& row) { return row.baseline ? RatioText(row.baseline->ratios, stage) : "-"; });
    Add("verdict", [](const BenchRow& row) {
      return row.baseline ? std::string(ToString(row.baseline->verdict)) : "-";
    });
  }

  const std::vector<std::string>& heads() const { return heads_; }
  std::vector<std::string> RowOf(const BenchRow& row) const {
    std::vector<std::string> cells;
    for (const auto& cell : cells_) cells.push_back(cell(row));
    return cells;
  }

 private:
  void Add(const std::string& head, std::function<std::string(const BenchRow&)> cell) {
    heads_.push_back(head);
    cells_.push_back(std::move(cell));
  }

  std::vector<std::string> heads_;
  std::vector<std::function<std::string(const BenchRow&)>> cells_;
};

// Says what the table's columns mean, in one paragraph.
std::string Legend(const BenchResults& results) {
  const BenchPlan& plan = results.plan;
  std::string text = "Verified once. Times are the median of ";
  text += plan.repeat ? std::to_string(*plan.repeat) + " iterations"
                      : "the samples, until it is known to " + Percent(plan.precision) + " or for " +
                            Fixed(plan.seconds, 1) + " s (\"!\": it is less precise than that)";
  text += ", in " + std::to_string(plan.rounds) + (plan.rounds == 1 ? " round" : " rounds") + " after " +
          std::to_string(plan.warmup) +
          " for warm-up each, on the slowest rank, with half the width of its 95 % confidence interval; "
          "rates are "
          "per GPU; efficiency is the rate divided by that of the same problem on one GPU; exposed is the "
          "communication that no work hides, of the time; error is the largest against fp64, over plain "
          "attention's.";
  if (results.kernels.size() > 1)
    text += " Ratio is the time over that of \"" + results.kernels.front() +
            "\", measured in turn, with its 95 % confidence interval over the rounds.";
  std::string fixed;
  for (const SweepAxis& axis : results.axes)
    if (axis.values.size() == 1) fixed += " " + axis.key + "=" + suite::TextFromValue(axis.values[0]);
  return text + (fixed.empty() ? "" : " With" + fixed + ".");
}

}  // namespace

void PrintBenchTable(std::ostream& out, const BenchResults& results) {
  const Columns columns(results, ShownStages(results.rows));
  PrintRow(out, columns.heads());
  PrintRow(out, std::vector<std::string>(columns.heads().size(), "---"));
  std::set<std::string> notes;
  bool any = false;
  for (const BenchRow& row : results.rows) {
    PrintRow(out, columns.RowOf(row));
    any = any || row.measured.error.empty();
    if (!row.measured.error.empty())
      notes.insert("not measured: " + row.measured.error + "\n  repeat: " + row.run);
    else if (!row.one_gpu.error.empty())
      notes.insert("no efficiency, because the run on one GPU failed: " + row.one_gpu.error);
  }
  out << "\n";
  if (any) out << Legend(results) << "\n";
  for (const auto& [size, hello] : results.worlds)
    out << "world size " << size << ": " << DescribeWorld(hello) << "\n";
  std::set<std::string> named;
  for (const BenchRow& row : results.rows)
    if (row.measured.kernels.is_object() && named.insert(row.measured.kernels.dump()).second) {
      out << "kernels:";
      for (const auto& [key, value] : row.measured.kernels.items())
        out << " " << key << " " << suite::TextFromValue(value);
      out << "\n";
    }
  for (const std::string& note : notes) out << note << "\n";
  for (const std::string& note : results.notes) out << note << "\n";
  if (!results.interrupted.empty()) out << results.interrupted << "\n";
  out << std::flush;
}

}  // namespace cppool::command
