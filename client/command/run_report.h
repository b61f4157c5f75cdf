// The output of `cppool run`: a line of progress, the outcome of each cell, the JUnit file, and the closing
// lines.
#pragma once

#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "client/command/junit.h"
#include "client/command/progress.h"
#include "client/command/report_page.h"
#include "client/command/run_arguments.h"
#include "client/command/runner.h"
#include "client/command/tally.h"
#include "client/suite/cell.h"

namespace cppool::command {

// Not synchronised. With --json stdout has one object per cell and a summary, and the text goes to stderr.
class RunReport {
 public:
  // `cells`: how many will run. `for_each`: --dump and --trace name folders of all cells. Throws UsageError
  // when the file of --junit or --html cannot be written.
  RunReport(const RunArguments& arguments, bool for_each, const Streams& streams, std::size_t cells,
            LoadedCases loaded);

  // `done`: of the cells; `share`: of the one under way.
  void Progress(int done, const std::string& doing, double share = 0) {
    const std::string flaky = counts().flaky > 0 ? std::to_string(counts().flaky) + " flaky, " : "";
    progress_.Show(done, counts().failed, flaky + doing, share);
  }
  void ClearProgress() { progress_.Clear(); }

  void Count(const suite::Cell& cell, const Outcome& outcome);  // adds it to the closing numbers
  const Counts& counts() const { return tally_.total(); }
  bool fails(const Outcome& outcome) const { return outcome.Fails(arguments_.retries.value_or(0) > 0); }
  int failing() const { return failing_; }  // outcomes that make the run fail

  void Complain(const std::string& problem) { streams_.err << "cppool: " << problem << "\n"; }
  void PrintOutcome(const suite::Cell& cell, const Outcome& outcome);
  void PrintListed(const suite::Cell& cell, const Outcome& outcome);  // the expected outcome, nothing has run

  // Writes all cells and what they ran on (`worlds` as in Close); those without an outcome have `rest`, and
  // `missing` says why. The first call writes; false: it could not.
  bool WriteJunit(const std::vector<suite::Cell>& cells, const std::vector<std::optional<Outcome>>& outcomes,
                  const std::map<int, Json>& worlds, const std::string& missing = "",
                  Outcome::Kind rest = Outcome::Kind::kError);

  // `worlds`: the answers to `hello`, by world size. `ended`: why the run ended when it did; empty: all cells
  // have run.
  // False: the page of --html could not be written.
  bool Close(const std::map<int, Json>& worlds, const std::string& ended);
  void CloseList();
  void CloseInterrupted(const std::map<int, Json>& worlds, const std::string& why);

 private:
  std::string Repeat(const suite::Cell& cell) const;
  std::string RepeatAll(const suite::Cell& cell, const Verdict& verdict) const;
  std::vector<std::string> Advice(const suite::Cell& cell, const Outcome& outcome) const;
  JunitCase ToJunit(const suite::Cell& cell, const Outcome& outcome) const;
  Json Record(const suite::Cell& cell, const Outcome& outcome) const;  // for --json and --html
  Json Summary(const std::map<int, Json>& worlds) const;
  bool WritePage(const Json& summary);
  Json DescribeCell(const suite::Cell& cell) const;
  Json DescribeVerdict(const suite::Cell& cell, const Verdict& verdict) const;
  void PrintPassed(const suite::Cell& cell, const Result& result);
  void PrintOutput(const std::vector<std::string>& output);
  void PrintCounts();
  std::ostream& Closing() const;

  const RunArguments& arguments_;
  const bool for_each_;
  const Streams streams_;
  const LoadedCases loaded_;
  const std::string junit_name_;  // the suite, and the class of its cases
  std::ofstream junit_;
  const std::chrono::system_clock::time_point begin_ = std::chrono::system_clock::now();
  ReportPage page_;  // has what --json prints
  Tally tally_;
  int failing_ = 0;
  command::Progress progress_;
};

}  // namespace cppool::command
