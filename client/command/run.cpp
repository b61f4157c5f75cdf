// `cppool run`: one case or a suite, each cell in the warm pool of its world size. Its options are in run_arguments.h, its
// output in run_report.h.
#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "client/command/case_output.h"
#include "client/command/cell.h"
#include "client/command/command.h"
#include "client/command/diagnose.h"
#include "client/command/interruption.h"
#include "client/command/libraries.h"
#include "client/command/progress.h"
#include "client/command/run_arguments.h"
#include "client/command/run_report.h"
#include "client/command/runner.h"
#include "client/command/text.h"
#include "client/command/watch.h"
#include "protocol/kernel_words.h"
#include "protocol/parameters.h"

namespace cppool::command {
namespace {

class Run {
 public:
  // `runner` has the pools, and `output` what they write; both outlive it.
  Run(const RunArguments& arguments, RunOptions run_options, std::vector<Cell> cells, CellRunner& runner,
      CaseOutput& output, const Streams& streams)
      : arguments_(arguments),
        cells_(std::move(cells)),
        run_options_(std::move(run_options)),
        output_(output),
        runner_(runner),
        diagnoser_(ToPoolOptions(arguments), run_options_, {},
                   [this](const std::string& doing) { report_.Progress(diagnosed_ + ": " + doing); }),
        report_(arguments, streams, cells_.size()),
        outcomes_(cells_.size()) {}

  // The cells in the order in which they would run, each with the outcome that the daemon expects.
  int List() {
    for (std::size_t index : RunOrder(cells_)) {
      const Cell& cell = cells_[index];
      report_.Progress(cell.name);
      const Outcome outcome = runner_.Validate(cell, run_options_);
      report_.ClearProgress();
      report_.Count(cell, outcome);
      report_.PrintListed(cell, outcome);
    }
    report_.CloseList();
    return ExitCode();
  }

  int RunAll() {
    bool reported = false;
    {
      const Interruption interruption([this](int signal) { Interrupted(signal); });
      ExpectCells();
      for (std::size_t index : RunOrder(cells_)) {
        const Cell& cell = cells_[index];
        if (Stops()) break;
        report_.Progress(cell.name);
        Outcome outcome = runner_.Run(cell, WithinLimit());
        output_.Note(std::string(ToString(outcome.kind)) + (outcome.error.empty() ? "" : ": ") +
                     outcome.error);
        {
          const std::lock_guard lock(mutex_);
          outcomes_[index] = std::move(outcome);
          uncounted_ = index;
        }
        std::optional<Verdict> verdict = Diagnose(cell, *outcomes_[index]);
        {
          const std::lock_guard lock(mutex_);
          outcomes_[index]->verdict = std::move(verdict);
          report_.Count(cell, *outcomes_[index]);
          uncounted_.reset();
        }
        report_.ClearProgress();
        report_.PrintOutcome(cell, *outcomes_[index]);
      }
      const std::lock_guard lock(mutex_);
      // Before stdout is written, which may fail. After a first failure that is enough the rest has not failed.
      reported = report_.WriteJunit(cells_, outcomes_, stopped_,
                                    arguments_.fail_fast ? Status::kSkipped : Status::kError);
    }
    report_.Close(runner_.worlds(), stopped_);
    if (const std::string problem = output_.Problem(); !problem.empty()) {
      report_.Complain(problem);
      reported = false;
    }
    return reported && stopped_.empty() ? ExitCode() : kFailure;
  }

 private:
  // A diagnosis needs the devices for itself.
  void ExpectCells() {
    if (arguments_.diagnose) return;
    std::deque<int> world_sizes;
    for (std::size_t index : RunOrder(cells_)) world_sizes.push_back(cells_[index].world_size);
    runner_.Expect(std::move(world_sizes));
  }

  // Whether no further cell is to run; then stopped_ says why.
  bool Stops() {
    const std::string done = " with " + std::to_string(report_.counts().all()) + " of " +
                             std::to_string(cells_.size()) + " cells done";
    if (arguments_.fail_fast && report_.counts().failed > 0)
      stopped_ = "stopped after the first failure (--fail-fast)" + done;
    if (arguments_.limit > 0 && Left() <= std::chrono::milliseconds(0))
      stopped_ = "stopped at the limit of the run (--limit)" + done;
    return !stopped_.empty();
  }

  std::chrono::milliseconds Left() const {
    return std::chrono::ceil<std::chrono::milliseconds>(start_ + ToMilliseconds(arguments_.limit) -
                                                        std::chrono::steady_clock::now());
  }

  // A case's deadline ends with the run's limit.
  RunOptions WithinLimit() const {
    RunOptions options = run_options_;
    if (arguments_.limit > 0)
      options.deadline = std::min(options.deadline, std::max(Left(), std::chrono::milliseconds(1)));
    return options;
  }

  // After List(): of the expected outcomes.
  int ExitCode() const {
    return report_.counts().ran() > 0 && report_.counts().failed == 0 ? kSuccess : kFailure;
  }

  // Called on another thread, while a cell may run: reports what is done.
  void Interrupted(int signal) {
    mutex_.lock();  // never unlocked: the main thread stops at its next outcome
    if (uncounted_) report_.Count(cells_[*uncounted_], *outcomes_[*uncounted_]);
    const std::string missing = DescribeInterruption(signal, report_.counts().all(), cells_.size(), "cells");
    report_.WriteJunit(cells_, outcomes_, missing);
    report_.ClearProgress();
    if (uncounted_) report_.PrintOutcome(cells_[*uncounted_], *outcomes_[*uncounted_]);
    report_.CloseInterrupted(missing);
  }

  // A refused request is not run again: it would be refused again.
  std::optional<Verdict> Diagnose(const Cell& cell, const Outcome& outcome) {
    const bool refused =
        outcome.result && outcome.result->failure && outcome.result->failure->kind == "invalid_request";
    if (!arguments_.diagnose || !outcome.failed() || !outcome.asked || refused) return std::nullopt;
    diagnosed_ = cell.name;
    return diagnoser_.Diagnose(cell, runner_.Retire(), runner_.Digests(run_options_));
  }

  const RunArguments& arguments_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::vector<Cell> cells_;
  const RunOptions run_options_;
  CaseOutput& output_;
  CellRunner& runner_;
  Diagnoser diagnoser_;
  std::string diagnosed_;  // the cell that is being diagnosed
  RunReport report_;
  std::mutex mutex_;  // guards the members below, and the counts and the JUnit file of the report
  std::vector<std::optional<Outcome>> outcomes_;  // of cells_; empty: not run yet
  std::string stopped_;                           // why cells have not run; empty: nothing stopped the run
  std::optional<std::size_t> uncounted_;          // of an outcome that the report has not counted yet
};

// The command as often as it is run: once, or with --watch at each save.
class Rounds {
 public:
  Rounds(const RunArguments& arguments, const Streams& streams)
      : arguments_(arguments),
        streams_(streams),
        cells_(CellsOf(arguments, streams)),
        output_(arguments.log),
        runner_(ToPoolOptions(arguments),
                {.skip_large_worlds = !arguments.suite.empty(), .all_output = arguments.verbose}, &output_) {}

  int RunOnce(FileWatch* watch) {
    RunOptions options = ToRunOptions(arguments_);
    std::optional<Libraries> libraries = MakeLibraries(
        arguments_.daemon.libraries, arguments_.kernels, [this] { return runner_.Hello(FirstWorld()); },
        streams_.err, arguments_.verbose);
    if (!libraries) return kFailure;
    if (watch) watch->Add(libraries->watched);
    runner_.NameSources(libraries->sources);
    options.load = std::move(libraries->load);
    options.kernels = std::move(libraries->kernels);
    Run run(arguments_, std::move(options), cells_, runner_, output_, streams_);
    return arguments_.list ? run.List() : run.RunAll();
  }

  // Until it is interrupted.
  [[noreturn]] void Watch() {
    if (Named().empty())
      throw UsageError("--watch needs a file to watch: a library or a source, as --load or --kernels");
    FileWatch watch;
    watch.Add(Named());
    for (;;) {
      RunOnce(&watch);
      streams_.out << std::flush;
      streams_.err << "cppool: waiting for a save of " << protocol::Join(Named())
                   << " or of a file that is included; Ctrl-C ends this" << std::endl;
      streams_.err << "cppool: " << watch.Wait() << " was saved" << std::endl;
      runner_.StartOver();
    }
  }

 private:
  // The files that the options name.
  std::vector<std::string> Named() const {
    std::vector<std::string> files = arguments_.daemon.libraries;
    const protocol::KernelWords kernels = protocol::ParseKernels(arguments_.kernels);
    if (!kernels.path.empty()) files.push_back(kernels.path);
    return files;
  }
  int FirstWorld() const { return cells_.empty() ? 1 : cells_[RunOrder(cells_).front()].world_size; }

  const RunArguments& arguments_;
  const Streams& streams_;
  const std::vector<Cell> cells_;
  CaseOutput output_;
  CellRunner runner_;
};

int RunCommand(const RunArguments& arguments, const Streams& streams) {
  Rounds rounds(arguments, streams);
  if (arguments.watch) rounds.Watch();
  return rounds.RunOnce(nullptr);
}

}  // namespace

void AddRun(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* run = app.add_subcommand("run", "Runs one case or a suite");
  AddRunOptions(*run, arguments.get());
  run->callback([arguments, streams, exit_code] { *exit_code = RunCommand(*arguments, streams); });
}

}  // namespace cppool::command
