// Counts of outcomes by suite and by axis, and the largest errors against the oracle.
#pragma once

#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "client/command/runner.h"
#include "client/suite/cell.h"

namespace cppool::command {

struct Counts {
  int passed = 0, failed = 0, skipped = 0, flaky = 0;

  int ran() const { return passed + failed + flaky; }
  int all() const { return ran() + skipped; }
};
std::string AndFlaky(const Counts& counts);  // ", 2 flaky"; empty when there are none
std::string Text(const Counts& counts);  // "9 passed, 1 failed, 0 skipped", then ", 2 flaky" if there are any

class Tally {
 public:
  void Add(const suite::Cell& cell, const Outcome& outcome);

  const Counts& total() const { return total_; }
  // {"passed", "failed", "skipped", "flaky", "suites": {name: the same}, "worst_ratio": {tensor: {"ratio",
  // "cell"}}, "verdicts": {"bug": 1, ...}}
  Json ToJson() const;
  // Tables. An empty one is not printed, nor that of the suites where there is only one.
  void PrintAxes(std::ostream& out) const;
  void PrintRatios(std::ostream& out) const;
  void PrintReasons(std::ostream& out) const;  // why cells were skipped
  void PrintVerdicts(std::ostream& out) const;
  void PrintSuites(std::ostream& out) const;

 private:
  struct Worst {
    // Our error over that of plain attention in the same dtype; infinity where it is not finite.
    double ratio = 0;
    std::string cell;
  };
  struct Row {
    std::string name, value;
    Counts counts;
  };
  static Counts& At(std::vector<Row>& rows, const std::string& name, const std::string& value);

  Counts total_;
  std::vector<Row> axes_;  // in order of first appearance
  std::vector<Row> suites_;
  std::map<std::string, int> reasons_;
  std::vector<std::pair<std::string, Worst>> ratios_;      // by tensor, in the order of the answers
  std::vector<std::pair<std::string, Verdict>> verdicts_;  // by cell
};

}  // namespace cppool::command
