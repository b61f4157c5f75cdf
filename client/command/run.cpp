// `cppool run`: one case, or a suite of them, each in the warm pool of its world size. Its options are in run_arguments.h,
// what it says in run_report.h.
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "client/command/cell.h"
#include "client/command/command.h"
#include "client/command/diagnose.h"
#include "client/command/interruption.h"
#include "client/command/progress.h"
#include "client/command/run_arguments.h"
#include "client/command/run_report.h"
#include "client/command/runner.h"

namespace cppool::command {
namespace {

class Run {
 public:
  Run(const RunArguments& arguments, std::vector<Cell> cells, const Streams& streams)
      : diagnose_(arguments.diagnose),
        cells_(std::move(cells)),
        run_options_(ToRunOptions(arguments)),
        runner_(ToPoolOptions(arguments), {.skip_large_worlds = !arguments.suite.empty()}),
        diagnoser_(ToPoolOptions(arguments), run_options_, {},
                   [this](const std::string& doing) { report_.Progress(diagnosed_ + ": " + doing); }),
        report_(arguments, streams, cells_.size()),
        outcomes_(cells_.size()) {}

  // In the order in which they would run, each with what the daemon says would come of it.
  int List() {
    for (std::size_t index : RunOrder(cells_)) {
      const Cell& cell = cells_[index];
      report_.Progress(cell.name);
      const Outcome outcome = runner_.Validate(cell, run_options_);
      report_.ClearProgress();
      report_.Count(cell, outcome);
      report_.TellListed(cell, outcome);
    }
    report_.CloseList();
    return ExitCode();
  }

  int RunAll() {
    bool reported = false;
    {
      const Interruption interruption([this](int signal) { Interrupted(signal); });
      for (std::size_t index : RunOrder(cells_)) {
        const Cell& cell = cells_[index];
        report_.Progress(cell.name);
        Outcome outcome = runner_.Run(cell, run_options_);
        {
          const std::lock_guard lock(mutex_);
          outcomes_[index] = std::move(outcome);
          untold_ = index;
        }
        std::optional<Verdict> verdict = Diagnose(cell, *outcomes_[index]);
        {
          const std::lock_guard lock(mutex_);
          outcomes_[index]->verdict = std::move(verdict);
          report_.Count(cell, *outcomes_[index]);
          untold_.reset();
        }
        report_.ClearProgress();
        report_.Tell(cell, *outcomes_[index]);
      }
      const std::lock_guard lock(mutex_);
      reported = report_.WriteJunit(cells_, outcomes_);  // before anything that may find nobody who reads it
    }
    report_.Close(runner_.worlds());
    return reported ? ExitCode() : kFailure;
  }

 private:
  // Of a list: what running it would come to, as far as the daemon can tell.
  int ExitCode() const {
    return report_.counts().ran() > 0 && report_.counts().failed == 0 ? kSuccess : kFailure;
  }

  // On a thread of its own, while a cell may run: what there is to say when the process is asked to end.
  void Interrupted(int signal) {
    mutex_.lock();  // for good: nothing else is begun after this
    if (untold_) report_.Count(cells_[*untold_], *outcomes_[*untold_]);
    const std::string missing = DescribeInterruption(signal, report_.counts().all(), cells_.size(), "cells");
    report_.WriteJunit(cells_, outcomes_, missing);
    report_.ClearProgress();
    if (untold_) report_.Tell(cells_[*untold_], *outcomes_[*untold_]);
    report_.CloseInterrupted(missing);
  }

  // A request that is refused runs nothing: there is nothing to be learnt from running it again.
  std::optional<Verdict> Diagnose(const Cell& cell, const Outcome& outcome) {
    const bool refused =
        outcome.result && outcome.result->failure && outcome.result->failure->kind == "invalid_request";
    if (!diagnose_ || !outcome.failed() || !outcome.asked || refused) return std::nullopt;
    diagnosed_ = cell.name;
    return diagnoser_.Diagnose(cell, runner_.Retire());
  }

  const bool diagnose_;
  const std::vector<Cell> cells_;
  const RunOptions run_options_;
  CellRunner runner_;
  Diagnoser diagnoser_;
  std::string diagnosed_;  // the cell that is being diagnosed
  RunReport report_;
  std::mutex mutex_;  // of what follows, and of the report's numbers and JUnit file, where a signal may come
  std::vector<std::optional<Outcome>> outcomes_;  // as cells_; nothing yet: it has not run
  std::optional<std::size_t> untold_;             // of an outcome that is not yet counted
};

int RunCommand(const RunArguments& arguments, const Streams& streams) {
  Run run(arguments, CellsOf(arguments, streams), streams);
  return arguments.list ? run.List() : run.RunAll();
}

}  // namespace

void AddRun(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* run = app.add_subcommand("run", "Runs one case or a suite");
  AddRunOptions(*run, arguments.get());
  run->callback([arguments, streams, exit_code] { *exit_code = RunCommand(*arguments, streams); });
}

}  // namespace cppool::command
