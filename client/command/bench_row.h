// What `cppool bench` measures: a row is one point of the sweep with one list entry of --kernels.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/statistics.h"
#include "client/command/sweep.h"

namespace cppool::command {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// How rows are measured. Each is measured in rounds, and all kernels of a point in each round, one after the
// other.
struct BenchPlan {
  std::int64_t warmup = 3;             // iterations before those that are timed, in each round
  std::optional<std::int64_t> repeat;  // timed iterations of a row; none: until the median is precise
  double precision = 0.005;  // how well the median of all samples must be known: base::MedianPrecision
  double seconds = 3;        // the most time for a row's timed iterations
  int rounds = 10;
  bool profile = false;
  std::chrono::milliseconds deadline{300000};  // each request has it
};

// What is known of the times of a stage's iterations, on the slowest rank, in milliseconds.
struct StageTimes {
  double ms = kUnknown;         // the median
  double precision = kUnknown;  // base::MedianPrecision
  double quartile_1 = kUnknown, quartile_3 = kUnknown;
  std::size_t count = 0;
};
StageTimes TimesOf(const std::vector<double>& samples);

struct Stage {
  std::vector<double> samples;           // milliseconds of each timed iteration, on the slowest rank
  std::vector<double> rounds;            // their median in each round
  double work = kUnknown;                // TFLOP per GPU and iteration
  double exposed = kUnknown;             // the share of the time that is communication which no work hides
  std::optional<StageTimes> saved = {};  // of a row of --resume, in place of samples

  StageTimes times() const { return saved ? *saved : TimesOf(samples); }
  double ms() const { return saved ? saved->ms : base::Median(samples); }
  double rate() const { return work / ms() * 1000; }  // TFLOP/s per GPU
};

struct Measurement {
  std::string error;     // why it was not measured; empty: the stages are there
  bool skipped = false;  // the error is that it is not supported here
  std::map<std::string, Stage> stages;
  bool precise = false;                  // the median of every stage is as precise as asked for
  std::map<std::string, double> errors;  // by tensor: the largest error against fp64 over plain attention's
  Json kernels;                          // the kernels that ran, as the daemon says; null: it does not

  // These take several stages as one; NaN where one of them is missing.
  double Milliseconds(const std::vector<std::string>& names) const;
  double Rate(const std::vector<std::string>& names) const;
  std::vector<double> Rounds(const std::vector<std::string>& names) const;
};

enum class BenchVerdict { kFaster, kSlower, kSame };
std::string_view ToString(BenchVerdict verdict);  // "faster", ...

// Compares a row with the same row of an earlier bench.
struct Comparison {
  BenchVerdict verdict = BenchVerdict::kSame;
  std::set<std::string> slower;               // stages; where there are any, that is the verdict
  std::map<std::string, base::Ratio> ratios;  // by stage: time now over time then
};

struct BenchRow {
  SweepPoint point;
  std::string kernels;  // as --kernels has it; empty: the daemon's own choice
  Measurement measured, one_gpu;
  std::map<std::string, base::Ratio> ratios;  // by stage: time over that of the first of --kernels
  std::optional<Comparison> baseline;
  std::string run, bench;  // the commands that run and that measure it alone
};

// Returns the stages that are shown: those of attention where they are, else all that have a rate, else all.
std::vector<std::string> ShownStages(const std::vector<BenchRow>& rows);
// Returns the rate of each GPU over that of one GPU with the whole problem.
double Efficiency(const BenchRow& row, const std::vector<std::string>& stages);
double WorstError(const Measurement& measured);  // NaN without one

}  // namespace cppool::command
