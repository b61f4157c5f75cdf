#include "client/command/run_report.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <utility>

#include <cppool/version.h>

#include "base/file_cache.h"
#include "base/words.h"
#include "client/command/command.h"
#include "client/command/diagnose.h"
#include "client/src/describe.h"
#include "client/suite/repeat.h"
#include "client/suite/value_text.h"
#include "protocol/crash.h"

namespace cppool::command {
namespace {

std::string DescribeCheck(const Check& check) {
  std::ostringstream text;
  text << check.tensor << " of rank " << check.rank << " against " << check.against << ": max_abs_err "
       << check.max_abs_err << ", rel_err " << check.rel_err << ", tolerance " << check.tolerance;
  if (check.ratio) text << ", ratio " << *check.ratio;
  const std::string worst = DescribeWorst(check);
  return text.str() + (worst.empty() ? "" : "; " + worst);
}

// Cuts off what the daemon puts before its own messages: "[07:08:49.665] [cppoold 24396] [warning] [rank 1]
// ", "cppoold: ".
std::string_view Message(std::string_view line) {
  if (line.starts_with("cppoold: ")) return line.substr(9);
  if (line.find("] [cppoold ") == std::string_view::npos) return line;
  while (line.starts_with('[') && line.find("] ") != std::string_view::npos)
    line.remove_prefix(line.find("] ") + 2);
  return line;
}

// The lines that explain an outcome, each once: how earlier attempts ended, its failed checks, its error, and
// the errors of ranks that it does not contain, which may be consequences.
class Explanation {
 public:
  explicit Explanation(const Outcome& outcome) : result_(outcome.result ? &*outcome.result : nullptr) {
    const bool in_verdict = outcome.verdict && outcome.verdict->kind == Verdict::Kind::kFlaky;
    if (!outcome.flaky.empty() && !in_verdict) lines.push_back(outcome.flaky);
    for (std::size_t i = 0; i < outcome.lost.size();
         ++i)  // without an answer, the error begins with the last one
      if (!outcome.error.starts_with(outcome.lost[i].error))
        Add("attempt " + std::to_string(i + 1) + ": " + outcome.lost[i].error);
    if (outcome.result) AddChecks(outcome.result->checks);
    for (const std::string& line : base::Split(outcome.error, '\n')) Add(line);
    if (lines.size() > 1 && lines.back() == client::kTailTitle) lines.pop_back();
    if (outcome.result) AddRanks(*outcome.result);
    for (const std::string& line : outcome.output)
      if (!IsRepeated(line) && !line.starts_with(protocol::kCrashPrefix)) output.push_back(line);
  }

  std::vector<std::string> lines, output;  // output: the case's and the daemon's that is not in the lines

 private:
  void AddChecks(const std::vector<Check>& checks) {
    int failed = 0;
    for (const Check& check : checks) {
      if (check.ok) continue;
      lines.push_back(DescribeCheck(check));
      ++failed;
    }
    if (failed > 0)
      lines.push_back(std::to_string(failed) + " of " + std::to_string(checks.size()) +
                      " checks do not hold");
  }

  void AddRanks(const Result& result) {
    for (const Rank& rank : result.ranks) {
      if (rank.ok || IsListed(rank.error) || NamesCheck(rank.error)) continue;
      lines.push_back("rank " + std::to_string(rank.rank) + ": " + client::ErrorOfRank(rank, result));
      listed_.push_back(rank.error);
    }
  }

  void Add(const std::string& line) {
    if (IsRepeated(line) || NamesCheck(line)) return;
    lines.push_back(line);
    listed_.push_back(line);
  }

  // A message of the daemon's may be repeated; a case's own line never is.
  bool IsRepeated(const std::string& line) const {
    const std::string_view message = Message(line);
    return message.size() < line.size() && IsListed(message);
  }
  bool IsListed(std::string_view text) const {
    return std::ranges::any_of(listed_,
                               [&](const std::string& line) { return line.find(text) != std::string::npos; });
  }
  bool NamesCheck(const std::string& text) const {
    return result_ && client::NamesFailedCheck(text, *result_);
  }

  const Result* const result_;
  std::vector<std::string> listed_;
};

// Adds how daemons ended that had the cell.
void AddCrashes(const Outcome& outcome, Json* json) {
  if (outcome.crash) (*json)["crash"] = client::Describe(*outcome.crash);
  client::AddLost(outcome.flaky, outcome.lost, json);
}

Json OrNull(const std::string& text) { return text.empty() ? Json() : Json(text); }

// "passed; in failures/mine-W2", "failed; in failures/mine-W2; its dump is not kept: ...", "not run: ...".
std::string DescribeAgain(const Again& again) {
  if (again.folder.empty()) return "not run: " + again.note;
  return std::string(ToString(again.kind)) + "; in " + again.folder +
         (again.note.empty() ? "" : "; " + again.note);
}

Json ToJson(const Again& again) {
  Json json = {{"status", again.folder.empty() ? Json() : Json(ToString(again.kind))},
               {"folder", OrNull(again.folder)},
               {"error", OrNull(again.error)}};
  if (!again.note.empty()) json["note"] = again.note;
  return json;
}

}  // namespace

RunReport::RunReport(const RunArguments& arguments, bool for_each, const Streams& streams, std::size_t cells,
                     LoadedCases loaded)
    : arguments_(arguments),
      for_each_(for_each),
      streams_(streams),
      loaded_(std::move(loaded)),
      junit_name_("cppool." + (arguments.suite.empty()
                                   ? std::string("run")
                                   : std::filesystem::path(arguments.suite).stem().string())),
      progress_(streams.err, streams.terminal, cells) {
  page_.Begin("cppool run" + (arguments.suite.empty() ? "" : " --suite " + arguments.suite));
  if (!arguments.html.empty()) CheckCanWrite("--html", arguments.html);
  if (arguments.junit.empty()) return;
  errno = 0;
  junit_.open(arguments.junit);
  if (!junit_) throw suite::UsageError(CannotWrite(arguments.junit));
}

void RunReport::Count(const suite::Cell& cell, const Outcome& outcome) {
  tally_.Add(cell, outcome);
  failing_ += fails(outcome);
}

void RunReport::PrintOutcome(const suite::Cell& cell, const Outcome& outcome) {
  if (!arguments_.html.empty()) page_.Add(Record(cell, outcome));
  if (arguments_.json) return PrintJson(streams_.out, Record(cell, outcome));
  if (outcome.failed() || !outcome.flaky.empty()) {
    const bool failed = outcome.kind == Outcome::Kind::kFailed;
    streams_.out << (!outcome.flaky.empty() ? "FLAKY " : failed ? "FAILED " : "ERROR ") << cell.name << "\n";
    const Explanation explanation(outcome);
    for (const std::string& line : explanation.lines) streams_.out << "  " << line << "\n";
    PrintOutput(explanation.output);
    for (const std::string& line : Advice(cell, outcome)) streams_.out << "  " << line << "\n";
  } else if (outcome.result && outcome.kind == Outcome::Kind::kPassed && !arguments_.quiet &&
             (arguments_.suite.empty() || arguments_.verbose || outcome.result->leaks.any())) {
    PrintPassed(cell, *outcome.result);
    PrintOutput(outcome.output);
  } else if (outcome.kind == Outcome::Kind::kSkipped && arguments_.verbose) {
    streams_.out << "skipped " << cell.name << ": " << outcome.error << "\n";
    PrintOutput(outcome.output);
  }
  streams_.out << std::flush;
}

void RunReport::PrintOutput(const std::vector<std::string>& output) {
  if (output.empty()) return;
  streams_.out << "  its output and the daemon's:\n";
  for (const std::string& line : output) streams_.out << "  | " << line << "\n";
}

void RunReport::PrintPassed(const suite::Cell& cell, const Result& result) {
  streams_.out << "passed " << cell.name << " in " << Fixed(result.wall_ms, 3) << " ms\n";
  for (const auto& [stage, tflops] : result.tflops)
    streams_.out << "  " << stage << ": " << Fixed(tflops, 3) << " TFLOP/s per rank\n";
  for (const std::string& warning : result.warnings) streams_.out << "  warning: " << warning << "\n";
  if (!arguments_.suite.empty()) return;
  for (const Check& check : result.checks) streams_.out << "  " << DescribeCheck(check) << "\n";
}

void RunReport::PrintListed(const suite::Cell& cell, const Outcome& outcome) {
  const bool flaky = !outcome.flaky.empty(), skipped = outcome.kind == Outcome::Kind::kSkipped;
  if (arguments_.json) {
    Json json = DescribeCell(cell);
    json["would"] = flaky ? "flaky" : skipped ? "skip" : outcome.failed() ? "fail" : "run";
    json["error"] = OrNull(outcome.error);
    AddCrashes(outcome, &json);
    PrintJson(streams_.out, json);
    return;
  }
  streams_.out << cell.name << ": " << Repeat(cell) << "\n";
  std::string before = flaky ? "  " : skipped ? "  would be skipped: " : "  would fail: ";
  for (const std::string& line : flaky ? Explanation(outcome).lines : base::Split(outcome.error, '\n')) {
    streams_.out << before << line << "\n";
    before = "    ";
  }
  streams_.out << std::flush;
}

bool RunReport::WriteJunit(const std::vector<suite::Cell>& cells,
                           const std::vector<std::optional<Outcome>>& outcomes,
                           const std::map<int, Json>& worlds, const std::string& missing,
                           Outcome::Kind rest) {
  if (!junit_.is_open()) return true;  // not requested, or written
  std::vector<JunitCase> cases;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (outcomes[i]) {
      cases.push_back(ToJunit(cells[i], *outcomes[i]));
      continue;
    }
    Outcome not_run;
    not_run.kind = rest;
    not_run.error = "not run: " + missing;
    cases.push_back(ToJunit(cells[i], not_run));
  }
  errno = 0;
  JunitSuite suite{junit_name_, begin_, {{"cppool", CPPOOL_VERSION}}};
  for (const auto& [size, hello] : worlds)
    suite.properties.emplace_back("world size " + std::to_string(size), DescribeWorld(hello));
  command::WriteJunit(junit_, suite, cases);
  junit_.close();
  if (!junit_) streams_.err << "cppool: " << CannotWrite(arguments_.junit) << "\n";
  return static_cast<bool>(junit_);
}

JunitCase RunReport::ToJunit(const suite::Cell& cell, const Outcome& outcome) const {
  JunitCase one;
  one.group = junit_name_;
  one.name = cell.name;
  one.outcome = outcome.failed() || !fails(outcome) ? outcome.kind : Outcome::Kind::kFailed;
  one.seconds = outcome.seconds;
  one.message = FirstLine(outcome.error);
  const std::string more = outcome.verdict ? Describe(*outcome.verdict) : outcome.flaky;
  if (!more.empty()) one.message = one.message.empty() ? more : one.message + " (" + more + ")";
  for (const std::string& line : Explanation(outcome).lines) one.details += line + "\n";
  for (const std::string& line : Advice(cell, outcome)) one.details += line + "\n";
  one.stderr_tail = outcome.stderr_tail;
  return one;
}

Json RunReport::Summary(const std::map<int, Json>& worlds) const {
  Json summary = tally_.ToJson();
  summary.update(DescribeOrigin(begin_));
  summary["worlds"] = Json::array();
  for (const auto& [size, hello] : worlds)
    summary["worlds"].push_back({{"world_size", size},
                                 {"backend", hello.value("backend", Json())},
                                 {"transport", hello.value("transport", Json())},
                                 {"devices", hello.value("devices", Json())}});
  return {{"summary", summary}};
}

bool RunReport::WritePage(const Json& summary) {
  if (arguments_.html.empty()) return true;
  try {
    page_.Add(summary);
    page_.Write(arguments_.html);
    return true;
  } catch (const base::FileError& error) {
    streams_.err << "cppool: " << error.what() << "\n";
    return false;
  }
}

bool RunReport::Close(const std::map<int, Json>& worlds, const std::string& ended) {
  Json summary = Summary(worlds);
  if (!ended.empty()) summary["summary"]["stopped"] = ended;
  const bool written = WritePage(summary);
  std::ostream& closing = Closing();
  if (arguments_.json) {
    PrintJson(streams_.out, summary);
  } else if (!arguments_.suite.empty() && !arguments_.quiet) {
    tally_.PrintAxes(closing);
    tally_.PrintRatios(closing);
  }
  if (arguments_.quiet) {
    if (!ended.empty()) closing << ended << "\n";
    PrintCounts();
    return written;
  }
  tally_.PrintReasons(closing);
  tally_.PrintVerdicts(closing);
  std::string line;
  for (const auto& [size, hello] : worlds)
    line += (line.empty() ? "" : "; ") + ("world size " + std::to_string(size)) + ": " + DescribeWorld(hello);
  closing << (line.empty() ? "backend none: no daemon answered" : line) << "\n";
  tally_.PrintSuites(closing);
  if (!ended.empty()) closing << ended << "\n";
  PrintCounts();
  return written;
}

void RunReport::CloseList() {
  if (arguments_.json) {
    Json summary = {{"run", counts().passed}, {"fail", counts().failed}, {"skip", counts().skipped}};
    if (counts().flaky > 0) summary["flaky"] = counts().flaky;
    PrintJson(streams_.out, {{"summary", summary}});
  }
  Closing() << counts().passed << " would run, " << counts().failed << " would fail, " << counts().skipped
            << " would be skipped" << AndFlaky(counts()) << "\n";
}

void RunReport::CloseInterrupted(const std::map<int, Json>& worlds, const std::string& why) {
  Json summary = Summary(worlds);
  summary["summary"]["interrupted"] = why;
  WritePage(summary);
  if (arguments_.json) PrintJson(streams_.out, summary);
  Closing() << why << "\n";
  PrintCounts();
}

std::string RunReport::Repeat(const suite::Cell& cell) const {
  RunOptions options = ToRunOptions(arguments_);
  if (for_each_) options.dump = options.trace = "";
  std::vector<std::string> words =
      suite::OptionWords(arguments_.daemon.pool, loaded_.FilesWith(cell.case_name), options);
  if (arguments_.leaks_are_errors) words.insert(words.end(), {"--leaks", "error"});
  return suite::RepeatCommand(streams_.program, cell, words);
}

// Runs the culprits and then the cell in one pool.
std::string RunReport::RepeatAll(const suite::Cell& cell, const Verdict& verdict) const {
  std::vector<suite::Cell> sequence = verdict.culprits;
  sequence.push_back(cell);
  return SequenceCommand(sequence, ToPoolOptions(arguments_), ToRunOptions(arguments_));
}

// Returns the verdict of a diagnosis, and how to repeat the failure.
std::vector<std::string> RunReport::Advice(const suite::Cell& cell, const Outcome& outcome) const {
  std::vector<std::string> lines;
  if (outcome.verdict) lines.push_back("verdict: " + Describe(*outcome.verdict));
  if (outcome.again) lines.push_back("again: " + DescribeAgain(*outcome.again));
  lines.push_back("repeat: " + Repeat(cell));
  if (outcome.verdict && outcome.verdict->kind == Verdict::Kind::kPolluted) {
    lines.back() += "  # passes alone";
    lines.push_back("repeat after the culprits: " + RepeatAll(cell, *outcome.verdict));
  }
  return lines;
}

Json RunReport::Record(const suite::Cell& cell, const Outcome& outcome) const {
  Json json = DescribeCell(cell);
  json["status"] = outcome.flaky.empty() ? ToString(outcome.kind) : "flaky";
  json["seconds"] = outcome.seconds;
  json["error"] = OrNull(outcome.error);
  json["attempts"] = outcome.asked ? Json(outcome.attempts) : Json();
  json["answer"] = outcome.result ? outcome.result->json : Json();
  if (!outcome.output.empty()) json["output"] = outcome.output;
  AddCrashes(outcome, &json);
  if (outcome.again) json["again"] = ToJson(*outcome.again);
  if (outcome.verdict) json["verdict"] = DescribeVerdict(cell, *outcome.verdict);
  return json;
}

Json RunReport::DescribeCell(const suite::Cell& cell) const {
  return {{"name", cell.name},      {"suite", cell.suite},           {"rows", cell.rows},
          {"case", cell.case_name}, {"world_size", cell.world_size}, {"params", cell.params},
          {"repeat", Repeat(cell)}};
}

Json RunReport::DescribeVerdict(const suite::Cell& cell, const Verdict& verdict) const {
  Json json = {{"kind", ToString(verdict.kind)}, {"text", Describe(verdict)}, {"pools", verdict.pools}};
  if (verdict.kind == Verdict::Kind::kUndecided) return json;
  json.update({{"failed", verdict.failed}, {"ran", verdict.ran}});
  if (verdict.kind != Verdict::Kind::kPolluted) return json;
  for (const suite::Cell& culprit : verdict.culprits) json["culprits"].push_back(culprit.name);
  json["minimal"] = verdict.minimal;
  json["repeat"] = RepeatAll(cell, verdict);
  return json;
}

// With --json stdout holds JSON only.
std::ostream& RunReport::Closing() const { return arguments_.json ? streams_.err : streams_.out; }

void RunReport::PrintCounts() { Closing() << Text(counts()) << "\n" << std::flush; }

}  // namespace cppool::command
