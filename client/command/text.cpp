#include "client/command/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <system_error>

#include "base/utf8.h"
#include "protocol/json_text.h"

namespace cppool::command {

namespace {

// Of `8k` 8192; nothing for other texts, and for products that do not fit in 64 bits.
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
    if (std::none_of(text.begin(), text.end(), control) && ValueFromText(text) == value &&
        SplitList(text).size() == 1)
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

namespace {

// The length of the character at the front of `text` if XML 1.0 allows it, else 0.
std::size_t XmlCharacter(std::string_view text) {
  const std::size_t length = base::Utf8Length(text);
  if (length == 0) return 0;
  const unsigned code = base::CodePoint(text.substr(0, length));
  const bool control = code < 0x20 && code != '\t' && code != '\n' && code != '\r';
  return control || code == 0xFFFE || code == 0xFFFF ? 0 : length;
}

}  // namespace

std::string XmlEscape(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    std::size_t length = XmlCharacter(text);
    switch (length == 0 ? '\0' : text[0]) {
      case '\0':
        result += '?';
        break;
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

void PrintJson(std::ostream& out, const Json& value) {
  out << protocol::JsonText(value) << "\n" << std::flush;
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string Fixed(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", digits, value);
  return buffer;
}

}  // namespace cppool::command
