#include "client/command/bench_report.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "client/command/command.h"
#include "client/suite/value_text.h"

namespace cppool::command {
namespace {

std::string Rate(double tflops) { return Fixed(tflops, tflops < 10 ? 4 : 1); }

std::string Percent(double share) { return std::isfinite(share) ? Fixed(100 * share, 1) + " %" : "-"; }

std::string Time(const Measurement& measured, const std::string& name) {
  const auto stage = measured.stages.find(name);
  if (stage == measured.stages.end()) return "-";
  const StageTimes times = stage->second.times();
  return Fixed(times.ms, 3) + (std::isfinite(times.precision) ? " ± " + Percent(times.precision) : "");
}

std::string Exposed(const Measurement& measured, const std::string& name) {
  const auto stage = measured.stages.find(name);
  return stage == measured.stages.end() ? "-" : Percent(stage->second.exposed);
}

std::string RatioText(const std::map<std::string, base::Ratio>& ratios, const std::string& stage, bool wide) {
  const auto ratio = ratios.find(stage);
  if (ratio == ratios.end()) return "-";
  const auto& [value, interval] = ratio->second;
  if (!wide) return Fixed(value, 3);
  return Fixed(value, 3) + " (" + Fixed(interval.low, 3) + " to " + Fixed(interval.high, 3) + ")";
}

std::size_t SamplesOf(const Measurement& measured) {
  std::size_t most = 0;
  for (const auto& [name, stage] : measured.stages) most = std::max(most, stage.times().count);
  return most;
}

// Characters of UTF-8.
std::size_t WidthOf(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

void PrintRow(std::ostream& out, const std::vector<std::string>& cells,
              const std::vector<std::size_t>& widths) {
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::size_t width = WidthOf(cells[i]);
    out << "| " << cells[i] << std::string(widths[i] > width ? widths[i] - width : 0, ' ') << " ";
  }
  out << "|\n" << std::flush;
}

constexpr std::size_t kLineWidth = 100;
constexpr int kRankOfTimes = 2;  // the rank of the columns with times

// Knows the columns of a table: their heads, and the cell of a row in each.
class Columns {
 public:
  // `row`: one with times, if there is any. Where not all columns fit, those with the least rank are there.
  Columns(const BenchResults& results, const BenchRow& row) {
    const std::vector<std::string> stages = ShownStages({row});
    const bool several = stages.size() > 1, compares = results.kernels.size() > 1, wide = results.wide;
    const bool repeats = results.plan.repeat.has_value();
    const auto imprecise = [=](const BenchRow& each) {
      return !repeats && !each.measured.precise && each.measured.error.empty();
    };
    std::size_t swept = 0;
    for (const SweepAxis& axis : results.axes)
      if (axis.values.size() > 1)
        Add(0, axis.key,
            [at = swept++](const BenchRow& each) { return suite::TextFromValue(each.point.swept[at]); });
    if (compares) Add(0, "kernels", [](const BenchRow& each) { return each.kernels; });
    Add(0, "W", [](const BenchRow& each) { return std::to_string(each.point.cell.world_size); });
    Add(11, "samples", [=](const BenchRow& each) {
      return std::to_string(SamplesOf(each.measured)) + (imprecise(each) ? " !" : "");
    });
    for (const std::string& stage : stages) {
      Add(kRankOfTimes, stage + " ms", [=](const BenchRow& each) {
        return Time(each.measured, stage) + (!wide && imprecise(each) ? " !" : "");
      });
      Add(5, stage + " TFLOP/s", [=](const BenchRow& each) { return Rate(each.measured.Rate({stage})); });
    }
    if (several)
      Add(4, "both TFLOP/s", [=](const BenchRow& each) { return Rate(each.measured.Rate(stages)); });
    for (const std::string& stage : stages)
      Add(6, stage + " efficiency", [=](const BenchRow& each) { return Percent(Efficiency(each, {stage})); });
    if (several)
      Add(9, "both efficiency", [=](const BenchRow& each) { return Percent(Efficiency(each, stages)); });
    if (results.several_ranks)
      for (const std::string& stage : stages)
        Add(10, stage + " exposed", [=](const BenchRow& each) { return Exposed(each.measured, stage); });
    if (!row.measured.errors.empty())
      Add(7, "error", [](const BenchRow& each) { return Fixed(WorstError(each.measured), 2); });
    if (compares)
      for (const std::string& stage : stages)
        Add(3, stage + " ratio", [=](const BenchRow& each) { return RatioText(each.ratios, stage, wide); });
    if (!results.baseline.empty()) {
      for (const std::string& stage : stages)
        Add(3, stage + " now/then", [=](const BenchRow& each) {
          return each.baseline ? RatioText(each.baseline->ratios, stage, wide) : "-";
        });
      Add(1, "verdict", [](const BenchRow& each) {
        return each.baseline ? std::string(ToString(each.baseline->verdict)) : "-";
      });
    }
    if (!wide) Fit(results.rows);
  }

  const std::vector<std::string>& heads() const { return heads_; }
  std::vector<std::string> RowOf(const BenchRow& row) const {
    std::vector<std::string> cells;
    for (const auto& cell : cells_) cells.push_back(cell(row));
    return cells;
  }
  const std::vector<std::size_t>& widths() const { return widths_; }  // 0: not padded

 private:
  void Add(int rank, const std::string& head, std::function<std::string(const BenchRow&)> cell) {
    ranks_.push_back(rank);
    heads_.push_back(head);
    cells_.push_back(std::move(cell));
    widths_.push_back(0);
  }

  // Leaves out columns, those of the highest rank first, until a line fits.
  void Fit(const std::vector<BenchRow>& rows) {
    std::size_t line = 1;
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      widths_[i] = WidthOf(heads_[i]);
      if (ranks_[i] == kRankOfTimes) widths_[i] = std::max<std::size_t>(widths_[i], 16);  // of rows to come
      for (const BenchRow& row : rows) widths_[i] = std::max(widths_[i], WidthOf(cells_[i](row)));
      line += widths_[i] + 3;
    }
    while (line > kLineWidth) {
      const int last = *std::ranges::max_element(ranks_);
      if (last == 0) return;
      for (std::size_t i = ranks_.size(); i-- > 0;) {
        if (ranks_[i] != last) continue;
        line -= widths_[i] + 3;
        const auto at = static_cast<std::ptrdiff_t>(i);
        ranks_.erase(ranks_.begin() + at);
        heads_.erase(heads_.begin() + at);
        cells_.erase(cells_.begin() + at);
        widths_.erase(widths_.begin() + at);
      }
    }
  }

  std::vector<int> ranks_;
  std::vector<std::string> heads_;
  std::vector<std::function<std::string(const BenchRow&)>> cells_;
  std::vector<std::size_t> widths_;
};

std::string Wrapped(const std::string& text) {
  std::string lines;
  std::size_t column = 0;
  std::istringstream words(text);
  for (std::string word; words >> word; column += WidthOf(word)) {
    const bool fits = column + 1 + WidthOf(word) <= kLineWidth;
    lines += column == 0 ? "" : fits ? " " : "\n";
    column = fits ? column + (column > 0) : 0;
    lines += word;
  }
  return lines;
}

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
  if (!fixed.empty()) text += " With" + fixed + ".";
  return results.wide ? text : Wrapped(text + " --wide shows all columns.");
}

}  // namespace

void BenchTable::Add(const BenchResults& results) {
  // The columns depend on the stages of a row with times.
  if (printed_ > 0 || !ShownStages({results.rows.back()}).empty()) Print(results);
}

void BenchTable::Print(const BenchResults& results) {
  for (; printed_ < results.rows.size(); ++printed_) {
    const auto timed =
        std::find_if(results.rows.begin() + static_cast<std::ptrdiff_t>(printed_), results.rows.end(),
                     [](const BenchRow& row) { return !row.measured.stages.empty(); });
    const BenchRow& row = results.rows[printed_];
    const bool has_columns = !heads_.empty() && row.measured.stages.empty();
    Columns columns(results, timed == results.rows.end() ? row : *timed);
    if (!has_columns && columns.heads() != heads_) {
      if (!heads_.empty()) out_ << "\n";
      heads_ = columns.heads();
      widths_ = columns.widths();
      PrintRow(out_, heads_, widths_);
      std::vector<std::string> rule;
      for (const std::size_t width : widths_) rule.emplace_back(width > 0 ? width : 3, '-');
      PrintRow(out_, rule, widths_);
    }
    std::vector<std::string> cells = columns.RowOf(row);
    cells.resize(heads_.size(), "-");
    PrintRow(out_, cells, widths_);
  }
}

void BenchTable::End(const BenchResults& results) {
  Print(results);
  std::ostream& out = out_;
  std::set<std::string> notes;
  bool any = false;
  for (const BenchRow& row : results.rows) {
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
