#include "base/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace cppool::base {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr double kTail = 0.025;  // outside of a 95 % interval, on each side

// The most smallest values that may be left out of the interval: P(Binomial(n, 1/2) < k) <= kTail. 0 where
// there is no interval.
std::size_t LeftOut(std::size_t n) {
  const double count = static_cast<double>(n);
  double below = 0;
  for (std::size_t k = 0; k < n; ++k) {
    const double i = static_cast<double>(k);
    below += std::exp(std::lgamma(count + 1) - std::lgamma(i + 1) - std::lgamma(count - i + 1) -
                      count * std::log(2.0));
    if (below > kTail) return k;
  }
  return 0;
}

struct Moments {
  double mean = 0, variance = 0;  // the variance of that mean
  double freedom = 0;
};

Moments MomentsOf(const std::vector<double>& values) {
  const double count = static_cast<double>(values.size());
  Moments moments;
  moments.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) squares += (value - moments.mean) * (value - moments.mean);
  moments.freedom = count - 1;
  moments.variance = squares / moments.freedom / count;
  return moments;
}

std::optional<std::vector<double>> Logarithms(const std::vector<double>& values) {
  std::vector<double> logs;
  for (const double value : values) {
    if (!(value > 0) || !std::isfinite(value)) return std::nullopt;
    logs.push_back(std::log(value));
  }
  if (logs.size() < 2) return std::nullopt;
  return logs;
}

Ratio FromLogarithm(double mean, double variance, double freedom) {
  const double half = StudentT(freedom) * std::sqrt(variance);
  return {std::exp(mean), {std::exp(mean - half), std::exp(mean + half)}};
}

}  // namespace

double Quantile(std::vector<double> values, double p) {
  if (values.empty()) return kNone;
  std::ranges::sort(values);
  const double at = p * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

std::optional<Interval> MedianInterval(std::vector<double> values) {
  const std::size_t left_out = LeftOut(values.size());
  if (left_out == 0) return std::nullopt;
  std::ranges::sort(values);
  return Interval{values[left_out - 1], values[values.size() - left_out]};
}

std::optional<double> MedianPrecision(const std::vector<double>& values) {
  const auto interval = MedianInterval(values);
  const double median = Median(values);
  if (!interval || !(median > 0)) return std::nullopt;
  return (interval->high - interval->low) / 2 / median;
}

double StudentT(double freedom) {
  if (freedom <= 1) return 12.7062;
  if (freedom <= 2) return 4.30265 + (2 - freedom) * (12.7062 - 4.30265);
  constexpr double z = 1.959964;
  const double z3 = z * z * z, z5 = z3 * z * z, z7 = z5 * z * z, z9 = z7 * z * z;
  const double n = freedom;
  return z + (z3 + z) / (4 * n) + (5 * z5 + 16 * z3 + 3 * z) / (96 * n * n) +
         (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * n * n * n) +
         (79 * z9 + 776 * z7 + 1482 * z5 - 1920 * z3 - 945 * z) / (92160 * n * n * n * n);
}

std::optional<Ratio> PairedRatio(const std::vector<double>& numerator,
                                 const std::vector<double>& denominator) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(numerator.size(), denominator.size()); ++i)
    ratios.push_back(numerator[i] / denominator[i]);
  const auto logs = Logarithms(ratios);
  if (!logs) return std::nullopt;
  const Moments moments = MomentsOf(*logs);
  return FromLogarithm(moments.mean, moments.variance, moments.freedom);
}

std::optional<Ratio> UnpairedRatio(const std::vector<double>& numerator,
                                   const std::vector<double>& denominator) {
  const auto above = Logarithms(numerator), below = Logarithms(denominator);
  if (!above || !below) return std::nullopt;
  const Moments a = MomentsOf(*above), b = MomentsOf(*below);
  const double variance = a.variance + b.variance;
  const double parts = a.variance * a.variance / a.freedom + b.variance * b.variance / b.freedom;
  // Without any variation the freedom does not matter.
  const double freedom = parts > 0 ? variance * variance / parts : a.freedom + b.freedom;
  return FromLogarithm(a.mean - b.mean, variance, freedom);
}

}  // namespace cppool::base
