#include "daemon/sampling.h"

#include <algorithm>

#include "base/statistics.h"

namespace cppool::daemon {
namespace {

// The first number of iterations with which the median can be judged, then a half or a third more each time:
// at a decision the device runs dry.
std::int64_t After(std::int64_t iterations) {
  if (iterations < std::int64_t{base::kFewestForInterval}) return base::kFewestForInterval;
  std::int64_t power = 4;
  while (power * 2 <= iterations) power *= 2;
  return iterations == power ? power + power / 2 : power * 2;
}

}  // namespace

Sampling::Sampling(const SamplingRule& rule, int ranks) : rule_(rule), ranks_(ranks) {}

std::int64_t Sampling::Start() {
  const std::lock_guard lock(mutex_);
  start_ = std::min(start_, Clock::now());
  return 1;
}

std::int64_t Sampling::Decide(const kernels::StageSamples& samples) {
  std::unique_lock lock(mutex_);
  Merge(samples);
  ++come_;
  const std::uint64_t mine = decisions_;
  if (come_ == ranks_ || left_) Conclude();
  decided_.wait(lock, [&] { return decisions_ != mine; });
  return until_;
}

void Sampling::Leave() {
  const std::lock_guard lock(mutex_);
  left_ = true;
  if (come_ > 0) Conclude();
}

std::string Sampling::stopped() const {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

void Sampling::Merge(const kernels::StageSamples& samples) {
  if (come_ == 0) slowest_.clear();
  for (const auto& [stage, values] : samples) {
    const auto known =
        std::ranges::find_if(slowest_, [&name = stage](const auto& entry) { return entry.first == name; });
    if (known == slowest_.end()) {
      slowest_.emplace_back(stage, values);
      continue;
    }
    std::vector<double>& slowest = known->second;
    slowest.resize(std::min(slowest.size(), values.size()));
    for (std::size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], values[i]);
  }
}

void Sampling::Conclude() {
  come_ = 0;
  ++decisions_;
  decided_.notify_all();
  if (left_) return;
  const auto spent = Clock::now() - start_;
  if (IsPrecise()) {
    stopped_ = "precision";
  } else if (until_ >= rule_.most_iterations) {
    stopped_ = "repeat";
  } else if (spent >= rule_.most_time) {
    stopped_ = "max_ms";
  } else {
    const auto fit = (rule_.most_time - spent) / std::max(spent / until_, Clock::duration(1));
    until_ = std::min({After(until_), until_ + std::max<std::int64_t>(fit, 1), rule_.most_iterations});
  }
}

bool Sampling::IsPrecise() const {
  return !slowest_.empty() && std::ranges::all_of(slowest_, [&](const auto& entry) {
    const auto precision = base::MedianPrecision(entry.second);
    return precision && *precision <= rule_.precision;
  });
}

}  // namespace cppool::daemon
