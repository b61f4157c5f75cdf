#include "client/command/bench_row.h"

#include <algorithm>
#include <cmath>

namespace cppool::command {

StageTimes TimesOf(const std::vector<double>& samples) {
  return {base::Median(samples), base::MedianPrecision(samples).value_or(kUnknown),
          base::Quantile(samples, 0.25), base::Quantile(samples, 0.75), samples.size()};
}

double Measurement::Milliseconds(const std::vector<std::string>& names) const {
  double ms = 0;
  for (const std::string& name : names) {
    const auto found = stages.find(name);
    if (found == stages.end()) return kUnknown;
    ms += found->second.ms();
  }
  return ms;
}

double Measurement::Rate(const std::vector<std::string>& names) const {
  double work = 0;
  for (const std::string& name : names) {
    const auto found = stages.find(name);
    if (found == stages.end()) return kUnknown;
    work += found->second.work;
  }
  return work / Milliseconds(names) * 1000;
}

std::vector<double> Measurement::Rounds(const std::vector<std::string>& names) const {
  std::vector<double> sums;
  for (const std::string& name : names) {
    const auto found = stages.find(name);
    if (found == stages.end()) return {};
    const std::vector<double>& rounds = found->second.rounds;
    if (sums.empty()) sums.resize(rounds.size());
    for (std::size_t i = 0; i < std::min(sums.size(), rounds.size()); ++i) sums[i] += rounds[i];
  }
  return sums;
}

std::string_view ToString(BenchVerdict verdict) {
  return verdict == BenchVerdict::kFaster ? "faster" : verdict == BenchVerdict::kSlower ? "slower" : "same";
}

std::vector<std::string> ShownStages(const std::vector<BenchRow>& rows) {
  std::vector<std::string> all, rated;
  const auto add = [](std::vector<std::string>* list, const std::string& stage) {
    if (std::find(list->begin(), list->end(), stage) == list->end()) list->push_back(stage);
  };
  for (const BenchRow& row : rows)
    for (const auto& [name, stage] : row.measured.stages) {
      add(&all, name);
      if (std::isfinite(stage.work)) add(&rated, name);
    }
  const auto has = [&](const char* stage) { return std::ranges::find(all, stage) != all.end(); };
  if (has("forward") && has("backward")) return {"forward", "backward"};
  if (has("forward")) return {"forward"};
  return rated.empty() ? all : rated;
}

double Efficiency(const BenchRow& row, const std::vector<std::string>& stages) {
  return row.measured.Rate(stages) / row.one_gpu.Rate(stages);
}

double WorstError(const Measurement& measured) {
  double worst = kUnknown;
  for (const auto& [tensor, error] : measured.errors)
    if (!(worst >= error)) worst = error;
  return worst;
}

}  // namespace cppool::command
