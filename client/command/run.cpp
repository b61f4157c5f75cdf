// `cppool run`: one case, or a suite of them, each in the warm pool of its world size.
#include <chrono>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>

#include "cell.h"
#include "command.h"
#include "diagnose.h"
#include "interruption.h"
#include "junit.h"
#include "protocol/start.h"
#include "runner.h"
#include "tally.h"
#include "text.h"

namespace cppool::command {
namespace {

constexpr double kDefaultDeadline = 90;

struct Arguments {
  DaemonArguments daemon;
  std::string suite, case_name = "attention", junit;
  int world_size = 0;  // 0: the cells' own, or 2
  std::vector<std::string> filters, params;
  double deadline = kDefaultDeadline;
  std::int64_t max_seqlen = 0;  // 0: as they are
  std::optional<std::int64_t> perturb;
  std::string dump, inputs, fault;
  bool json = false, list = false, diagnose = false;
};

std::string DescribeCheck(const Check& check) {
  std::ostringstream text;
  text << check.tensor << " of rank " << check.rank << " against " << check.against << ": max_abs_err "
       << check.max_abs_err << ", rel_err " << check.rel_err << ", tolerance " << check.tolerance;
  if (check.ratio) text << ", ratio " << *check.ratio;
  return text.str();
}

Status StatusOf(Outcome::Kind kind) {
  switch (kind) {
    case Outcome::Kind::kPassed:
      return Status::kPassed;
    case Outcome::Kind::kFailed:
      return Status::kFailed;
    case Outcome::Kind::kSkipped:
      return Status::kSkipped;
    case Outcome::Kind::kError:
      break;
  }
  return Status::kError;
}

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The lines that explain a failure: its checks that did not hold, its error, and what that leaves out of the other
// ranks' errors, which may be consequences.
std::vector<std::string> Explain(const Outcome& outcome) {
  std::vector<std::string> lines;
  if (outcome.result) {
    for (const Check& check : outcome.result->checks)
      if (!check.ok) lines.push_back(DescribeCheck(check));
  }
  for (std::string& line : LinesOf(outcome.error)) lines.push_back(std::move(line));
  if (outcome.result) {
    for (const Rank& rank : outcome.result->ranks)
      if (!rank.ok && outcome.error.find(rank.error) == std::string::npos)
        lines.push_back("rank " + std::to_string(rank.rank) + ": " + rank.error);
  }
  return lines;
}

// The options that a repeating command needs beside the cell's own.
std::vector<std::string> CommonWords(const Arguments& arguments) {
  std::vector<std::string> words = ToWords(arguments.daemon);
  auto add = [&](const char* name, const std::string& value) { words.insert(words.end(), {name, value}); };
  if (arguments.deadline != kDefaultDeadline) {
    for (std::string& word : DeadlineWords(arguments.deadline)) words.push_back(std::move(word));
  }
  if (arguments.perturb) add("--perturb", std::to_string(*arguments.perturb));
  if (!arguments.dump.empty()) add("--dump", arguments.dump);
  if (!arguments.inputs.empty()) add("--inputs", arguments.inputs);
  if (!arguments.fault.empty()) add("--fault", arguments.fault);
  return words;
}

// "throw", "stall:1", "flip_bit:1:forward/p2p step 1 of 2: keys and values": a stage may have colons of its own.
Fault ToFault(const std::string& text) {
  Fault fault;
  const auto first = text.find(':'), second = first == std::string::npos ? first : text.find(':', first + 1);
  fault.kind = text.substr(0, first);
  if (second != std::string::npos) fault.stage = text.substr(second + 1);
  if (first == std::string::npos) return fault;
  const std::string rank = text.substr(first + 1, second == std::string::npos ? second : second - first - 1);
  if (rank.empty() || rank.size() > 6 || rank.find_first_not_of("0123456789") != std::string::npos)
    throw UsageError("--fault: KIND[:RANK[:STAGE]], and '" + rank + "' is no rank");
  fault.rank = std::stoi(rank);
  return fault;
}

PoolOptions PoolOptionsOf(const Arguments& arguments) {
  PoolOptions options = ToPoolOptions(arguments.daemon);
  if (!arguments.fault.empty()) options.arguments.emplace_back("--allow-faults");
  return options;
}

RunOptions ToRunOptions(const Arguments& arguments) {
  RunOptions options;
  options.deadline = std::chrono::milliseconds(std::llround(arguments.deadline * 1000));
  if (arguments.perturb) options.perturb = static_cast<std::uint64_t>(*arguments.perturb);
  options.dump = arguments.dump;
  options.inputs = arguments.inputs;
  if (!arguments.fault.empty()) options.fault = ToFault(arguments.fault);
  return options;
}

class Run {
 public:
  Run(const Arguments& arguments, std::vector<Cell> cells, const Streams& streams)
      : arguments_(arguments),
        cells_(std::move(cells)),
        streams_(streams),
        common_(CommonWords(arguments)),
        pool_options_(PoolOptionsOf(arguments)),
        run_options_(ToRunOptions(arguments)),
        runner_(pool_options_, run_options_, !arguments.suite.empty()),
        diagnoser_(pool_options_, run_options_, {},
                   [this](const std::string& doing) { Progress(diagnosed_ + ": " + doing); }),
        outcomes_(cells_.size()) {
    if (arguments.junit.empty()) return;
    junit_.open(arguments.junit);
    if (!junit_) throw UsageError("cannot write " + arguments.junit);
  }

  // In the order in which they would run, each with what the daemon says would come of it.
  int List() {
    for (std::size_t index : RunOrder(cells_)) {
      const Cell& cell = cells_[index];
      Progress(cell.name);
      const Outcome outcome = runner_.Validate(cell);
      ClearProgress();
      tally_.Add(cell, outcome);
      const bool skipped = outcome.kind == Outcome::Kind::kSkipped;
      if (arguments_.json) {
        Json json = DescribeCell(cell);
        json["would"] = skipped ? "skip" : outcome.failed() ? "fail" : "run";
        json["error"] = outcome.error.empty() ? Json() : Json(outcome.error);
        Print(json);
        continue;
      }
      streams_.out << cell.name << ": " << Repeat(cell) << "\n";
      std::string before = skipped ? "  would be skipped: " : "  would fail: ";
      for (const std::string& line : LinesOf(outcome.error)) {
        streams_.out << before << line << "\n";
        before = "    ";
      }
      streams_.out << std::flush;
    }
    const Counts& counts = tally_.total();
    Closing() << counts.passed << " would run, " << counts.failed << " would fail, " << counts.skipped
              << " would be skipped\n";
    return ExitCode();
  }

  int RunAll() {
    bool reported = false;
    {
      const Interruption interruption([this](int signal) { Interrupted(signal); });
      for (std::size_t index : RunOrder(cells_)) {
        const Cell& cell = cells_[index];
        Progress(cell.name);
        Outcome outcome = runner_.Run(cell);
        {
          const std::lock_guard lock(mutex_);
          outcomes_[index] = std::move(outcome);
          untold_ = index;
        }
        std::optional<Verdict> verdict = Diagnose(cell, *outcomes_[index]);
        {
          const std::lock_guard lock(mutex_);
          outcomes_[index]->verdict = std::move(verdict);
          tally_.Add(cell, *outcomes_[index]);
          untold_.reset();
        }
        ClearProgress();
        Report(cell, *outcomes_[index]);
      }
      const std::lock_guard lock(mutex_);
      reported = FinishJunit();  // before anything that may find nobody who reads it
    }
    Summarise();
    return reported ? ExitCode() : kFailure;
  }

 private:
  // Of a list: what running it would come to, as far as the daemon can tell.
  int ExitCode() const {
    return tally_.total().ran() > 0 && tally_.total().failed == 0 ? kSuccess : kFailure;
  }

  static_assert(static_cast<int>(Outcome::Kind::kFailed) == static_cast<int>(JunitCase::Outcome::kFailed) &&
                static_cast<int>(Outcome::Kind::kError) == static_cast<int>(JunitCase::Outcome::kError) &&
                static_cast<int>(Outcome::Kind::kSkipped) == static_cast<int>(JunitCase::Outcome::kSkipped));

  // The cells that have run. `missing` says why there are not more.
  bool FinishJunit(const std::string& missing = "") {
    if (!junit_.is_open()) return true;  // none is asked for, or it is finished
    const std::string suite = "cppool." + (arguments_.suite.empty() ? std::string("run") : arguments_.suite);
    std::vector<JunitCase> cases;
    for (std::size_t i = 0; i < cells_.size(); ++i)
      if (outcomes_[i]) cases.push_back(ToJunit(suite, cells_[i], *outcomes_[i]));
    if (!missing.empty()) {
      JunitCase rest;
      rest.group = suite;
      rest.name = "the rest";
      rest.outcome = JunitCase::Outcome::kError;
      rest.message = missing;
      cases.push_back(std::move(rest));
    }
    WriteJunit(junit_, suite, cases);
    junit_.close();
    if (!junit_) streams_.err << "cppool: " << arguments_.junit << " could not be written\n";
    return static_cast<bool>(junit_);
  }

  JunitCase ToJunit(const std::string& suite, const Cell& cell, const Outcome& outcome) const {
    JunitCase one;
    one.group = suite;
    one.name = cell.name;
    one.outcome = static_cast<JunitCase::Outcome>(outcome.kind);
    one.seconds = outcome.seconds;
    one.message = FirstLine(outcome.error);
    if (outcome.verdict) one.message += " (" + command::Describe(*outcome.verdict) + ")";
    for (const std::string& line : Explain(outcome)) one.details += line + "\n";
    for (const std::string& line : Advice(cell, outcome)) one.details += line + "\n";
    one.stderr_tail = outcome.stderr_tail;
    return one;
  }

  // On a thread of its own, while a cell may run: what there is to say when the process is asked to end.
  void Interrupted(int signal) {
    mutex_.lock();  // for good: nothing else is begun after this
    if (untold_) tally_.Add(cells_[*untold_], *outcomes_[*untold_]);
    const Counts& counts = tally_.total();
    const std::string missing = std::string("interrupted (") + strsignal(signal) + ") with " +
                                std::to_string(counts.all()) + " of " + std::to_string(cells_.size()) +
                                " cells done";
    FinishJunit(missing);
    ClearProgress();
    if (untold_) Report(cells_[*untold_], *outcomes_[*untold_]);
    if (arguments_.json) {
      Json summary = tally_.ToJson();
      summary["interrupted"] = missing;
      Print({{"summary", summary}});
    }
    Closing() << missing << "\n";
    PrintCounts();
  }

  std::string Repeat(const Cell& cell) const { return RepeatCommand(streams_.program, cell, common_); }

  // The cells that lead to the failure, in one pool.
  std::string RepeatAll(const Cell& cell, const Verdict& verdict) const {
    std::vector<Cell> sequence = verdict.culprits;
    sequence.push_back(cell);
    return SequenceCommand(sequence, pool_options_, run_options_);
  }

  // What came of a diagnosis, and how to repeat the failure.
  std::vector<std::string> Advice(const Cell& cell, const Outcome& outcome) const {
    std::vector<std::string> lines;
    if (outcome.verdict) lines.push_back("verdict: " + command::Describe(*outcome.verdict));
    lines.push_back("repeat: " + Repeat(cell));
    if (outcome.verdict && outcome.verdict->kind == Verdict::Kind::kPolluted) {
      lines.back() += "  # alone it passes";
      lines.push_back("after what spoils it: " + RepeatAll(cell, *outcome.verdict));
    }
    return lines;
  }

  // A request that is refused runs nothing: there is nothing to be learnt from running it again.
  std::optional<Verdict> Diagnose(const Cell& cell, const Outcome& outcome) {
    const bool refused =
        outcome.result && outcome.result->failure && outcome.result->failure->kind == "invalid_request";
    if (!arguments_.diagnose || !outcome.failed() || !outcome.asked || refused) return std::nullopt;
    diagnosed_ = cell.name;
    return diagnoser_.Diagnose(cell, runner_.Retire());
  }

  Json DescribeCell(const Cell& cell) const {
    return {{"name", cell.name},      {"suite", cell.suite},           {"rows", cell.rows},
            {"case", cell.case_name}, {"world_size", cell.world_size}, {"params", cell.params},
            {"repeat", Repeat(cell)}};
  }

  // One line that is written over: without a wrap, so that one line is what there is to clear.
  void Progress(const std::string& name) {
    if (!streams_.terminal) return;
    const auto seconds =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start_).count();
    std::ostringstream line;
    line << "[" << tally_.total().all() + 1 << "/" << cells_.size() << "] " << seconds / 60 << ":"
         << std::setfill('0') << std::setw(2) << seconds % 60 << ", " << tally_.total().failed << " failed, "
         << name;
    streams_.err << "\r\033[K\033[?7l" << line.str() << "\033[?7h" << std::flush;
  }
  void ClearProgress() {
    if (streams_.terminal) streams_.err << "\r\033[K" << std::flush;
  }

  void Report(const Cell& cell, const Outcome& outcome) {
    if (arguments_.json) {
      Json json = DescribeCell(cell);
      json["status"] = ToString(StatusOf(outcome.kind));
      json["seconds"] = outcome.seconds;
      json["error"] = outcome.error.empty() ? Json() : Json(outcome.error);
      json["attempts"] = outcome.result ? Json(outcome.result->attempts) : Json();
      json["answer"] = outcome.result ? outcome.result->json : Json();
      if (outcome.verdict) json["verdict"] = DescribeVerdict(cell, *outcome.verdict);
      Print(json);
      return;
    }
    if (outcome.failed()) {
      streams_.out << (outcome.kind == Outcome::Kind::kFailed ? "FAILED " : "ERROR ") << cell.name << "\n";
      for (const std::string& line : Explain(outcome)) streams_.out << "  " << line << "\n";
      for (const std::string& line : Advice(cell, outcome)) streams_.out << "  " << line << "\n";
    } else if (outcome.result && outcome.kind == Outcome::Kind::kPassed && arguments_.suite.empty()) {
      Describe(cell, *outcome.result);
    }
    streams_.out << std::flush;
  }

  Json DescribeVerdict(const Cell& cell, const Verdict& verdict) const {
    Json json = {
        {"kind", ToString(verdict.kind)}, {"text", command::Describe(verdict)}, {"pools", verdict.pools}};
    if (verdict.kind == Verdict::Kind::kUndecided) return json;
    json.update({{"failed", verdict.failed}, {"ran", verdict.ran}});
    if (verdict.kind != Verdict::Kind::kPolluted) return json;
    for (const Cell& culprit : verdict.culprits) json["culprits"].push_back(culprit.name);
    json["minimal"] = verdict.minimal;
    json["repeat"] = RepeatAll(cell, verdict);
    return json;
  }

  // A case that passed, when it is the only one.
  void Describe(const Cell& cell, const Result& result) {
    streams_.out << "passed " << cell.name << " in " << Fixed(result.wall_ms, 3) << " ms";
    if (result.attempts > 1) streams_.out << ", attempt " << result.attempts;
    streams_.out << "\n";
    for (const auto& [stage, tflops] : result.tflops)
      streams_.out << "  " << stage << ": " << Fixed(tflops, 3) << " TFLOP/s per rank\n";
    for (const Check& check : result.checks) streams_.out << "  " << DescribeCheck(check) << "\n";
  }

  void Summarise() {
    std::ostream& closing = Closing();
    if (arguments_.json) {
      Json summary = tally_.ToJson();
      summary["worlds"] = Json::array();
      for (const auto& [size, hello] : runner_.worlds())
        summary["worlds"].push_back({{"world_size", size},
                                     {"backend", hello.value("backend", Json())},
                                     {"transport", hello.value("transport", Json())},
                                     {"devices", hello.value("devices", Json())}});
      Print({{"summary", summary}});
    } else if (!arguments_.suite.empty()) {
      tally_.PrintAxes(closing);
      tally_.PrintRatios(closing);
    }
    tally_.PrintReasons(closing);
    tally_.PrintVerdicts(closing);
    tally_.PrintRetried(closing);
    std::string worlds;
    for (const auto& [size, hello] : runner_.worlds())
      worlds +=
          (worlds.empty() ? "" : "; ") + ("world size " + std::to_string(size)) + ": " + DescribeWorld(hello);
    closing << (worlds.empty() ? "backend none: no daemon answered" : worlds) << "\n";
    tally_.PrintSuites(closing);
    PrintCounts();
  }

  // With --json stdout is for programs.
  std::ostream& Closing() const { return arguments_.json ? streams_.err : streams_.out; }

  void PrintCounts() {
    const Counts& counts = tally_.total();
    Closing() << counts.passed << " passed, " << counts.failed << " failed, " << counts.skipped
              << " skipped\n"
              << std::flush;
  }

  void Print(const Json& json) {
    streams_.out << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n" << std::flush;
  }

  const Arguments& arguments_;
  const std::vector<Cell> cells_;
  Streams streams_;
  const std::vector<std::string> common_;
  const PoolOptions pool_options_;
  const RunOptions run_options_;
  CellRunner runner_;
  Diagnoser diagnoser_;
  std::string diagnosed_;  // the cell that is being diagnosed
  std::ofstream junit_;
  std::mutex mutex_;                              // of what follows and junit_, where a signal may come
  std::vector<std::optional<Outcome>> outcomes_;  // as cells_; nothing yet: it has not run
  std::optional<std::size_t> untold_;             // of an outcome that is not yet in the tally
  Tally tally_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

std::vector<Cell> CellsOf(const Arguments& arguments, const Streams& streams) {
  std::vector<Cell> cells;
  if (arguments.suite.empty()) {
    Cell cell;
    cell.case_name = arguments.case_name;
    cell.world_size = arguments.world_size > 0 ? arguments.world_size : 2;
    cell.name = cell.case_name + " W=" + std::to_string(cell.world_size);
    cells.push_back(cell);
  } else {
    std::vector<Filter> filters;
    for (const std::string& text : arguments.filters) {
      auto [key, value] = SplitAssignment(text, "--filter");
      filters.push_back({key, value});
    }
    const std::vector<Cell> suite = LoadSuite(arguments.suite);
    cells = Select(suite, filters);
    if (cells.empty()) {
      const std::string unknown = DescribeUnknown(suite, filters);
      streams.err << "cppool: no cell of the suite matches the filters"
                  << (unknown.empty() ? "" : ": " + unknown) << "\n";
    }
  }
  for (Cell& cell : cells) {
    if (arguments.world_size > 0 && !cell.rows.empty()) {
      cell.moved = cell.world_size != arguments.world_size && arguments.params.empty();
      cell.world_size = arguments.world_size;
      cell.name = NameOf(cell);
    }
    if (arguments.max_seqlen > 0) Shrink(&cell.params, arguments.max_seqlen, cell.world_size);
    for (const std::string& text : arguments.params) {
      auto [key, value] = SplitAssignment(text, "--param");
      cell.params[key] = ValueFromText(value);
    }
  }
  return cells;
}

int RunCommand(const Arguments& arguments, const Streams& streams) {
  std::vector<Cell> cells = CellsOf(arguments, streams);
  Run run(arguments, std::move(cells), streams);
  return arguments.list ? run.List() : run.RunAll();
}

}  // namespace

void AddRun(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* run = app.add_subcommand("run", "Runs one case or a suite");
  CLI::Option* suite =
      run->add_option("--suite", arguments->suite, "smoke, essential or matrix; without it one case is run")
          ->check(CLI::IsMember({"smoke", "essential", "matrix"}));
  run->add_option("--case", arguments->case_name, "The case to run")
      ->excludes(suite)
      ->check(IsUtf8)
      ->capture_default_str();
  run->add_option(
         "--world-size", arguments->world_size,
         "Number of ranks (default: each cell's own; 2 for a single case). Cells of a suite that are not "
         "possible with so many are skipped")
      ->check(CLI::Range(1, protocol::kMaxWorldSize));
  AddRepeatable(*run, "--param", &arguments->params,
                "A parameter, key=value; the value as JSON or as text. Overrides a suite's")
      ->check(IsUtf8);
  AddRepeatable(
      *run, "--filter", &arguments->filters,
      "Only cells of the suite with key=value: a parameter, world_size, suite (matrix, own), row, model, "
      "kernel_backend or essential. Of one key any value, of different keys all")
      ->needs(suite);
  run->add_option(
         "--max-seqlen", arguments->max_seqlen,
         "Shrinks a suite's lengths to at most this, in multiples of 2 x ranks, and windows with them")
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
      ->needs(suite);
  AddDeadline(*run, &arguments->deadline, "Seconds for each case");
  run->add_option("--perturb", arguments->perturb, "A seed of random delays at every mark")
      ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()));
  run->add_option("--dump", arguments->dump, "Writes the case's tensors to this folder, as .npy")
      ->check(IsUtf8)
      ->excludes(suite);
  run->add_option("--inputs", arguments->inputs,
                  "Reads q, k, v, dout, bias and softmax_offset from this folder, as .npy")
      ->check(IsUtf8)
      ->excludes(suite);
  run->add_option("--fault", arguments->fault,
                  "KIND[:RANK[:STAGE]]: makes a rank do something wrong at a mark, to see what comes of it")
      ->check(IsUtf8)
      ->excludes(suite);
  AddDaemonOptions(*run, &arguments->daemon);
  CLI::Option* junit =
      run->add_option("--junit", arguments->junit, "Writes the outcomes to this file as JUnit XML");
  run->add_flag("--json", arguments->json, "One JSON object per case, then a summary object");
  CLI::Option* list =
      run->add_flag("--list", arguments->list,
                    "Prints the cells, the command for each, and what would be skipped and why; runs nothing")
          ->excludes(junit);
  run->add_flag(
         "--diagnose", arguments->diagnose,
         "Runs a failed case again in fresh pools, alone and after what ran before it: is it a bug, polluted "
         "or flaky?")
      ->excludes(list);
  run->callback([arguments, streams, exit_code] { *exit_code = RunCommand(*arguments, streams); });
}

}  // namespace cppool::command
