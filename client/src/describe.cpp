#include "client/src/describe.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "protocol/crash.h"
#include "protocol/json_text.h"
#include "protocol/response.h"
#include "protocol/start.h"

namespace cppool::client {

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

void AddLost(const std::string& flaky, const std::vector<LostAttempt>& lost, Json* json) {
  if (!flaky.empty()) (*json)["flaky"] = flaky;
  for (const LostAttempt& attempt : lost) {
    (*json)["lost"].push_back(
        {{"kind", ToString(attempt.kind)}, {"error", attempt.error}, {"stderr_tail", attempt.stderr_tail}});
    if (attempt.crash) (*json)["lost"].back()["crash"] = Describe(*attempt.crash);
  }
}

Result ResultFromJson(Json json) {
  protocol::RunResult read = protocol::RunResultFromJson(json);
  Result result;
  result.status = read.status;
  result.error = std::move(read.error);
  if (read.failure)
    result.failure = {std::string(protocol::KindOf(*read.failure)), read.failure->rank, read.failure->stage,
                      read.failure->detail};
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
