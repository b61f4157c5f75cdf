// The lines for programs on a daemon's stderr: start.h and crash.h.
#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "protocol/crash.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"
#include "protocol/run_record.h"
#include "protocol/start.h"

namespace cppool::protocol {
namespace {

// The first `length` bytes of `text`, or less: not in the middle of a UTF-8 character.
std::string Cut(const std::string& text, std::size_t length) {
  if (text.size() <= length) return text;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  return text.substr(0, length) + "...";
}

void CutTexts(Json& json, std::size_t length) {
  if (json.is_string()) json = Cut(json.get<std::string>(), length);
  if (json.is_structured())
    for (Json& part : json) CutTexts(part, length);
}

std::string Line(std::string_view prefix, Json json, std::size_t longest_text) {
  CutTexts(json, longest_text);
  return std::string(prefix) + JsonText(json) + "\n";
}

constexpr std::tuple kStartMembers(
    std::pair("error", &StartFailure::error), std::pair("kind", &StartFailure::kind),
    std::pair("detail", &StartFailure::detail), std::pair("stage", &StartFailure::stage),
    std::pair("rank", &StartFailure::rank), std::pair("world_size", &StartFailure::world_size),
    std::pair("backend", &StartFailure::backend), std::pair("transport", &StartFailure::transport),
    std::pair("devices", &StartFailure::devices));

constexpr std::tuple kCrashMembers(std::pair("error", &Crash::error), std::pair("rank", &Crash::rank),
                                   std::pair("stage", &Crash::stage), std::pair("case", &Crash::case_name),
                                   std::pair("library", &Crash::library), std::pair("stack", &Crash::stack));

template <typename Record, typename Table>
void AddMembers(const Record& record, const Table& table, Json& json) {
  ForEach(table, [&](const auto& member) {
    const auto& value = record.*member.second;
    if constexpr (requires { value.empty(); }) {
      if (!value.empty()) json[member.first] = value;
    } else if (value) {
      json[member.first] = *value;
    }
  });
}

// These return false for a value of another type.
bool Read(const Json& json, std::string& out) {
  if (!json.is_string()) return false;
  out = json.get<std::string>();
  return true;
}

bool Read(const Json& json, std::optional<int>& out) {
  if (!json.is_number_integer()) return false;
  const double value = json.get<double>();
  if (value < 0 || value > std::numeric_limits<int>::max()) return false;
  out = json.get<int>();
  return true;
}

bool Read(const Json& json, std::vector<std::string>& out) {
  return json.is_array() &&
         std::ranges::all_of(json, [&](const Json& text) { return Read(text, out.emplace_back()); });
}

// `required`: the members that a line always has.
template <typename Record, typename Table>
std::optional<Record> Parse(std::string_view line, std::string_view prefix, const Table& table,
                            std::initializer_list<const char*> required) {
  if (line.substr(0, prefix.size()) != prefix) return std::nullopt;
  Record record;
  try {
    const Json json = ParseJson(line.substr(prefix.size()));
    bool valid = json.is_object();
    for (const char* name : required) valid = valid && json.contains(name);
    ForEach(table, [&](const auto& member) {
      if (!valid) return;
      if (const auto found = json.find(member.first); found != json.end())
        valid = Read(*found, record.*member.second);
    });
    if (!valid) return std::nullopt;
  } catch (const InvalidRequest&) {
    return std::nullopt;
  }
  return record;
}

}  // namespace

Json ToJson(const StartFailure& failure) {
  Json json = {{"error", failure.error}, {"kind", failure.kind}};
  AddMembers(failure, kStartMembers, json);
  return json;
}

std::string SerializeStart(const StartFailure& failure) {
  const Json json = ToJson(failure);
  // Escapes and replacements make a text longer than its bytes.
  std::string line;
  for (std::size_t longest = kMaxStartLine / 2; line.empty() || line.size() > kMaxStartLine; longest /= 2)
    line = Line(kStartPrefix, json, longest);
  return line;
}

std::optional<StartFailure> ParseStart(std::string_view line) {
  return Parse<StartFailure>(line, kStartPrefix, kStartMembers, {"error", "kind"});
}

Json ToJson(const Crash& crash) {
  Json json = {{"error", crash.error}};
  AddMembers(crash, kCrashMembers, json);
  return json;
}

std::string SerializeCrash(const Crash& crash) {
  Crash shorter = crash;
  std::string line;
  std::size_t longest = kMaxCrashLine / 2;
  while (line.empty() || line.size() > kMaxCrashLine) {
    line = Line(kCrashPrefix, ToJson(shorter), longest);
    if (const std::size_t frames = shorter.stack.size(); frames > 4)
      shorter.stack.resize(frames - 1 - frames / 8);
    else
      longest /= 2;
  }
  return line;
}

std::optional<Crash> ParseCrash(std::string_view line) {
  return Parse<Crash>(line, kCrashPrefix, kCrashMembers, {"error"});
}

}  // namespace cppool::protocol
