#include "client/command/text.h"

#include <cmath>
#include <cstdio>

#include "base/utf8.h"
#include "protocol/json_text.h"

namespace cppool::command {

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
