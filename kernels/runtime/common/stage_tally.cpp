#include "kernels/runtime/common/stage_tally.h"

#include <algorithm>

namespace cppool::kernels {

StageTally::Entry& StageTally::At(const std::string& stage) {
  auto [it, added] = entries_.try_emplace(stage);
  if (added) order_.push_back(stage);
  return it->second;
}

void StageTally::Add(int iteration, const std::string& stage, bool main_stream, double milliseconds) {
  const auto add = [&](Entry& entry) {
    entry.main_stream = entry.main_stream || main_stream;
    if (iteration == kOnce) {
      entry.once += milliseconds;
    } else {
      entry.by_iteration[iteration] += milliseconds;
    }
  };
  if (main_stream) {
    for (auto slash = stage.find('/'); slash != std::string::npos; slash = stage.find('/', slash + 1)) {
      add(At(stage.substr(0, slash)));
    }
  }
  add(At(stage));
}

StageTimes StageTally::Times() const {
  StageTimes times;
  for (const std::string& stage : order_) {
    const Entry& entry = entries_.at(stage);
    if (entry.by_iteration.empty()) {
      times.emplace_back(stage, entry.once);
      continue;
    }
    std::vector<double> values;
    for (const auto& [iteration, ms] : entry.by_iteration) values.push_back(ms);
    std::sort(values.begin(), values.end());
    const std::size_t middle = values.size() / 2;
    times.emplace_back(stage, values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2);
  }
  return times;
}

StageSamples StageTally::Samples() const {
  StageSamples samples;
  for (const std::string& stage : order_) {
    const Entry& entry = entries_.at(stage);
    if (!entry.main_stream || entry.by_iteration.empty() || stage.find('/') != std::string::npos) continue;
    auto& values = samples.emplace_back(stage, std::vector<double>()).second;
    for (const auto& [iteration, ms] : entry.by_iteration) values.push_back(ms);
  }
  return samples;
}

}  // namespace cppool::kernels
