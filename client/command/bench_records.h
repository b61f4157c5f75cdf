// The rows of `cppool bench` for programs: JSON, CSV, and the file of --save and --baseline.
#pragma once

#include <string>
#include <vector>

#include "client/command/bench_report.h"

namespace cppool::command {

// Returns one object. client/README.md lists its members.
Json BenchRowJson(const BenchRow& row, const BenchPlan& plan);
Json BenchSummaryJson(const BenchResults& results);
// How rows are timed: {"warmup", "repeat"} or {"warmup", "precision", "seconds"}.
Json PlanJson(const BenchPlan& plan);
// What SaveBench writes.
Json BenchJson(const BenchResults& results);

// RFC 4180, a line for each stage of a row.
std::string BenchCsvHeader(const std::vector<SweepAxis>& axes);
std::string BenchCsvLines(const BenchRow& row, const std::vector<SweepAxis>& axes);

// Replaces the file at once: it is never there in part. Throws base::FileError with the reason.
void SaveBench(const std::string& file, const BenchResults& results);

// Reads a file of SaveBench for this option. Throws UsageError that names the option.
Json ReadSavedBench(const char* option, const std::string& file);
// Returns the row of the same case, world size, parameters and kernels in the content of such a file; null:
// there is none.
const Json* FindRow(const Json& saved, const Json& row);
const Json* FindRow(const Json& saved, const BenchRow& row);

// Compares rows with those of an earlier bench.
class Baseline {
 public:
  // `slower_than`: the share by which a stage must be slower, 0.02 for 2 %. Throws UsageError when the file
  // cannot be read or is not of SaveBench.
  Baseline(const std::string& file, double slower_than);

  // Returns whether it has such a row (the same case, world size, parameters and kernels) with one of its
  // stages.
  bool Has(const BenchRow& row) const;
  // Nothing without two rounds of such a row, then and now. A stage is slower when the whole 95 % confidence
  // interval of the ratio of its times is above 1 + slower_than and each of its rounds is slower than the
  // median one of then, and faster when the interval is below the reciprocal of that; the row is slower when
  // a stage is.
  std::optional<Comparison> Compare(const BenchRow& row) const;
  // Returns in which the machine of then differs from that of now; empty: in nothing that is known.
  std::string Differences(const std::map<int, Json>& worlds) const;

 private:
  const double slower_than_;
  Json content_;
};

}  // namespace cppool::command
