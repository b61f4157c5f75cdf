// Statistics against published tables, closed forms and simulation.
#include "base/statistics.h"

#include <cmath>
#include <random>

#include "tests/catch.h"

namespace cppool::base::test {

using Catch::Approx;

TEST_CASE("statistics: quantiles are interpolated, in any order of the values") {
  CHECK(Median({3, 1, 2}) == 2);
  CHECK(Median({4, 1, 3, 2}) == 2.5);
  CHECK(Quantile({40, 10, 30, 20, 50}, 0.25) == 20);
  CHECK(Quantile({1, 2, 3, 4}, 0.25) == 1.75);
  CHECK(Quantile({7}, 0.75) == 7);
  CHECK(std::isnan(Median({})));
}

TEST_CASE("statistics: the interval of the median has the ranks of the published tables") {
  const auto ranks = [](int n) {
    std::vector<double> values;
    for (int i = n; i > 0; --i) values.push_back(i);  // a value is its rank
    const auto interval = MedianInterval(values);
    return interval ? std::pair(static_cast<int>(interval->low), static_cast<int>(interval->high))
                    : std::pair(0, 0);
  };
  CHECK(ranks(5) == std::pair(0, 0));
  CHECK(ranks(6) == std::pair(1, 6));
  CHECK(ranks(10) == std::pair(2, 9));
  CHECK(ranks(20) == std::pair(6, 15));
  CHECK(ranks(30) == std::pair(10, 21));
  CHECK(ranks(70) == std::pair(27, 44));
  const auto [low, high] = ranks(10000);  // the normal approximation: 5000 -+ 98
  CHECK(std::abs(low - 4902) <= 1);
  CHECK(std::abs(high - 5099) <= 1);
}

TEST_CASE("statistics: precision is half the interval's width over the median") {
  CHECK_FALSE(MedianPrecision({1, 1, 1, 1, 1}).has_value());
  CHECK(MedianPrecision({1, 1, 1, 1, 1, 1}) == 0.0);
  CHECK(MedianPrecision({9, 10, 10, 10, 10, 12}).value() == Approx(0.15));
  CHECK_FALSE(MedianPrecision({0, 0, 0, 0, 0, 0}).has_value());
}

TEST_CASE("statistics: Student's t") {
  // Fisher and Yates' table of 0.975 quantiles.
  for (const auto& [freedom, t] : std::vector<std::pair<double, double>>{{1, 12.706},
                                                                         {2, 4.303},
                                                                         {3, 3.182},
                                                                         {4, 2.776},
                                                                         {5, 2.571},
                                                                         {9, 2.262},
                                                                         {30, 2.042},
                                                                         {120, 1.980}})
    CHECK(StudentT(freedom) == Approx(t).epsilon(0.005));
  CHECK(StudentT(1e9) == Approx(1.959964).epsilon(1e-6));
}

TEST_CASE("statistics: the ratio of rounds in turn does not see what both have in common") {
  const auto ratio = PairedRatio({2, 4, 6, 8}, {1, 2, 3, 4});  // a clock that gets slower and slower
  REQUIRE(ratio);
  CHECK(ratio->value == Approx(2));
  CHECK(ratio->interval.low == Approx(2));
  CHECK(ratio->interval.high == Approx(2));
  const auto apart = UnpairedRatio({2, 4, 6, 8}, {1, 2, 3, 4});
  REQUIRE(apart);
  CHECK(apart->value == Approx(2));
  CHECK(apart->interval.low < 1);
  CHECK(apart->interval.high > 4);
  // Two ratios, 1 and e^2: mean 1 and standard error 1 of the logarithms, one degree of freedom.
  const auto two = PairedRatio({1, std::exp(2.0)}, {1, 1});
  CHECK(two->value == Approx(std::exp(1.0)));
  CHECK(two->interval.high == Approx(std::exp(1 + 12.7062)));
  CHECK_FALSE(PairedRatio({1}, {1, 2}));
  CHECK_FALSE(PairedRatio({1, 0}, {1, 2}));
  CHECK_FALSE(UnpairedRatio({1, 2}, {1}));
  CHECK(UnpairedRatio({2, 2}, {1, 1})->interval.high == Approx(2));
}

TEST_CASE("statistics: 95 % intervals hold the truth 95 times in 100") {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> noise(0, 0.1);
  int median = 0, paired = 0, unpaired = 0;
  constexpr int kTrials = 4000;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> a, b;
    for (int i = 0; i < 10; ++i) {
      a.push_back(3 * noise(random));
      b.push_back(2 * noise(random));
    }
    const auto holds = [](const Interval& interval, double truth) {
      return interval.low <= truth && truth <= interval.high;
    };
    median += holds(*MedianInterval(a), 3);
    paired += holds(PairedRatio(a, b)->interval, 1.5);
    unpaired += holds(UnpairedRatio(a, b)->interval, 1.5);
  }
  CHECK(median > 0.965 * kTrials);  // ranks 2 and 9 of ten values hold it 97.9 times in 100
  for (const int held : {paired, unpaired}) {
    CHECK(held > 0.935 * kTrials);
    CHECK(held < 0.965 * kTrials);
  }
}

}  // namespace cppool::base::test
