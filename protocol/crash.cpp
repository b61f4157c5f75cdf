#include "protocol/crash.h"

#include <algorithm>

#include "protocol/json_lines.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::protocol {
namespace {

std::string Line(const Crash& crash, std::size_t longest_text, std::size_t frames) {
  Json json = {{"error", Cut(crash.error, longest_text)}};
  const auto add = [&](const char* name, const std::string& text) {
    if (!text.empty()) json[name] = Cut(text, longest_text);
  };
  add("stage", crash.stage);
  add("case", crash.case_name);
  add("library", crash.library);
  if (crash.rank) json["rank"] = *crash.rank;
  for (std::size_t i = 0; i < std::min(frames, crash.stack.size()); ++i)
    json["stack"].push_back(Cut(crash.stack[i], longest_text));
  return std::string(kCrashPrefix) + json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string SerializeCrash(const Crash& crash) {
  std::string line;
  std::size_t longest = kMaxCrashLine / 2, frames = std::max<std::size_t>(crash.stack.size(), 1);
  while (line.empty() || line.size() > kMaxCrashLine) {
    line = Line(crash, longest, frames);
    if (frames > 4)
      frames -= 1 + frames / 8;
    else
      longest /= 2;
  }
  return line;
}

std::optional<Crash> ParseCrash(std::string_view line) {
  if (line.substr(0, kCrashPrefix.size()) != kCrashPrefix) return std::nullopt;
  Crash crash;
  try {
    const Json json = ParseJson(line.substr(kCrashPrefix.size()));
    if (!json.is_object() || !json.contains("error")) return std::nullopt;
    for (const auto& [name, text] :
         {std::pair("error", &crash.error), std::pair("stage", &crash.stage),
          std::pair("case", &crash.case_name), std::pair("library", &crash.library)})
      if (!ReadText(json, name, *text)) return std::nullopt;
    if (!ReadNumber(json, "rank", crash.rank)) return std::nullopt;
    if (const auto stack = json.find("stack"); stack != json.end()) {
      if (!stack->is_array()) return std::nullopt;
      for (const Json& frame : *stack) {
        if (!frame.is_string()) return std::nullopt;
        crash.stack.push_back(frame.get<std::string>());
      }
    }
  } catch (const InvalidRequest&) {
    return std::nullopt;
  }
  return crash;
}

}  // namespace cppool::protocol
