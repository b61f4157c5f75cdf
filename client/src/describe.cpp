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

}  // namespace cppool::client
