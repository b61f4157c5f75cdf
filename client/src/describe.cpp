#include "client/src/describe.h"

#include <string>
#include <utility>

namespace cppool::client {

Json Describe(const StartFailure& failure) {
  Json json = {{"error", failure.error}, {"kind", failure.kind}};
  for (const auto& [key, text] :
       {std::pair("detail", &failure.detail), std::pair("stage", &failure.stage),
        std::pair("backend", &failure.backend), std::pair("transport", &failure.transport)})
    if (!text->empty()) json[key] = *text;
  for (const auto& [key, number] :
       {std::pair("rank", failure.rank), std::pair("world_size", failure.world_size),
        std::pair("devices", failure.devices)})
    if (number) json[key] = *number;
  return json;
}

Json Describe(const Crash& crash) {
  const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  return {{"error", crash.error},
          {"rank", crash.rank ? Json(*crash.rank) : Json()},
          {"stage", or_null(crash.stage)},
          {"case", or_null(crash.case_name)},
          {"library", or_null(crash.library)},
          {"stack", crash.stack}};
}

Json Describe(const PoolError& error) {
  Json json = {{"kind", ToString(error.kind())},
               {"error", error.what()},
               {"stderr_tail", error.stderr_tail()},
               {"diagnosis", error.diagnosis()},
               {"attempts", error.attempts()}};
  if (error.start_failure()) json["start"] = Describe(*error.start_failure());
  if (error.crash()) json["crash"] = Describe(*error.crash());
  return json;
}

Json Describe(const LostAttempt& attempt) {
  Json json = {
      {"kind", ToString(attempt.kind)}, {"error", attempt.error}, {"stderr_tail", attempt.stderr_tail}};
  if (attempt.crash) json["crash"] = Describe(*attempt.crash);
  return json;
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

std::string FlakyAt(Status status, int attempt) {
  return "flaky (" + std::string(ToString(status)) + " at attempt " + std::to_string(attempt) + ")";
}

std::string FlakyOf(int failed, int of) {
  return "flaky (failed " + std::to_string(failed) + " of " + std::to_string(of) + ")";
}

}  // namespace cppool::client
