// `cppool run`: one case, or a suite of them, each in the warm pool of its world size.
#include <chrono>
#include <fstream>
#include <iomanip>
#include <limits>
#include <map>
#include <optional>
#include <sstream>

#include "cell.h"
#include "command.h"
#include "junit.h"
#include "protocol/start.h"
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
  bool json = false, list = false;
};

// What became of a cell: an answer, or why there is none.
struct Outcome {
  enum class Kind { kPassed, kFailed, kError, kSkipped };
  Kind kind = Kind::kError;
  std::optional<Result> result;
  std::string error;  // one line or more; empty when passed
  double seconds = 0;
};

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string DescribeCheck(const Check& check) {
  std::ostringstream text;
  text << check.tensor << " of rank " << check.rank << " against " << check.against << ": max_abs_err "
       << check.max_abs_err << ", rel_err " << check.rel_err << ", tolerance " << check.tolerance;
  return text.str();
}

// The lines that explain a failure: its checks that did not hold, its error, the ranks' own errors.
std::vector<std::string> Explain(const Outcome& outcome) {
  std::vector<std::string> lines;
  if (outcome.result) {
    for (const Check& check : outcome.result->checks)
      if (!check.ok) lines.push_back(DescribeCheck(check));
    for (const Rank& rank : outcome.result->ranks)
      if (!rank.ok && outcome.error.find(rank.error) == std::string::npos)
        lines.push_back("rank " + std::to_string(rank.rank) + ": " + rank.error);
  }
  std::istringstream text(outcome.error);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

class Runner {
 public:
  Runner(const Arguments& arguments, std::vector<Cell> cells, Streams streams)
      : arguments_(arguments),
        cells_(std::move(cells)),
        streams_(streams),
        common_(ToWords(arguments.daemon)),
        pools_(ToPoolOptions(arguments.daemon)),
        outcomes_(cells_.size()) {
    if (arguments.deadline != kDefaultDeadline) {
      std::ostringstream seconds;
      seconds << arguments.deadline;
      common_.insert(common_.end(), {"--deadline", seconds.str()});
    }
  }

  int List() {
    for (const Cell& cell : cells_) {
      if (arguments_.json)
        streams_.out << DescribeCell(cell).dump() << "\n";
      else
        streams_.out << cell.name << ": " << Repeat(cell) << "\n";
    }
    return cells_.empty() ? kFailure : kSuccess;
  }

  int Run() {
    for (std::size_t index : RunOrder(cells_)) {
      Progress(cells_[index].name);
      outcomes_[index] = RunCell(cells_[index]);
      ++counts_[outcomes_[index].kind];
      ClearProgress();
      Report(cells_[index], outcomes_[index]);
    }
    Summarise();
    int ran = counts_[Outcome::Kind::kPassed] + Failed();
    return ran > 0 && Failed() == 0 ? kSuccess : kFailure;
  }

  void WriteJunitTo(std::ostream& out) const {
    std::string suite = "cppool." + (arguments_.suite.empty() ? std::string("run") : arguments_.suite);
    std::vector<JunitCase> cases;
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      const Outcome& outcome = outcomes_[i];
      JunitCase one;
      one.group = suite;
      one.name = cells_[i].name;
      one.outcome = static_cast<JunitCase::Outcome>(outcome.kind);
      one.seconds = outcome.seconds;
      one.message = FirstLine(outcome.error);
      for (const std::string& line : Explain(outcome)) one.details += line + "\n";
      one.details += "repeat: " + Repeat(cells_[i]) + "\n";
      cases.push_back(std::move(one));
    }
    WriteJunit(out, suite, cases);
  }

 private:
  static_assert(static_cast<int>(Outcome::Kind::kFailed) == static_cast<int>(JunitCase::Outcome::kFailed) &&
                static_cast<int>(Outcome::Kind::kError) == static_cast<int>(JunitCase::Outcome::kError) &&
                static_cast<int>(Outcome::Kind::kSkipped) == static_cast<int>(JunitCase::Outcome::kSkipped));

  int Failed() { return counts_[Outcome::Kind::kFailed] + counts_[Outcome::Kind::kError]; }
  std::string Repeat(const Cell& cell) const { return RepeatCommand(cell, common_); }

  Json DescribeCell(const Cell& cell) const {
    return {{"name", cell.name},      {"rows", cell.rows},
            {"case", cell.case_name}, {"world_size", cell.world_size},
            {"params", cell.params},  {"repeat", Repeat(cell)}};
  }

  Outcome RunCell(const Cell& cell) {
    Outcome outcome;
    auto start = std::chrono::steady_clock::now();
    if (auto known = not_started_.find(cell.world_size); known != not_started_.end()) return known->second;
    Pool& pool = pools_.At(cell.world_size);
    RunOptions options;
    options.case_name = cell.case_name;
    options.deadline = std::chrono::milliseconds(std::llround(arguments_.deadline * 1000));
    try {
      if (worlds_.count(cell.world_size) == 0) worlds_[cell.world_size] = pool.Hello();
      outcome.result = pool.Run(cell.params, options);
      outcome.error = outcome.result->error;
      switch (outcome.result->status) {
        case Status::kPassed:
          outcome.kind = Outcome::Kind::kPassed;
          break;
        case Status::kFailed:
          outcome.kind = Outcome::Kind::kFailed;
          break;
        case Status::kSkipped:
          outcome.kind = Outcome::Kind::kSkipped;
          break;
        case Status::kError:
          outcome.kind = Outcome::Kind::kError;
          break;
      }
    } catch (const PoolError& error) {
      outcome.error = error.what();
      // What could not start once is not started again for each of hundreds of cells.
      if (error.kind() == PoolError::Kind::kStart) {
        if (!arguments_.suite.empty() && outcome.error.find(protocol::kTooFewDevices) != std::string::npos) {
          // A suite runs what the machine can; a case that was asked for alone must run.
          outcome.kind = Outcome::Kind::kSkipped;
          outcome.error = "world size " + std::to_string(cell.world_size) +
                          " needs as many GPUs, and there are fewer (see --backend host)";
          return not_started_[cell.world_size] = outcome;
        }
        not_started_[cell.world_size].error = "not run: no daemon of world size " +
                                              std::to_string(cell.world_size) +
                                              " could be started (see above): " + FirstLine(error.what());
      }
    }
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return outcome;
  }

  void Progress(const std::string& name) {
    if (!streams_.terminal) return;
    int done = counts_[Outcome::Kind::kPassed] + Failed() + counts_[Outcome::Kind::kSkipped];
    streams_.err << "\r\033[K[" << done + 1 << "/" << cells_.size() << "] " << Failed() << " failed  " << name
                 << std::flush;
  }
  void ClearProgress() {
    if (streams_.terminal) streams_.err << "\r\033[K" << std::flush;
  }

  void Report(const Cell& cell, const Outcome& outcome) {
    if (arguments_.json) {
      Json json = DescribeCell(cell);
      const bool skipped = outcome.kind == Outcome::Kind::kSkipped;
      json["status"] = ToString(outcome.result ? outcome.result->status
                                : skipped      ? Status::kSkipped
                                               : Status::kError);
      json["seconds"] = outcome.seconds;
      json["error"] = outcome.error.empty() ? Json() : Json(outcome.error);
      json["attempts"] = outcome.result ? Json(outcome.result->attempts) : Json();
      json["answer"] = outcome.result ? outcome.result->json : Json();
      Print(json);
      return;
    }
    bool failed = outcome.kind == Outcome::Kind::kFailed || outcome.kind == Outcome::Kind::kError;
    if (failed) {
      streams_.out << (outcome.kind == Outcome::Kind::kFailed ? "FAILED " : "ERROR ") << cell.name << "\n";
      for (const std::string& line : Explain(outcome)) streams_.out << "  " << line << "\n";
      streams_.out << "  repeat: " << Repeat(cell) << "\n";
    } else if (outcome.kind == Outcome::Kind::kSkipped) {
      ++reasons_[outcome.error];
    } else if (arguments_.suite.empty()) {
      Describe(cell, *outcome.result);
    }
    streams_.out << std::flush;
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
    int passed = counts_[Outcome::Kind::kPassed], skipped = counts_[Outcome::Kind::kSkipped];
    std::ostream& closing = arguments_.json ? streams_.err : streams_.out;  // stdout is for programs then
    if (arguments_.json) {
      Json worlds = Json::array();
      for (const auto& [size, hello] : worlds_)
        worlds.push_back({{"world_size", size},
                          {"backend", hello.value("backend", Json())},
                          {"transport", hello.value("transport", Json())},
                          {"devices", hello.value("devices", Json())}});
      Print({{"summary",
              {{"passed", passed}, {"failed", Failed()}, {"skipped", skipped}, {"worlds", worlds}}}});
    }
    for (const auto& [reason, count] : reasons_) closing << "skipped " << count << ": " << reason << "\n";
    std::string worlds;
    for (const auto& [size, hello] : worlds_)
      worlds +=
          (worlds.empty() ? "" : "; ") + ("world size " + std::to_string(size)) + ": " + DescribeWorld(hello);
    closing << (worlds.empty() ? "backend none: no daemon answered" : worlds) << "\n";
    closing << passed << " passed, " << Failed() << " failed, " << skipped << " skipped\n" << std::flush;
  }

  void Print(const Json& json) {
    streams_.out << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n" << std::flush;
  }

  const Arguments& arguments_;
  const std::vector<Cell> cells_;
  Streams streams_;
  std::vector<std::string> common_;  // options that a repeating command needs
  Pools pools_;
  std::vector<Outcome> outcomes_;  // as cells_
  std::map<Outcome::Kind, int> counts_;
  std::map<std::string, int> reasons_;
  std::map<int, Outcome> not_started_;  // by world size: what becomes of its further cells
  std::map<int, Json> worlds_;          // the answers to `hello`
};

std::vector<Cell> CellsOf(const Arguments& arguments) {
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
    cells = Select(LoadSuite(arguments.suite), filters);
  }
  for (Cell& cell : cells) {
    if (arguments.max_seqlen > 0) Shrink(&cell.params, arguments.max_seqlen);
    for (const std::string& text : arguments.params) {
      auto [key, value] = SplitAssignment(text, "--param");
      cell.params[key] = ValueFromText(value);
    }
    if (arguments.world_size > 0) cell.world_size = arguments.world_size;
  }
  return cells;
}

int RunCommand(const Arguments& arguments, Streams streams) {
  std::vector<Cell> cells = CellsOf(arguments);
  std::ofstream junit;
  if (!arguments.junit.empty()) {
    junit.open(arguments.junit);
    if (!junit) throw UsageError("cannot write " + arguments.junit);
  }
  if (cells.empty()) streams.err << "cppool: no cell of the suite matches the filters\n";
  Runner runner(arguments, std::move(cells), streams);
  if (arguments.list) return runner.List();
  int code = runner.Run();
  if (!arguments.junit.empty()) {
    runner.WriteJunitTo(junit);
    junit.close();
    if (!junit) {
      streams.err << "cppool: " << arguments.junit << " could not be written\n";
      return kFailure;
    }
  }
  return code;
}

}  // namespace

void AddRun(CLI::App& app, Streams streams, int* exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* run = app.add_subcommand("run", "Runs one case or a suite");
  CLI::Option* suite =
      run->add_option("--suite", arguments->suite, "smoke, essential or matrix; without it one case is run")
          ->check(CLI::IsMember({"smoke", "essential", "matrix"}));
  run->add_option("--case", arguments->case_name, "The case to run")->excludes(suite)->capture_default_str();
  run->add_option("--world-size", arguments->world_size,
                  "Number of ranks (default: each cell's own; 2 for a single case)")
      ->check(CLI::Range(1, std::numeric_limits<int>::max()));
  AddRepeatable(*run, "--param", &arguments->params,
                "A parameter, key=value; the value as JSON or as text. Overrides a suite's");
  AddRepeatable(*run, "--filter", &arguments->filters,
                "Only cells of the suite with key=value: a parameter, world_size, row, model, "
                "kernel_backend or essential. Of one key any value, of different keys all")
      ->needs(suite);
  run->add_option("--max-seqlen", arguments->max_seqlen,
                  "Shrinks a suite's lengths to at most this, and windows with them")
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
      ->needs(suite);
  run->add_option("--deadline", arguments->deadline, "Seconds for each case")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  AddDaemonOptions(*run, &arguments->daemon);
  run->add_option("--junit", arguments->junit, "Writes the outcomes to this file as JUnit XML");
  run->add_flag("--json", arguments->json, "One JSON object per case, then a summary object");
  run->add_flag("--list", arguments->list, "Prints the cells that would be run, and the command for each");
  run->callback([arguments, streams, exit_code] { *exit_code = RunCommand(*arguments, streams); });
}

}  // namespace cppool::command
