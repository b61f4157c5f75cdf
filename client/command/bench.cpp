// `cppool bench`: every point of a sweep, with every list entry of --kernels, is validated, verified and then
// timed, and compared with the other kernels, with the same problem on one GPU, and with an earlier bench.
// What it measures is in bench_measure.h, what it prints in bench_report.h and bench_records.h.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "client/command/bench_measure.h"
#include "client/command/bench_records.h"
#include "client/command/bench_report.h"
#include "client/command/bench_resume.h"
#include "client/command/command.h"
#include "client/command/interruption.h"
#include "client/command/libraries.h"
#include "client/command/progress.h"
#include "client/command/report_page.h"
#include "client/command/runner.h"
#include "client/command/sweep.h"
#include "client/suite/repeat.h"
#include "client/suite/value_text.h"
#include "protocol/start.h"

namespace cppool::command {
namespace {

constexpr std::int64_t kProfiledRepeat = 10;

struct Arguments {
  DaemonArguments daemon;
  std::string case_name;  // empty: the only one of the libraries of --load, else attention
  std::vector<int> world_sizes = {2};
  std::vector<std::string> params;
  std::string kernels, save, resume, baseline, html;
  std::int64_t warmup = 3, repeat = 0;      // repeat 0: until the median is precise
  double precision = 0.5, slower_than = 2;  // percent
  double seconds = 3, deadline = 300;
  bool json = false, csv = false, profile = false, leaks_are_errors = false, wide = false;
};

// "cppool,./mine.so,fast,cudnn" names "cppool", "./mine.so,fast" and "cudnn": a word that is neither a path
// nor kernels that cppool finds belongs to the path before it.
std::vector<protocol::KernelChoice> KernelsOf(const std::string& text) {
  if (text.empty()) return {{}};
  const auto is_path = [](const std::string& word) {
    return word.find('/') != std::string::npos || word.ends_with(".so") || IsSource(word);
  };
  std::vector<protocol::KernelChoice> kernels;
  bool open = false;  // the last one is a path without a name
  for (const std::string& word : suite::SplitList(text)) {
    if (word.empty()) throw suite::UsageError("--kernels has an empty entry: " + text);
    const protocol::KernelChoice choice = ToKernels(word);
    if (open && choice.from == protocol::KernelChoice::From::kLibrary && !is_path(word))
      kernels.back().name = word;
    else
      kernels.push_back(choice);
    open = is_path(word);
  }
  for (std::size_t i = 0; i < kernels.size(); ++i)
    if (std::ranges::count(kernels, kernels[i]) > 1)
      throw suite::UsageError("--kernels names " + kernels[i].Words() + " twice");
  return kernels;
}

BenchPlan PlanOf(const Arguments& arguments) {
  BenchPlan plan;
  plan.warmup = arguments.warmup;
  plan.precision = arguments.precision / 100;
  plan.seconds = arguments.seconds;
  plan.profile = arguments.profile;
  plan.deadline = ToMilliseconds(arguments.deadline);
  if (arguments.repeat > 0) plan.repeat = arguments.repeat;
  if (arguments.profile && !plan.repeat) plan.repeat = kProfiledRepeat;
  if (plan.repeat) plan.rounds = static_cast<int>(std::min<std::int64_t>(plan.rounds, *plan.repeat));
  if (arguments.profile) plan.rounds = 1;  // one range for each kernel
  return plan;
}

std::string RowName(const SweepPoint& point, const std::string& kernels) {
  return point.cell.name + (kernels.empty() ? "" : " with " + kernels);
}

class Bench {
 public:
  Bench(const Arguments& arguments, const Streams& streams)
      : arguments_(arguments),
        streams_(streams),
        kernels_(KernelsOf(arguments.kernels)),
        axes_(SweepAxesOf(arguments.params)),
        points_(PointsOf(arguments.case_name.empty() ? "attention" : arguments.case_name,
                         arguments.world_sizes, axes_)),
        progress_(streams_.err, streams_.terminal, points_.size()),
        // Each point runs in its own world and in that of one GPU: both stay warm.
        runner_(arguments.daemon.pool, {.keep_worlds = true, .leaks_are_errors = arguments.leaks_are_errors}),
        measurer_(runner_, PlanOf(arguments), [this](double share) { ShowProgress(share); }) {
    if (!arguments.baseline.empty()) {
      baseline_.emplace(arguments.baseline, arguments.slower_than / 100);
      if (PlanOf(arguments).rounds < 2)
        throw suite::UsageError(std::string("--baseline compares rounds, two at least, and ") +
                                (arguments.profile ? "--profile" : "--repeat 1") + " measures one");
    }
    if (!arguments.save.empty()) CheckCanWrite("--save", arguments.save);
    if (!arguments.html.empty()) CheckCanWrite("--html", arguments.html);
    if (!arguments.resume.empty()) resumed_.emplace(arguments.resume, PlanOf(arguments));
    results_.plan = PlanOf(arguments);
    results_.axes = axes_;
    results_.wide = arguments.wide;
    results_.several_ranks =
        std::ranges::any_of(points_, [](const SweepPoint& point) { return point.cell.world_size > 1; });
    for (const protocol::KernelChoice& kernels : kernels_) results_.kernels.push_back(kernels.Words());
    results_.baseline = arguments.baseline;
  }

  int Run() {
    if (!Compile()) return kFailure;
    ChooseCase();
    if (const int code = Validate(); code != kSuccess) return code;
    if (resumed_) resumed_->Check(results_);
    if (arguments_.csv) streams_.out << BenchCsvHeader(axes_) << std::flush;
    {
      const Interruption interruption([this](int signal) { Interrupted(signal); }, [this] { TellWhere(); });
      for (const SweepPoint& point : points_) {
        doing_ = point.cell.name;
        std::vector<BenchRow> rows = Resume(point);
        const bool resumed = !rows.empty() && std::ranges::none_of(rows, SeemsSlower);
        if (!resumed) rows = MeasureAgainstBaseline(point);
        const std::lock_guard lock(mutex_);
        ++points_done_;
        points_resumed_ += resumed;
        results_.worlds = runner_.worlds();
        for (BenchRow& row : rows) Add(std::move(row));
        if (resumed_) Save([this] { resumed_->Save(results_); });
      }
    }
    return Close() ? ExitCode() : kFailure;
  }

 private:
  // Compiles the sources of --load and among the kernels. False when one does not compile.
  bool Compile() {
    const int world_size = points_.front().cell.world_size;
    std::vector<std::string> load = arguments_.daemon.libraries;
    for (const protocol::KernelChoice& kernels : kernels_) {
      auto made = MakeLibraries(
          load, kernels, [&] { return runner_.Hello(world_size); }, streams_.err, false);
      if (!made) return false;
      runner_.NameSources(made->sources);
      load = made->load;  // made once
      libraries_.push_back(std::move(*made));
    }
    return true;
  }

  // Throws UsageError for a library of --load of which nothing would run.
  void ChooseCase() {
    loaded_.emplace(arguments_.daemon.libraries, libraries_.front().load,
                    [this](const auto& load) { return runner_.List(points_.front().cell.world_size, load); });
    const std::string only = loaded_->only();
    std::vector<suite::Cell> cells;
    for (SweepPoint& point : points_) {
      if (arguments_.case_name.empty() && !only.empty()) point.cell.case_name = only;
      cells.push_back(point.cell);
    }
    loaded_->CheckUsed(cells);
    results_.case_name = cells.front().case_name;
  }

  // Asks for every row whether it would run. Else than with kSuccess nothing is timed, and lines on stderr
  // have the reasons: one cannot be meant (kUsage), or ended its daemon (kFailure). What is not supported, or
  // has no room, is for its row to show.
  int Validate() {
    std::set<std::string> refused;
    bool lost = false;
    for (const SweepPoint& point : points_)
      for (std::size_t i = 0; i < kernels_.size(); ++i) {
        progress_.Show(0, 0, "validating " + point.cell.name);
        RunOptions options;
        options.load = libraries_[i].load;
        options.kernels = libraries_[i].kernels;
        CellRunner::Check(options);
        const Outcome outcome = runner_.Validate(point.cell, options);
        const bool unanswered = outcome.asked && !outcome.result;
        lost = lost || unanswered;
        if (unanswered || outcome.refused())
          refused.insert(RowName(point, results_.kernels[i]) + ": " + outcome.error);
        const auto hello = runner_.worlds().find(point.cell.world_size);
        if (!outcome.asked || hello == runner_.worlds().end()) continue;
        NoteDigests(i, options);
        for (const char* feature : {"samples", "sampling", "waits", "profile"})
          Require(hello->second, feature);
      }
    progress_.Clear();
    results_.worlds = runner_.worlds();
    for (const std::string& why : refused) streams_.err << "cppool: " << why << "\n";
    if (!refused.empty()) streams_.err << "cppool: nothing was timed\n";
    return lost ? kFailure : refused.empty() ? kSuccess : kUsage;
  }

  static bool SeemsSlower(const BenchRow& row) { return row.baseline && !row.baseline->slower.empty(); }

  // Keeps the content of the libraries that the rows are measured with.
  void NoteDigests(std::size_t kernels, const RunOptions& options) {
    const Sources& sources = libraries_[kernels].sources;
    for (const auto& [library, digest] : runner_.Digests(options)) {
      const auto source = sources.find(library);
      results_.libraries[source == sources.end() ? library : source->second] = digest;
    }
  }

  // A point with a row that seems slower than its baseline is measured again; a row is slower when one of its
  // stages was so both times.
  std::vector<BenchRow> MeasureAgainstBaseline(const SweepPoint& point) {
    std::vector<BenchRow> rows = Measure(point);
    if (std::ranges::none_of(rows, SeemsSlower)) return rows;
    doing_ = "again: " + point.cell.name;
    std::vector<BenchRow> again = Measure(point);
    for (std::size_t i = 0; i < again.size(); ++i) {
      if (!SeemsSlower(again[i])) continue;
      std::erase_if(again[i].baseline->slower, [&](const std::string& stage) {
        return !rows[i].baseline || !rows[i].baseline->slower.contains(stage);
      });
      if (again[i].baseline->slower.empty()) again[i].baseline->verdict = BenchVerdict::kSame;
    }
    return again;
  }

  std::vector<BenchRow> Measure(const SweepPoint& point) {
    // What is compared is measured without other clients of a server in between.
    runner_.KeepTurn(point.cell.world_size, true);
    struct Turn {
      CellRunner& runner;
      const int world_size;
      ~Turn() { runner.KeepTurn(world_size, false); }
    } const turn{runner_, point.cell.world_size};
    std::vector<Measurement> measured = measurer_.Measure(point.cell, libraries_);
    const bool any = std::ranges::any_of(measured, [](const auto& m) { return m.error.empty(); });
    const std::vector<Measurement> alone = point.cell.world_size == 1 ? measured
                                           : any                      ? Alone(point.cell)
                                                 : std::vector<Measurement>(measured.size());
    std::vector<BenchRow> rows = RowsOf(point);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].measured = measured[i];
      rows[i].one_gpu = alone[i];
    }
    Compare(&rows);
    return rows;
  }

  // Returns the rows of the point as --resume has them; empty: not all of them.
  std::vector<BenchRow> Resume(const SweepPoint& point) {
    if (!resumed_) return {};
    std::vector<BenchRow> rows = RowsOf(point);
    for (BenchRow& row : rows)
      if (!resumed_->Take(&row)) return {};
    Compare(&rows);
    return rows;
  }

  // Returns the rows of the point, not measured.
  std::vector<BenchRow> RowsOf(const SweepPoint& point) const {
    std::vector<BenchRow> rows(kernels_.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].point = point;
      rows[i].kernels = results_.kernels[i];
      rows[i].run = Repeat(point.cell, rows[i].kernels, "run");
      rows[i].bench = Repeat(point.cell, rows[i].kernels, "bench");
    }
    return rows;
  }

  // Compares the rows of a point with the first one and with the baseline.
  void Compare(std::vector<BenchRow>* rows) const {
    const std::map<std::string, Stage>& stages = rows->front().measured.stages;
    for (BenchRow& row : *rows) {
      for (const auto& [name, stage] : row.measured.stages) {
        const auto first = stages.find(name);
        if (&row == &rows->front() || first == stages.end()) continue;
        if (const auto ratio = base::PairedRatio(stage.rounds, first->second.rounds))
          row.ratios[name] = *ratio;
      }
      if (baseline_ && row.measured.error.empty()) row.baseline = baseline_->Compare(row);
    }
  }

  const std::vector<Measurement>& Alone(const suite::Cell& cell) {
    suite::Cell alone = cell;
    alone.world_size = 1;
    if (alone.params.contains("cp_comm_type"))
      alone.params["cp_comm_type"] = "p2p";  // with one rank all schedules are the same
    const auto [known, fresh] = one_gpu_.try_emplace(alone.params.dump());
    if (!fresh) return known->second;
    doing_ = "on one GPU: " + cell.name;
    const auto nodes = runner_.worlds().at(cell.world_size).value("nodes", Json::array()).size();
    if (nodes > 1) {
      Measurement none;
      none.error = "one rank cannot be on " + std::to_string(nodes) + " nodes";
      known->second.assign(libraries_.size(), none);
    } else {
      known->second = measurer_.MeasureAlone(alone, libraries_);
    }
    return known->second;
  }

  std::string Repeat(const suite::Cell& cell, const std::string& kernels,
                     const std::string& subcommand) const {
    RunOptions options, defaults;
    options.deadline = ToMilliseconds(arguments_.deadline);
    options.kernels = kernels;
    defaults.deadline = {};  // `run` has another one than `bench`
    std::vector<std::string> words =
        suite::OptionWords(arguments_.daemon.pool, loaded_->FilesWith(cell.case_name), options, defaults);
    const auto add = [&](const char* option, const std::string& value) {
      words.insert(words.end(), {option, value});
    };
    if (arguments_.leaks_are_errors) add("--leaks", "error");
    if (subcommand == "bench") {
      add("--warmup", std::to_string(arguments_.warmup));
      if (arguments_.repeat > 0) {
        add("--repeat", std::to_string(arguments_.repeat));
      } else {
        add("--precision", suite::TextFromValue(arguments_.precision));
        add("--time", suite::TextFromValue(arguments_.seconds));
      }
    }
    return suite::RepeatCommand(streams_.program, cell, words, subcommand);
  }

  void ShowProgress(double share) {
    const std::lock_guard lock(mutex_);
    progress_.Show(points_done_, failed_, doing_, share);
  }

  // It is called under the lock, and prints the row, where rows are printed as they are done.
  void Add(BenchRow row) {
    progress_.Clear();
    failed_ += !row.measured.error.empty() && !row.measured.skipped;
    measured_ += row.measured.error.empty();
    slower_ += row.baseline && row.baseline->verdict == BenchVerdict::kSlower;
    if (baseline_ && row.measured.error.empty() && !row.baseline)
      (baseline_->Has(row) ? unrepeated_ : missing_).push_back(RowName(row.point, row.kernels));
    if (arguments_.json) PrintJson(streams_.out, BenchRowJson(row, results_.plan));
    if (arguments_.csv) streams_.out << BenchCsvLines(row, axes_) << std::flush;
    results_.rows.push_back(std::move(row));
    if (!arguments_.json && !arguments_.csv) table_.Add(results_);
  }

  // Called on another thread, while a point may run, as the next one.
  void TellWhere() {
    if (const std::string where = runner_.Where(); !where.empty())
      streams_.err << "cppool: " << where << std::endl;
  }

  // Keeps the rows that are done.
  void Interrupted(int signal) {
    TellWhere();
    mutex_.lock();  // never unlocked: no further row is added
    runner_.GiveUp();
    results_.interrupted = DescribeInterruption(signal, points_done_, points_.size(), "points");
    Close();
  }

  // False: a file could not be written.
  bool Close() {
    progress_.Clear();
    if (baseline_) {
      const std::string other = baseline_->Differences(results_.worlds);
      if (!other.empty()) results_.notes.push_back(other);
      std::string counts = std::to_string(slower_) + " slower, " + std::to_string(compared_rows() - slower_) +
                           " not, " + std::to_string(missing_.size()) + " not in it";
      if (!unrepeated_.empty())
        counts += ", " + std::to_string(unrepeated_.size()) + " without two rounds in it";
      results_.notes.push_back("against " + arguments_.baseline + ": " + counts);
      for (const std::string& row : missing_)
        results_.notes.push_back("not in " + arguments_.baseline + ": " + row);
      for (const std::string& row : unrepeated_)
        results_.notes.push_back("without two rounds in " + arguments_.baseline + ": " + row);
    }
    if (resumed_)
      results_.notes.push_back(std::to_string(points_resumed_) + " of " + std::to_string(points_.size()) +
                               " points from " + resumed_->file());
    if (!arguments_.save.empty()) Save([this] { SaveBench(arguments_.save, results_); });
    if (!arguments_.html.empty()) Save([this] { WritePage(); });
    if (arguments_.json) {
      PrintJson(streams_.out, BenchSummaryJson(results_));
    } else if (!arguments_.csv) {
      table_.End(results_);
    } else {
      for (const std::string& note : results_.notes) streams_.err << note << "\n";
      if (!results_.interrupted.empty()) streams_.err << results_.interrupted << "\n";
    }
    return saved_;
  }

  void Save(const std::function<void()>& save) {
    try {
      save();
    } catch (const std::runtime_error& error) {
      if (saved_) streams_.err << "cppool: " << error.what() << "\n";
      saved_ = false;
    }
  }

  void WritePage() const {
    ReportPage page;
    page.Begin("cppool bench");
    page.AddSaved(BenchJson(results_));
    page.Write(arguments_.html);
  }

  int ExitCode() const {
    if (failed_ > 0 || measured_ == 0) return kFailure;
    if (slower_ > 0) return kSlower;
    return baseline_ && compared_rows() == 0 ? kNotCompared : kSuccess;
  }

  int compared_rows() const { return measured_ - static_cast<int>(missing_.size() + unrepeated_.size()); }

  const Arguments& arguments_;
  const Streams streams_;
  const std::vector<protocol::KernelChoice> kernels_;  // as --kernels lists them
  std::vector<Libraries> libraries_;                   // for each of them
  std::optional<LoadedCases> loaded_;
  const std::vector<SweepAxis> axes_;
  std::vector<SweepPoint> points_;
  Progress progress_;
  CellRunner runner_;
  PointMeasurer measurer_;
  std::optional<Baseline> baseline_;
  std::optional<ResumedBench> resumed_;
  std::map<std::string, std::vector<Measurement>> one_gpu_;  // by parameters
  std::string doing_;                                        // the point under way
  std::mutex mutex_;                                         // guards the members below, and the output
  bool saved_ = true;                                        // false: a file could not be written
  int points_done_ = 0, points_resumed_ = 0, failed_ = 0, measured_ = 0, slower_ = 0;
  // Rows that were measured and are not compared: the baseline has no such row, or no two rounds of it.
  std::vector<std::string> missing_, unrepeated_;
  BenchResults results_;
  BenchTable table_{streams_.out};
};

// Returns --profile.
CLI::Option* AddMeasuringOptions(CLI::App& bench, Arguments* arguments) {
  bench.add_option("--warmup", arguments->warmup, "Iterations before those that are timed, in each round")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  CLI::Option* repeat =
      bench
          .add_option("--repeat", arguments->repeat,
                      "Exactly so many timed iterations, in place of --precision and --time")
          ->check(CLI::Range(1, 10000));
  bench
      .add_option("--precision", arguments->precision,
                  "Times a row until half the 95 % confidence interval of each stage's median is at most "
                  "this percentage of it")
      ->check(CLI::Range(0.01, 100.0))
      ->excludes(repeat)
      ->capture_default_str();
  bench.add_option("--time", arguments->seconds, "Seconds of timed iterations, the most for a row")
      ->check(CLI::Range(0.001, 86400.0))
      ->excludes(repeat)
      ->capture_default_str();
  return bench.add_flag(
      "--profile", arguments->profile,
      "Puts the timed iterations between cudaProfilerStart and cudaProfilerStop, one range for each row");
}

}  // namespace

void AddBench(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* bench = app.add_subcommand("bench", "Times a case over a sweep of its parameters");
  AddRepeatable(
      *bench, "--param", &arguments->params,
      "A parameter and its values, key=A,B,... (8k is 8192; a list as a value goes in brackets); all "
      "combinations are timed. max_seqlen_kv follows max_seqlen_q if not given")
      ->check(IsUtf8);
  bench->add_option("--world-size", arguments->world_sizes, "Numbers of ranks, N,M,...")
      ->delimiter(',')
      ->check(CLI::Range(1, protocol::kMaxWorldSize))
      ->capture_default_str();
  AddCase(*bench, &arguments->case_name, "The case to time");
  bench
      ->add_option(
          "--kernels", arguments->kernels,
          "Whose kernels, A,B,...: cppool, cudnn, libraries or their sources (FILE or FILE,NAME). They "
          "are timed in turn and compared with the first")
      ->check(IsUtf8);
  CLI::Option* profile = AddMeasuringOptions(*bench, arguments.get());
  AddDeadline(*bench, &arguments->deadline, "Seconds for each request");
  AddDaemonOptions(*bench, &arguments->daemon);
  AddLeaks(*bench, &arguments->leaks_are_errors);
  CLI::Option* json = bench->add_flag("--json", arguments->json,
                                      "One JSON object per row as it is done, then a summary object");
  bench->add_flag("--csv", arguments->csv, "CSV, a line for each stage of a row as it is done")
      ->excludes(json);
  bench
      ->add_flag("--wide", arguments->wide,
                 "All columns of the table; without it a line has at most 100 characters")
      ->excludes(json);
  CLI::Option* save =
      bench->add_option("--save", arguments->save, "Writes the rows to this file, for --baseline")
          ->check(IsUtf8);
  bench
      ->add_option("--resume", arguments->resume,
                   "Takes the points that this file of --resume or --save has, measures the others, and "
                   "writes the file after each point")
      ->check(IsUtf8)
      ->excludes(profile)
      ->excludes(save);
  AddHtml(*bench, &arguments->html);
  CLI::Option* baseline =
      bench
          ->add_option(
              "--baseline", arguments->baseline,
              "Compares each row with this file of --save: faster, slower, or the same within noise; exit "
              "code 3 when one is slower, 4 when none can be compared")
          ->check(IsUtf8);
  bench
      ->add_option(
          "--slower-than", arguments->slower_than,
          "A row is slower when the 95 % confidence interval of a stage's ratio to the baseline is wholly "
          "more than so many percent above 1, in two measurements")
      ->check(CLI::Range(0.0, 1000.0))
      ->needs(baseline)
      ->capture_default_str();
  bench->callback([arguments, streams, exit_code] { *exit_code = Bench(*arguments, streams).Run(); });
}

}  // namespace cppool::command
