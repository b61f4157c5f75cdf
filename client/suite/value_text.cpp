#include "client/suite/value_text.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <system_error>

#include "protocol/json_text.h"

namespace cppool::suite {

namespace {

// Reads `8k` as 8192; nothing for other texts, and for products that do not fit in 64 bits.
std::optional<std::int64_t> Kibi(const std::string& text) {
  std::int64_t number = 0;
  const char* const k = text.data() + text.size() - 1;
  if (text.size() < 2 || *k != 'k') return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), k, number);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 1024;
  if (error != std::errc() || end != k || number < -kMost || number > kMost) return std::nullopt;
  return number * 1024;
}

}  // namespace

Json ValueFromText(const std::string& text) {
  if (const auto kibi = Kibi(text)) return *kibi;
  Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return value.is_discarded() ? Json(text) : value;
}

std::vector<Json> ValuesFromText(const std::string& text, const std::string& option) {
  const std::vector<std::string> items = SplitList(text);
  std::vector<Json> values;
  for (const std::string& item : items) {
    if (item.empty() && items.size() > 1)
      throw UsageError(option + ": a value of the list '" + text +
                       "' is empty (an empty text is \"\"; quotes around a text keep its commas)");
    values.push_back(ValueFromText(item));
  }
  return values;
}

std::string TextFromValue(const Json& value) {
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20; };
  if (value.is_string()) {
    auto text = value.get<std::string>();
    if (std::ranges::none_of(text, control) && ValueFromText(text) == value && SplitList(text).size() == 1)
      return text;
  }
  return protocol::JsonText(value);
}

std::pair<std::string, std::string> SplitAssignment(const std::string& text, const std::string& option) {
  std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    throw UsageError(option + " takes key=value, not '" + text + "'");
  return {text.substr(0, equals), text.substr(equals + 1)};
}

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> items(1);
  int depth = 0;
  bool quoted = false, escaped = false;
  for (char c : text) {
    if (c == '"' && !escaped) quoted = !quoted;
    escaped = quoted && c == '\\' && !escaped;
    if (!quoted && (c == '[' || c == '{')) ++depth;
    if (!quoted && (c == ']' || c == '}')) --depth;
    if (c == ',' && depth == 0 && !quoted)
      items.emplace_back();
    else
      items.back() += c;
  }
  return items;
}

}  // namespace cppool::suite
