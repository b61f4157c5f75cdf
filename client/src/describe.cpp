#include "client/src/describe.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iomanip>
#include <locale>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/words.h"
#include "protocol/crash.h"
#include "protocol/json_text.h"
#include "protocol/response.h"
#include "protocol/start.h"

namespace cppool::client {
namespace {

constexpr std::size_t kOutputLines = 20;  // of what a rank has written

using Row = std::vector<std::string>;

std::vector<std::string> LastOf(std::vector<std::string> lines, std::size_t most) {
  if (lines.size() > most) lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(most));
  return lines;
}

// Indented lines below a first one.
class Lines {
 public:
  void Add(const std::string& line) { text_ += "\n  " + line; }
  void AddAll(const std::vector<std::string>& lines, const std::string& before = "") {
    for (const std::string& line : lines) Add(before + line);
  }
  void AddTable(const std::vector<Row>& rows) {
    std::vector<std::size_t> widths(rows.front().size());
    for (const Row& row : rows)
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    for (const Row& row : rows) {
      std::string line;
      for (std::size_t i = 0; i < row.size(); ++i)
        line += (i > 0 ? "  " : "") + row[i] + std::string(widths[i] - row[i].size(), ' ');
      Add(line.substr(0, line.find_last_not_of(' ') + 1));
    }
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string Short(double value) {
  if (std::isnan(value)) return "nan";  // whatever its sign is
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::setprecision(4) << value;
  return text.str();
}

// A table of those that do not hold, and how many do.
void AddChecks(const std::vector<Check>& checks, Lines* lines) {
  if (checks.empty()) return;
  std::vector<Row> rows = {{"tensor", "against", "rank", "max_abs_err", "rel_err", "tolerance"}};
  bool located = false;
  for (const Check& check : checks) located = located || (!check.ok && (check.worst || check.bad));
  if (located) rows[0].insert(rows[0].end(), {"worst at", "got", "wanted", "bad", "where"});
  for (const Check& check : checks) {
    if (check.ok) continue;
    Row row = {
        check.tensor,         check.against,         std::to_string(check.rank), Short(check.max_abs_err),
        Short(check.rel_err), Short(check.tolerance)};
    if (located) {
      const auto number = [&](double Worst::*value) {
        return check.worst ? Short((*check.worst).*value) : "";
      };
      row.insert(row.end(),
                 {check.worst ? DescribeIndex(check.worst->index) : "", number(&Worst::got),
                  number(&Worst::wanted), check.bad ? std::to_string(*check.bad) : "", check.where});
    }
    rows.push_back(std::move(row));
  }
  const std::size_t bad = rows.size() - 1;
  if (bad > 0) lines->AddTable(rows);
  lines->Add(std::to_string(checks.size() - bad) + " of " + std::to_string(checks.size()) + " checks hold");
}

// A table of each stage's milliseconds by rank; empty where a rank has not reached it.
void AddStages(const Result& result, Lines* lines) {
  Row header = {"stage"}, stages;
  for (const Rank& rank : result.ranks) {
    header.push_back("rank " + std::to_string(rank.rank) + " (ms)");
    for (const auto& stage : rank.gpu_ms)
      if (std::ranges::find(stages, stage.first) == stages.end()) stages.push_back(stage.first);
  }
  if (stages.empty()) return;
  const auto text = [](const std::vector<std::pair<std::string, double>>& values, const std::string& stage) {
    for (const auto& [name, value] : values)
      if (name == stage) return Short(value);
    return std::string();
  };
  header.push_back("TFLOP/s per GPU");
  std::vector<Row> rows = {std::move(header)};
  for (const std::string& stage : stages) {
    Row row = {stage};
    for (const Rank& rank : result.ranks) row.push_back(text(rank.gpu_ms, stage));
    row.push_back(text(result.tflops, stage));
    rows.push_back(std::move(row));
  }
  lines->AddTable(rows);
}

}  // namespace

Json Describe(const Crash& crash) {
  Json json = {{"rank", nullptr},
               {"stage", nullptr},
               {"case", nullptr},
               {"library", nullptr},
               {"stack", Json::array()}};
  json.update(protocol::ToJson(crash));
  return json;
}

Json Describe(const PoolError& error) {
  Json json = {{"kind", ToString(error.kind())},
               {"error", error.what()},
               {"stderr_tail", error.stderr_tail()},
               {"diagnosis", error.diagnosis()},
               {"attempts", error.attempts()}};
  if (error.start_failure()) json["start"] = protocol::ToJson(*error.start_failure());
  if (error.crash()) json["crash"] = Describe(*error.crash());
  AddLost(error.flaky(), error.lost(), &json);
  return json;
}

std::string WithoutTail(const PoolError& error) {
  std::string text = error.what();
  if (!error.stderr_tail().empty()) text.resize(text.rfind(std::string("\n") + kTailTitle + "\n"));
  return text;
}

protocol::Failure FailureOf(const PoolError& error) {
  protocol::Failure failure;
  failure.detail = WithoutTail(error);
  if (error.kind() == PoolError::Kind::kTimeout) failure.kind = protocol::FailureKind::kTimeout;
  if (error.kind() == PoolError::Kind::kInterrupted) failure.kind = protocol::FailureKind::kCancelled;
  if (const auto& start = error.start_failure()) {
    failure.kind = protocol::ParseFailureKind(start->kind).value_or(failure.kind);
    failure.rank = start->rank;
  }
  if (const auto& crash = error.crash()) {
    failure.rank = crash->rank;
    failure.stage = crash->stage;
  }
  return failure;
}

void AddLost(const std::string& flaky, const std::vector<LostAttempt>& lost, Json* json) {
  if (!flaky.empty()) (*json)["flaky"] = flaky;
  for (const LostAttempt& attempt : lost) {
    (*json)["lost"].push_back(
        {{"kind", ToString(attempt.kind)}, {"error", attempt.error}, {"stderr_tail", attempt.stderr_tail}});
    if (attempt.crash) (*json)["lost"].back()["crash"] = Describe(*attempt.crash);
  }
}

std::string ErrorOfRank(const Rank& rank, const Result& result) {
  std::string error = rank.error;
  const std::string first = result.failure ? ": " + result.failure->detail : "";
  // Where the rank was stands behind it.
  if (const std::size_t at = error.find(first); first.size() > 2 && at != std::string::npos)
    error.erase(at, first.size());
  return error;
}

bool NamesFailedCheck(const std::string& error, const Result& result) {
  return std::ranges::any_of(result.checks, [&](const Check& check) {
    return !check.ok && error.find(check.tensor + " against " + check.against) != std::string::npos;
  });
}

std::string DescribeResult(const Result& result, const std::string& command) {
  Lines lines;
  if (!result.flaky.empty()) lines.Add(result.flaky);
  for (std::size_t i = 0; i < result.lost.size(); ++i)
    lines.Add("attempt " + std::to_string(i + 1) + ": " + result.lost[i].error);
  for (const std::string& warning : result.warnings) lines.Add("warning: " + warning);
  AddChecks(result.checks, &lines);
  if (result.ok()) AddStages(result, &lines);
  for (const Rank& rank : result.ranks) {
    const bool first = result.failure && result.failure->rank == rank.rank;
    const std::string name = "rank " + std::to_string(rank.rank), error = ErrorOfRank(rank, result);
    if (first) lines.AddAll(base::Split(rank.traceback, '\n'));
    if (!error.empty() && result.error.find(error) == std::string::npos && !NamesFailedCheck(error, result))
      lines.Add(name + ": " + error);
    if (first) lines.AddAll(LastOf(base::Split(rank.output, '\n'), kOutputLines), name + " wrote: ");
  }
  if (result.ok() && result.json.contains("replaced"))
    lines.Add("ranks replaced: " + result.json.value("replaced", ""));
  return std::string(ToString(result.status)) + (result.error.empty() ? "" : ": " + result.error) +
         lines.text() + (command.empty() ? "" : "\nrepeat: " + command);
}

Result ResultFromJson(Json json) {
  protocol::RunResult read = protocol::RunResultFromJson(json);
  Result result;
  result.status = read.status;
  result.error = std::move(read.error);
  if (read.failure)
    result.failure = {std::string(protocol::KindOf(*read.failure)), read.failure->rank, read.failure->stage,
                      read.failure->detail, read.failure->node};
  result.fatal = read.fatal;
  result.ranks = std::move(read.ranks);
  result.checks = std::move(read.checks);
  result.tflops = std::move(read.tflops);
  result.wall_ms = read.wall_ms;
  result.seed = read.seed;
  result.stopped = std::move(read.stopped);
  result.warnings = std::move(read.warnings);
  result.leaks = read.leaks;
  result.json = std::move(json);
  return result;
}

Result ValidationFromJson(Json json) {
  const auto runs = json.find("runs");
  if (runs == json.end()) return ResultFromJson(std::move(json));
  if (*runs != true || json.value("ok", Json()) != true)
    throw std::runtime_error("in the response, \"runs\" is not true where \"ok\" is: " +
                             protocol::EchoValue(json));
  protocol::CheckDigests(json);
  Result result;
  result.status = Status::kPassed;
  result.json = std::move(json);
  return result;
}

std::vector<std::string> FeaturesFromJson(const Json& hello) {
  const auto features = hello.find("features");
  if (features == hello.end()) return {};
  std::vector<std::string> names;
  if (!features->is_array())
    throw std::runtime_error("in the response, \"features\" is not a list: " +
                             protocol::EchoValue(*features));
  for (const Json& name : *features) {
    if (!name.is_string())
      throw std::runtime_error("in the response, a feature is not a string: " + protocol::EchoValue(name));
    names.push_back(name.get<std::string>());
  }
  return names;
}

std::string Text(const Crash& crash) {
  std::string text = crash.error;
  const auto add = [&](const std::string& before, const std::string& what, const std::string& after) {
    if (!what.empty() && text.find(what) == std::string::npos) text += before + what + after;
  };
  add(" in stage '", crash.stage, "'");
  add(", library ", crash.library, "");
  if (crash.stack.empty() || text.find(crash.stack.front()) != std::string::npos) return text;
  for (const std::string& frame : crash.stack)
    text += (&frame == &crash.stack.front() ? ", stack: " : " < ") + frame;
  return text;
}

std::optional<Json> ProgressOf(std::string_view line) {
  Json json = line.starts_with("{") ? Json::parse(line, nullptr, false) : Json();
  if (!json.is_object() || !json.contains("progress")) return std::nullopt;
  return json;
}

std::string FlakyAt(std::string_view end, int attempt) {
  return "flaky (" + std::string(end) + " at attempt " + std::to_string(attempt) + ")";
}

std::string FlakyOf(int failed, int of) {
  return "flaky (failed " + std::to_string(failed) + " of " + std::to_string(of) + ")";
}

}  // namespace cppool::client

namespace cppool {

std::string Result::Describe() const { return client::DescribeResult(*this, Command()); }
std::ostream& operator<<(std::ostream& out, const Result& result) { return out << result.Describe(); }

}  // namespace cppool
