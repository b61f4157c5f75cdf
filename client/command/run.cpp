// `cppool run`: one case or a suite, each cell in the warm pool of its world size. Its options are in
// run_arguments.h, its output in run_report.h.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/event.h"
#include "base/words.h"
#include "client/command/case_output.h"
#include "client/command/cell_files.h"
#include "client/command/command.h"
#include "client/command/diagnose.h"
#include "client/command/interruption.h"
#include "client/command/libraries.h"
#include "client/command/progress.h"
#include "client/command/run_arguments.h"
#include "client/command/run_report.h"
#include "client/command/runner.h"
#include "client/command/watch.h"
#include "client/src/daemon.h"
#include "client/suite/cell.h"
#include "client/suite/value_text.h"
#include "protocol/parameters.h"

namespace cppool::command {
namespace {

// A diagnosis needs fresh daemons.
PoolOptions InOwnPools(PoolOptions options) {
  options.attach.clear();
  return options;
}

class Run {
 public:
  // `runner` has the pools, `output` what they write, and `files` are those of the cells; all outlive it.
  Run(const RunArguments& arguments, RunOptions run_options, std::vector<suite::Cell> cells,
      LoadedCases loaded, CellRunner& runner, CellFiles& files, CaseOutput& output, const Streams& streams)
      : arguments_(arguments),
        cells_(std::move(cells)),
        run_options_(std::move(run_options)),
        files_(files),
        output_(output),
        runner_(runner),
        diagnoser_(InOwnPools(ToPoolOptions(arguments)), run_options_, {},
                   [this](const std::string& doing) {
                     report_.Progress(static_cast<int>(done_), diagnosed_ + ": " + doing);
                   }),
        report_(arguments, files.for_each(), streams, cells_.size(), std::move(loaded)),
        // With --until-fail all cells run once in each round, else each of them as often in the only round.
        rounds_(cells_.empty() || !arguments.until_fail
                    ? 1
                    : arguments.times.value_or(std::numeric_limits<int>::max())),
        runs_(arguments.until_fail ? 1 : arguments.times.value_or(1)),
        outcomes_(cells_.size()),
        settled_(cells_.size()) {}

  // Prints the cells in the order in which they would run, each with the outcome that the daemon expects.
  int List() {
    for (std::size_t index : suite::RunOrder(cells_)) {
      const suite::Cell& cell = cells_[index];
      report_.Progress(report_.counts().all(), cell.name);
      const Outcome outcome = runner_.Validate(cell, run_options_);
      report_.ClearProgress();
      report_.Count(cell, outcome);
      report_.PrintListed(cell, outcome);
    }
    report_.CloseList();
    return ExitCode();
  }

  // Another thread, while RunAll goes on: ends it soon.
  void GiveUp() {
    given_up_ = true;
    runner_.GiveUp();
  }

  int RunAll() {
    bool reported = false;
    const std::vector<std::size_t> order = suite::RunOrder(cells_);
    {
      const Interruption interruption([this](int signal) { Interrupted(signal); }, [this] { TellWhere(); });
      while (round_ <= rounds_ && RunRound(order)) ++round_;
      for (std::size_t index : order) Settle(index);
      const std::lock_guard lock(mutex_);
      // Before stdout is written, which may fail. After a first failure that is enough the rest has not
      // failed.
      reported = report_.WriteJunit(
          cells_, outcomes_, runner_.worlds(), stopped_,
          arguments_.fail_fast || arguments_.until_fail ? Status::kSkipped : Status::kError);
    }
    const bool steady = arguments_.until_fail && failed_in_ == 0 && stopped_.empty();
    if (!report_.Close(runner_.worlds(),
                       steady ? "no failure in " + Rounds(round_ - 1) + " (--until-fail)" : stopped_))
      reported = false;
    if (const std::string problem = output_.Problem(); !problem.empty()) {
      report_.Complain(problem);
      reported = false;
    }
    return reported && stopped_.empty() ? ExitCode() : kFailure;
  }

 private:
  // A diagnosis needs the devices for itself. Where cells run many times a start takes little of the time.
  void ExpectCells(const std::vector<std::size_t>& order) {
    if (arguments_.diagnose || !arguments_.failures.empty() || runs_ > 1) return;
    std::deque<int> world_sizes;
    for (std::size_t index : order) world_sizes.push_back(cells_[index].world_size);
    runner_.Expect(std::move(world_sizes));
  }

  // False: it was stopped.
  bool RunRound(const std::vector<std::size_t>& order) {
    ExpectCells(order);
    done_ = 0;
    for (std::size_t index : order) {
      for (int run = 0; run < runs_; ++run)
        if (Stops() || !RunCell(index, run)) {
          if (!arguments_.until_fail) ForgetUnlessFailed(index);
          return false;
        }
      ++done_;
      if (!arguments_.until_fail) Settle(index);
    }
    return true;
  }

  // A cell with runs to come has not passed.
  void ForgetUnlessFailed(std::size_t index) {
    const std::lock_guard lock(mutex_);
    if (outcomes_[index] && outcomes_[index]->failures == 0) outcomes_[index].reset();
  }

  // `run`: how many of the cell there were in this round. False: it was cut short, and does not count.
  bool RunCell(std::size_t index, int run) {
    const suite::Cell& cell = cells_[index];
    report_.Progress(static_cast<int>(done_),
                     round_ > 1 ? "round " + std::to_string(round_) + ", " + cell.name : cell.name,
                     static_cast<double>(run) / runs_);
    RunOptions options = WithinLimit();
    files_.Choose(cell, &options);
    Outcome outcome = runner_.Run(cell, options);
    if (given_up_) return !Stops();
    const bool cut = outcome.timed_out && options.deadline < run_options_.deadline;
    // One that was retried counts: its daemon died before the limit.
    if (cut && outcome.lost.empty() && outcomes_[index] && !HadTime(options.deadline, *outcomes_[index])) {
      if (!arguments_.until_fail) Stop("at the limit of the run (--limit)");
      return false;
    }
    if (cut)
      outcome.error = "ended by the limit of the run (--limit), not by its own deadline of " +
                      client::Seconds(run_options_.deadline) + ": " + outcome.error;
    output_.Note(Summary(outcome.kind, outcome.error));
    const bool diagnosed = outcomes_[index] && outcomes_[index]->verdict;
    const bool diagnosable = !cut && !diagnosed && Diagnosable(outcome);
    const bool again = !cut && !(outcomes_[index] && outcomes_[index]->again) && files_.Wants(outcome);
    {
      const std::lock_guard lock(mutex_);
      if (outcomes_[index])
        outcomes_[index]->Add(std::move(outcome));
      else
        outcomes_[index] = std::move(outcome);
    }
    if (again) {
      report_.Progress(static_cast<int>(done_), "again: " + cell.name);
      Again kept = files_.RunAgain(cell, WithinLimit(), runner_, output_);
      const std::lock_guard lock(mutex_);
      if (!given_up_) outcomes_[index]->again = std::move(kept);
    }
    if (diagnosable) {
      diagnosed_ = cell.name;
      Verdict verdict = diagnoser_.Diagnose(cell, runner_.Retire(), runner_.Digests(run_options_));
      const std::lock_guard lock(mutex_);
      std::string& flaky = outcomes_[index]->flaky;
      if (verdict.kind == Verdict::Kind::kFlaky && flaky.empty()) flaky = Describe(verdict);
      outcomes_[index]->verdict = std::move(verdict);
    }
    if (failed_in_ == 0 && report_.fails(*outcomes_[index])) failed_in_ = round_;
    ran_ = ran_ || outcomes_[index]->kind != Status::kSkipped;
    return true;
  }

  // Counts and prints the cell's outcome, if it has one; once.
  void Settle(std::size_t index) {
    if (!outcomes_[index] || settled_[index]) return;
    {
      const std::lock_guard lock(mutex_);
      report_.Count(cells_[index], *outcomes_[index]);
      settled_[index] = true;
    }
    report_.ClearProgress();
    report_.PrintOutcome(cells_[index], *outcomes_[index]);
  }

  // Returns whether nothing is to run any more; where cells are left that have not run as asked, stopped_
  // says why.
  bool Stops() {
    if (given_up_) return Stop("since a file was saved again,");
    if (arguments_.fail_fast && report_.failing() > 0) return Stop("after the first failure (--fail-fast)");
    if (failed_in_ > 0 && arguments_.until_fail)
      return Stop("after the first failure, in round " + std::to_string(failed_in_) + " (--until-fail),");
    if (round_ > 1 && !ran_) return Stop("after a round in which nothing ran (--until-fail),");
    if (arguments_.limit <= 0 || Left() > std::chrono::milliseconds(0)) return false;
    return round_ > 1 || Stop("at the limit of the run (--limit)");
  }

  bool Stop(const std::string& why) {
    stopped_ = "stopped " + why + " with " + std::to_string(round_ > 1 ? cells_.size() : done_) + " of " +
               std::to_string(cells_.size()) + " cells done";
    return true;
  }

  // Returns whether a run of the cell that did not end in this time has hung, by the time that its runs
  // before took.
  static bool HadTime(std::chrono::milliseconds time, const Outcome& before) {
    constexpr double kSlowest = 10, kLeast = 1;  // times the mean, and seconds
    return std::chrono::duration<double>(time).count() >
           kLeast + kSlowest * before.daemon_seconds / before.attempts;
  }

  static std::string Rounds(int count) { return std::to_string(count) + (count == 1 ? " round" : " rounds"); }

  std::chrono::milliseconds Left() const {
    return std::chrono::ceil<std::chrono::milliseconds>(start_ + ToMilliseconds(arguments_.limit) -
                                                        std::chrono::steady_clock::now());
  }

  // No case goes on after the run's limit.
  RunOptions WithinLimit() const {
    RunOptions options = run_options_;
    if (arguments_.limit > 0)
      options.deadline = std::min(options.deadline, std::max(Left(), std::chrono::milliseconds(1)));
    return options;
  }

  // After List() the outcomes are the expected ones.
  int ExitCode() const { return report_.counts().ran() > 0 && report_.failing() == 0 ? kSuccess : kFailure; }

  // Called on another thread, while a cell may run, as the next ones.
  void TellWhere() {
    if (const std::string where = runner_.Where(); !where.empty()) report_.Complain(where);
  }

  // Reports what is done.
  void Interrupted(int signal) {
    TellWhere();
    mutex_.lock();  // never unlocked: the main thread stops at its next outcome
    runner_.GiveUp();
    std::vector<std::size_t> unsettled;
    for (std::size_t index : suite::RunOrder(cells_))
      if (outcomes_[index] && !settled_[index]) unsettled.push_back(index);
    for (std::size_t index : unsettled) report_.Count(cells_[index], *outcomes_[index]);
    const std::string missing = DescribeInterruption(signal, report_.counts().all(), cells_.size(), "cells");
    report_.WriteJunit(cells_, outcomes_, runner_.worlds(), missing);
    report_.ClearProgress();
    for (std::size_t index : unsettled) report_.PrintOutcome(cells_[index], *outcomes_[index]);
    report_.CloseInterrupted(runner_.worlds(), missing);
  }

  // A refused request is not run again: it would be refused again. A case that passed and left something
  // behind needs no diagnosis.
  bool Diagnosable(const Outcome& outcome) const {
    return arguments_.diagnose && outcome.failed() && outcome.asked && !outcome.refused() &&
           !(outcome.result && outcome.result->ok());
  }

  const RunArguments& arguments_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::vector<suite::Cell> cells_;
  const RunOptions run_options_;
  CellFiles& files_;
  CaseOutput& output_;
  CellRunner& runner_;
  Diagnoser diagnoser_;
  std::string diagnosed_;  // the cell that is being diagnosed
  RunReport report_;
  const int rounds_, runs_;  // All cells run in each round, each of them `runs_` times.
  int round_ = 1;
  std::size_t done_ = 0;  // cells of this round
  int failed_in_ = 0;     // the round of the first failure; 0: none
  bool ran_ = false;      // a cell was not skipped
  std::atomic<bool> given_up_{false};
  std::string stopped_;  // why cells have not run; empty: nothing stopped the run
  std::mutex mutex_;     // guards the members below, and the counts and the JUnit file of the report
  // Each has an entry for each of cells_.
  std::vector<std::optional<Outcome>> outcomes_;  // the runs so far; empty: not run yet
  std::vector<bool> settled_;                     // the report has counted it
};

// During its life a run is given up when a file is saved, which `saved` then is.
class GivesUpWhenSaved {
 public:
  GivesUpWhenSaved(FileWatch& watch, Run& run, std::string& saved) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);  // signals are for Interruption
    thread_ = std::thread([this, &watch, &run, &saved] {
      saved = watch.Wait(over_.fd());
      if (!saved.empty()) run.GiveUp();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~GivesUpWhenSaved() {
    over_.Set();
    thread_.join();
  }
  GivesUpWhenSaved(const GivesUpWhenSaved&) = delete;
  GivesUpWhenSaved& operator=(const GivesUpWhenSaved&) = delete;

 private:
  const base::Event over_;
  std::thread thread_;
};

// Runs the command once, or with --watch at each save.
class Rounds {
 public:
  Rounds(const RunArguments& arguments, const Streams& streams)
      : arguments_(arguments),
        streams_(streams),
        cells_(CellsOf(arguments, streams)),
        files_(arguments, cells_),
        output_(arguments.log),
        runner_(ToPoolOptions(arguments),
                {.skip_large_worlds = !arguments.suite.empty(),
                 .all_output = arguments.verbose,
                 .leaks_are_errors = arguments.leaks_are_errors},
                &output_) {}

  int RunOnce(FileWatch* watch) {
    RunOptions options = ToRunOptions(arguments_);
    std::vector<std::string> watched;
    std::optional<Libraries> libraries = MakeLibraries(
        arguments_.daemon.libraries, arguments_.kernels, [this] { return runner_.Hello(FirstWorld()); },
        streams_.err, arguments_.verbose, &watched);
    if (watch) watch->Add(watched);
    if (!libraries) return kFailure;
    runner_.NameSources(libraries->sources);
    options.load = std::move(libraries->load);
    options.kernels = std::move(libraries->kernels);
    CellRunner::Check(options);
    const LoadedCases loaded(arguments_.daemon.libraries, options.load,
                             [this](const auto& load) { return runner_.List(FirstWorld(), load); });
    Run run(arguments_, std::move(options), CellsWith(loaded), loaded, runner_, files_, output_, streams_);
    if (arguments_.list) return run.List();
    if (!watch) return run.RunAll();
    const GivesUpWhenSaved saved(*watch, run, saved_);
    return run.RunAll();
  }

  // Until it is interrupted.
  [[noreturn]] void Watch() {
    if (Named().empty())
      throw suite::UsageError("--watch needs a file to watch: a library or a source, as --load or --kernels");
    FileWatch watch;
    watch.Add(Named());
    for (bool first = true;; first = false) {
      try {
        RunOnce(&watch);
      } catch (const suite::UsageError& error) {
        if (first) throw;  // later it is of the libraries as they are now
        streams_.err << "cppool: " << error.what() << "\n";
      }
      streams_.out << std::flush;
      if (saved_.empty()) {
        streams_.err << "cppool: waiting for a save of " << base::Join(Named())
                     << " or of a file that is included; Ctrl-C ends this" << std::endl;
        saved_ = watch.Wait();
      }
      streams_.err << "cppool: " << std::exchange(saved_, "") << " was saved" << std::endl;
      runner_.StartOver();
    }
  }

 private:
  // Returns the cells, with the default case that the libraries make.
  std::vector<suite::Cell> CellsWith(const LoadedCases& loaded) const {
    if (cells_.empty() || arguments_.daemon.libraries.empty()) return cells_;
    RunArguments arguments = arguments_;
    if (arguments.suite.empty() && arguments.case_name.empty()) arguments.case_name = loaded.only();
    std::vector<suite::Cell> cells = CellsOf(arguments, streams_);
    if (!arguments.shard.empty()) arguments.shard = "1/1";  // another shard may use the library
    loaded.CheckUsed(CellsOf(arguments, streams_));
    return cells;
  }
  // Returns the files that the options name.
  std::vector<std::string> Named() const {
    std::vector<std::string> files = arguments_.daemon.libraries;
    const protocol::KernelChoice& kernels = arguments_.kernels;
    if (kernels.from == protocol::KernelChoice::From::kLibrary) files.push_back(kernels.path);
    return files;
  }
  int FirstWorld() const { return cells_.empty() ? 1 : cells_[suite::RunOrder(cells_).front()].world_size; }

  const RunArguments& arguments_;
  const Streams& streams_;
  const std::vector<suite::Cell> cells_;
  CellFiles files_;
  CaseOutput output_;
  CellRunner runner_;
  std::string saved_;  // while the cells ran
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
