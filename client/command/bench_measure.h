// Measures one point of a bench with several kernels, in turn.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "client/command/bench_row.h"
#include "client/command/runner.h"

namespace cppool::command {

// Returns the time of each stage in each timed iteration, on the slowest rank. Empty when the answer has no
// samples.
std::vector<std::pair<std::string, std::vector<double>>> SlowestSamples(const Result& result);

// Returns by stage, from an answer with `waits`, the share of the step that is not work of the rank that
// works longest.
std::map<std::string, double> ExposedCommunication(const Result& result);

class PointMeasurer {
 public:
  // `progress` is called before every request with the share of the point that is done.
  PointMeasurer(CellRunner& runner, BenchPlan plan, std::function<void(double share)> progress);

  // With each of `libraries`, in their order. Verified first: what fails is not timed. Then each round asks
  // all of them, and begins with another one each time, so that none has a better place. Inputs are the same
  // for all of them: they come from the point's seed.
  std::vector<Measurement> Measure(const suite::Cell& cell, const std::vector<Libraries>& libraries);
  // Measures the same problem on one GPU, without checks and without exposed communication.
  std::vector<Measurement> MeasureAlone(const suite::Cell& cell, const std::vector<Libraries>& libraries);

 private:
  std::vector<Measurement> Rounds(const suite::Cell& cell, const std::vector<Libraries>& libraries,
                                  std::vector<Measurement> begun);
  // Returns the answer; nothing when it did not pass: `to` then has the reason.
  std::optional<Result> Ask(const suite::Cell& cell, RunOptions options, const Libraries& libraries,
                            Measurement* to);
  RunOptions Round(int round) const;

  CellRunner& runner_;
  const BenchPlan plan_;
  const std::function<void(double)> progress_;
  double asked_ = 0, to_ask_ = 1;  // requests of this point
};

}  // namespace cppool::command
