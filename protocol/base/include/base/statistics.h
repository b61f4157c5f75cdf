// The statistics behind `sampling` of a run, and of what clients report of its samples. Times are positive;
// none of these functions keeps what it is given.
#pragma once

#include <optional>
#include <vector>

namespace cppool::base {

struct Interval {
  double low = 0, high = 0;
};

// The value below which the share `p` of the values lies, interpolated linearly between neighbours
// (definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages", The American Statistician
// 50(4), 1996). NaN for no values.
double Quantile(std::vector<double> values, double p);
double Median(std::vector<double> values);

// The fewest values that have a 95 % confidence interval of their median.
inline constexpr std::size_t kFewestForInterval = 6;

// The 95 % confidence interval of the median, between two of the values: it assumes no distribution (order
// statistics, exact binomial ranks: Le Boudec, "Performance Evaluation of Computer and Communication
// Systems", 2010, section 2.2). None for fewer than six values.
std::optional<Interval> MedianInterval(std::vector<double> values);

// Half the width of that interval over the median: 0.01 is 1 %. Nothing where there is no interval, or when
// the median is not positive. How small it must be to stop measuring: Hoefler and Belli, "Scientific
// Benchmarking of Parallel Computing Systems", SC 2015, section 4.2.2.
std::optional<double> MedianPrecision(const std::vector<double>& values);

// 0.975 quantile of Student's t distribution: a two-sided 95 % interval is this many standard errors wide on
// each side. `freedom`: at least 1. It is exact to 0.5 % for whole numbers (1 and 2 from the table, then
// Cornish and Fisher's expansion).
double StudentT(double freedom);

struct Ratio {
  double value = 0;
  Interval interval;  // 95 % confidence
};

// The ratio of two things that were measured in turn, once each in every round: the geometric mean of the
// rounds' ratios, with Student's t interval of their logarithms. What both have in common in a round, such as
// the clock rate, cancels. (Paired design; intervals of ratios over repetitions of whole runs: Kalibera and
// Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013.) When the lists have different lengths, the
// end of the longer one is left out. None for fewer than two rounds, or values that are not positive.
std::optional<Ratio> PairedRatio(const std::vector<double>& numerator,
                                 const std::vector<double>& denominator);

// The same ratio for rounds that were not run in turn, but at another time: Welch's interval of the
// difference of the means of the logarithms. None for fewer than two rounds on either side, or values that
// are not positive.
std::optional<Ratio> UnpairedRatio(const std::vector<double>& numerator,
                                   const std::vector<double>& denominator);

}  // namespace cppool::base
