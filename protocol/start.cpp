#include "protocol/start.h"

#include "protocol/json_lines.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::protocol {
namespace {

std::string Line(const StartFailure& failure, std::size_t longest_text) {
  Json json = {{"error", Cut(failure.error, longest_text)}, {"kind", Cut(failure.kind, longest_text)}};
  const auto add_text = [&](const char* name, const std::string& text) {
    if (!text.empty()) json[name] = Cut(text, longest_text);
  };
  const auto add_number = [&](const char* name, const std::optional<int>& number) {
    if (number) json[name] = *number;
  };
  add_text("detail", failure.detail);
  add_text("stage", failure.stage);
  add_text("backend", failure.backend);
  add_text("transport", failure.transport);
  add_number("rank", failure.rank);
  add_number("world_size", failure.world_size);
  add_number("devices", failure.devices);
  return std::string(kStartPrefix) + json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string SerializeStart(const StartFailure& failure) {
  // Escapes and replacements make a text longer than its bytes.
  std::string line;
  for (std::size_t longest = kMaxStartLine / 2; line.empty() || line.size() > kMaxStartLine; longest /= 2)
    line = Line(failure, longest);
  return line;
}

std::optional<StartFailure> ParseStart(std::string_view line) {
  if (line.substr(0, kStartPrefix.size()) != kStartPrefix) return std::nullopt;
  StartFailure failure;
  try {
    const Json json = ParseJson(line.substr(kStartPrefix.size()));
    if (!json.is_object() || !json.contains("error") || !json.contains("kind")) return std::nullopt;
    for (const auto& [name, text] :
         {std::pair("error", &failure.error), std::pair("kind", &failure.kind),
          std::pair("detail", &failure.detail), std::pair("stage", &failure.stage),
          std::pair("backend", &failure.backend), std::pair("transport", &failure.transport)})
      if (!ReadText(json, name, *text)) return std::nullopt;
    for (const auto& [name, number] :
         {std::pair("rank", &failure.rank), std::pair("world_size", &failure.world_size),
          std::pair("devices", &failure.devices)})
      if (!ReadNumber(json, name, *number)) return std::nullopt;
  } catch (const InvalidRequest&) {
    return std::nullopt;
  }
  return failure;
}

}  // namespace cppool::protocol
