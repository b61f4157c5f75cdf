#include "client/command/report_page.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/version.h>

#include "base/new_file.h"
#include "base/words.h"
#include "client/suite/value_text.h"
#include "protocol/framing.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::command {
namespace {

constexpr char kWhatToGive[] =
    ": give what `cppool run --json` or `cppool bench --json` has printed, or `cppool bench --save` written";
constexpr int kNesting = protocol::kMaxNesting + 8;  // an answer is in a record
constexpr std::size_t kOutputLines = 200;            // that the page keeps of each cell

// Returns the members of an object that it has of these.
Json Members(const Json& object, std::initializer_list<const char*> names) {
  Json kept = Json::object();
  for (const char* name : names)
    if (const auto found = object.find(name); found != object.end() && !found->is_null()) kept[name] = *found;
  return kept;
}

// How far a check is from holding: of the oracle's the ratio, else the share of the tolerance.
double Worseness(const Json& check) {
  const auto number = [&](const char* name) {
    const auto found = check.find(name);
    return found != check.end() && found->is_number() ? found->get<double>()
                                                      : std::numeric_limits<double>::infinity();
  };
  return check.contains("ratio") ? number("ratio") : number("max_abs_err") / number("tolerance");
}

// Returns all checks that do not hold, and of the others the worst of each tensor: a suite has thousands of
// cells, and each of them dozens of checks.
Json ChecksForPage(const Json& checks) {
  Json kept = Json::array();
  std::map<std::pair<std::string, std::string>, Json> worst;
  for (const Json& check : checks) {
    if (!check.at("ok").get<bool>()) {
      kept.push_back(check);
      continue;
    }
    Json& known = worst[{check.at("against").get<std::string>(), check.at("tensor").get<std::string>()}];
    if (known.is_null() || Worseness(check) > Worseness(known)) known = check;
  }
  for (auto& [of, check] : worst) kept.push_back(std::move(check));
  return kept;
}

// Returns of an answer to a run what the page shows.
Json AnswerForPage(const Json& answer) {
  Json kept = Members(answer, {"wall_ms", "tflops", "kernels", "failure", "warnings"});
  const Json checks = answer.value("checks", Json::array());
  kept["checks"] = ChecksForPage(checks);
  kept["of_checks"] = checks.size();
  kept["ranks"] = Json::array();  // that have an error
  for (const Json& rank : answer.value("ranks", Json::array()))
    if (rank.is_object() && !rank.value("ok", true))
      kept["ranks"].push_back(Members(rank, {"rank", "error", "stage"}));
  return kept;
}

Json CellForPage(const Json& cell) {
  Json kept =
      Members(cell, {"name", "suite", "rows", "case", "world_size", "params", "status", "seconds", "error",
                     "attempts", "repeat", "again", "flaky", "lost", "crash", "verdict", "output"});
  kept.at("name").get<std::string>();  // throws where a member is not of its type
  kept.at("world_size").get<int>();
  kept.at("params").get<Json::object_t>();
  if (const auto answer = cell.find("answer"); answer != cell.end() && answer->is_object())
    kept["answer"] = AnswerForPage(*answer);
  if (const auto output = kept.find("output"); output != kept.end() && output->size() > kOutputLines)
    *output = Json::array_t(output->end() - kOutputLines, output->end());
  return kept;
}

Json RowForPage(const Json& row) {
  Json kept = Members(row, {"case", "world_size", "params", "kernels", "ran", "warmup", "repeat", "measured",
                            "efficiency", "errors", "ratio", "baseline", "command"});
  kept.at("world_size").get<int>();
  kept.at("params").get<Json::object_t>();
  const Json& measured = kept.at("measured");
  if (!measured.contains("error"))
    for (const auto& [name, stage] : measured.at("stages").items()) {
      stage.at("ms");
      kept["measured"]["stages"][name] =
          Members(stage, {"ms", "tflops", "precision", "samples", "exposed_ms"});
    }
  return kept;
}

// Returns the JSON without what ends a <script>, or begins a comment in it.
std::string InScript(const Json& value) {
  std::string text;
  for (const char c : protocol::JsonText(value)) {
    if (c == '<')
      text += "\\u003c";
    else
      text += c;
  }
  return text;
}

}  // namespace

void ReportPage::Begin(const std::string& from) {
  from_ = from;
  open_ = false;
}

Json& ReportPage::PartOf(const std::string& kind) {
  if (!open_ || parts_.back()["kind"] != kind)
    parts_.push_back(
        {{"from", from_}, {"kind", kind}, {"records", Json::array()}, {"summary", Json::object()}});
  open_ = true;
  return parts_.back();
}

void ReportPage::Add(const Json& record) try {
  if (!record.is_object()) throw suite::UsageError("not an object");
  if (record.contains("summary")) {
    const Json& summary = record.at("summary");
    PartOf(summary.contains("points") ? "bench" : "run")["summary"] = summary.get<Json::object_t>();
    open_ = false;
  } else if (record.contains("measured")) {
    Json row = RowForPage(record);
    PartOf("bench")["records"].push_back(std::move(row));
  } else if (record.contains("status") && record.contains("name")) {
    Json cell = CellForPage(record);
    PartOf("run")["records"].push_back(std::move(cell));
  } else {
    throw suite::UsageError(record.contains("would")
                                ? "what `cppool run --list` prints: nothing ran"
                                : "neither a record of `cppool run --json` nor one of `cppool bench --json`");
  }
} catch (const Json::exception& error) {
  throw suite::UsageError(std::string("not as `cppool run --json` or `cppool bench --json` prints it: ") +
                          error.what());
}

void ReportPage::AddSaved(const Json& saved) {
  if (!saved.contains("rows") || !saved["rows"].is_array() || !saved.contains("summary"))
    throw suite::UsageError("not as `cppool bench --save` writes it: there are no rows, or is no summary");
  for (const Json& row : saved["rows"]) Add(row);
  Add({{"summary", saved["summary"]}});
}

void ReportPage::Read(const std::string& file) {
  errno = 0;
  std::ifstream in(file);
  std::ostringstream text;
  if (in.peek() != std::ifstream::traits_type::eof()) text << in.rdbuf();
  if (!in.is_open() || errno != 0)
    throw suite::UsageError("cannot read " + file + ": " + std::strerror(errno));
  Begin(file);
  int number = 0, records = 0;
  for (const std::string& line : base::Split(text.str(), '\n')) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      const Json record = protocol::ParseJson(line, kNesting);
      if (record.is_object() && record.contains("format"))
        AddSaved(record);
      else
        Add(record);
    } catch (const std::exception& error) {
      const bool is_json = dynamic_cast<const protocol::InvalidRequest*>(&error) == nullptr;
      throw suite::UsageError(file + ":" + std::to_string(number) + ": " + error.what() +
                              (is_json || records > 0 ? "" : kWhatToGive));
    }
    ++records;
  }
  if (records == 0) throw suite::UsageError(file + ":1: empty" + kWhatToGive);
}

int ReportPage::count(const std::string& kind) const {
  std::size_t count = 0;
  for (const Json& part : parts_)
    if (part["kind"] == kind) count += part["records"].size();
  return static_cast<int>(count);
}

std::string ReportPage::Html() const {
  // By their marks in report.html, in this order. What is put in may have any text in it.
  const std::vector<std::pair<std::string_view, std::string>> pieces = {
      {"/*CHART*/", ReportText("chart")},
      {"/*RECORDS*/", InScript({{"version", CPPOOL_VERSION}, {"parts", parts_}})},
      {"/*RUN*/", ReportText("report_run")},
      {"/*BENCH*/", ReportText("report_bench")}};
  const std::string page = ReportText("report");
  std::string html;
  std::size_t at = 0;
  for (const auto& [mark, text] : pieces) {
    const std::size_t found = page.find(mark, at);
    html += page.substr(at, found - at) + text;
    at = found + mark.size();
  }
  return html + page.substr(at);
}

void ReportPage::Write(const std::string& file) const {
  base::NewFile page(file);
  page.Write(Html());
  page.Commit();
}

}  // namespace cppool::command
