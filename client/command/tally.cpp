#include "client/command/tally.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

#include "client/command/command.h"

namespace cppool::command {
namespace {

void Count(const Outcome& outcome, Counts* counts) {
  ++(!outcome.flaky.empty()                    ? counts->flaky
     : outcome.failed()                        ? counts->failed
     : outcome.kind == Outcome::Kind::kSkipped ? counts->skipped
                                               : counts->passed);
}

Json ToJson(const Counts& counts) {
  return {{"passed", counts.passed},
          {"failed", counts.failed},
          {"skipped", counts.skipped},
          {"flaky", counts.flaky}};
}

}  // namespace

std::string AndFlaky(const Counts& counts) {
  return counts.flaky > 0 ? ", " + std::to_string(counts.flaky) + " flaky" : "";
}

std::string Text(const Counts& counts) {
  return std::to_string(counts.passed) + " passed, " + std::to_string(counts.failed) + " failed, " +
         std::to_string(counts.skipped) + " skipped" + AndFlaky(counts);
}

Counts& Tally::At(std::vector<Row>& rows, const std::string& name, const std::string& value) {
  auto found =
      std::ranges::find_if(rows, [&](const Row& row) { return row.name == name && row.value == value; });
  if (found != rows.end()) return found->counts;
  // After the last row of its name, so that the rows of an axis stay together.
  auto last = std::find_if(rows.rbegin(), rows.rend(), [&](const Row& row) { return row.name == name; });
  return rows.insert(last == rows.rend() ? rows.end() : last.base(), {name, value, {}})->counts;
}

void Tally::Add(const suite::Cell& cell, const Outcome& outcome) {
  Count(outcome, &total_);
  if (!cell.suite.empty()) Count(outcome, &At(suites_, cell.suite, ""));
  for (const auto& [axis, value] : suite::AxesOf(cell)) Count(outcome, &At(axes_, axis, value));
  if (outcome.kind == Outcome::Kind::kSkipped) ++reasons_[outcome.error];
  if (outcome.verdict) verdicts_.emplace_back(cell.name, *outcome.verdict);
  if (!outcome.result) return;
  for (const Check& check : outcome.result->checks) {
    if (!check.ratio || check.against != "oracle") continue;
    auto worst =
        std::ranges::find_if(ratios_, [&](const auto& entry) { return entry.first == check.tensor; });
    if (worst == ratios_.end()) worst = ratios_.insert(worst, {check.tensor, {-1, ""}});
    const double ratio = std::isnan(*check.ratio) ? std::numeric_limits<double>::infinity() : *check.ratio;
    if (ratio > worst->second.ratio) worst->second = {ratio, cell.name};
  }
}

Json Tally::ToJson() const {
  Json json = command::ToJson(total_);
  json["suites"] = Json::object();
  for (const Row& row : suites_) json["suites"][row.name] = command::ToJson(row.counts);
  json["worst_ratio"] = Json::object();
  for (const auto& [tensor, worst] : ratios_)
    json["worst_ratio"][tensor] = {{"ratio", worst.ratio}, {"cell", worst.cell}};
  json["verdicts"] = Json::object();
  for (const auto& [cell, verdict] : verdicts_) {
    Json& count = json["verdicts"][std::string(ToString(verdict.kind))];
    count = count.is_null() ? 1 : count.get<int>() + 1;
  }
  return json;
}

void Tally::PrintAxes(std::ostream& out) const {
  std::size_t width = 0;
  for (const Row& row : axes_) width = std::max(width, row.value.size());
  const bool flaky = total_.flaky > 0;
  std::ostringstream text;
  std::string axis;
  for (const Row& row : axes_) {
    if (axis.empty())
      text << std::left << std::setw(12) << "axis" << std::setw(static_cast<int>(width)) << "value"
           << std::right << std::setw(8) << "passed" << std::setw(8) << "failed" << std::setw(9) << "skipped"
           << (flaky ? "   flaky" : "") << "\n";
    text << std::left << std::setw(12) << (row.name == axis ? "" : row.name)
         << std::setw(static_cast<int>(width)) << row.value << std::right << std::setw(8) << row.counts.passed
         << std::setw(8) << row.counts.failed << std::setw(9) << row.counts.skipped;
    if (flaky) text << std::setw(8) << row.counts.flaky;
    text << "\n";
    axis = row.name;
  }
  out << text.str();
}

void Tally::PrintRatios(std::ostream& out) const {
  if (ratios_.empty()) return;
  std::ostringstream text;
  text << "worst error against fp64, as a multiple of plain attention's:\n";
  for (const auto& [tensor, worst] : ratios_)
    text << "  " << std::left << std::setw(18) << tensor << std::right << std::setw(6)
         << Fixed(worst.ratio, 2) << "  " << worst.cell << "\n";
  out << text.str();
}

void Tally::PrintReasons(std::ostream& out) const {
  for (const auto& [reason, count] : reasons_) out << "skipped " << count << ": " << reason << "\n";
}

void Tally::PrintVerdicts(std::ostream& out) const {
  if (verdicts_.empty()) return;
  std::size_t width = 0;
  for (const auto& [cell, verdict] : verdicts_) width = std::max(width, cell.size());
  std::ostringstream text;
  text << std::left << std::setw(static_cast<int>(width)) << "failure"
       << "  verdict\n";
  for (const auto& [cell, verdict] : verdicts_)
    text << std::left << std::setw(static_cast<int>(width)) << cell << "  " << Describe(verdict) << "\n";
  out << text.str();
}

void Tally::PrintSuites(std::ostream& out) const {
  if (suites_.size() < 2) return;
  for (const Row& row : suites_)
    out << row.name << ": " << row.counts.passed << " of " << row.counts.all() << " passed, "
        << row.counts.failed << " failed, " << row.counts.skipped << " skipped" << AndFlaky(row.counts)
        << "\n";
}

}  // namespace cppool::command
