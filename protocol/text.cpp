#include "protocol/text.h"

#include "base/nearest.h"
#include "base/utf8.h"
#include "base/words.h"

namespace cppool::protocol {
namespace {

constexpr std::size_t kMaxEcho = 80;

// Characters that a terminal acts on instead of showing them: control characters of ASCII and of C1 (U+009B
// begins a command as ESC [ does), line separators, and controls of the text's direction (Unicode UAX 9).
bool Acts(unsigned code) {
  return code < 0x20 || (code >= 0x7F && code <= 0x9F) || code == 0x61C || code == 0x200E || code == 0x200F ||
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
}

std::string HexEscape(unsigned char byte) {
  constexpr char kDigits[] = "0123456789abcdef";
  return {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
}

// Escapes as JSON does; the code point is below U+10000.
std::string UnicodeEscape(unsigned code) {
  constexpr char kDigits[] = "0123456789abcdef";
  return {
      '\\', 'u', kDigits[code >> 12], kDigits[code >> 8 & 15], kDigits[code >> 4 & 15], kDigits[code & 15]};
}

}  // namespace

std::string Echo(std::string_view bytes) {
  std::string text;
  std::size_t position = 0;
  for (std::size_t characters = 0; position < bytes.size() && characters < kMaxEcho; ++characters) {
    const std::size_t length = base::Utf8Length(bytes.substr(position));
    const auto byte = static_cast<unsigned char>(bytes[position]);
    if (byte == '\n') {
      text += "\\n";
    } else if (byte == '\r') {
      text += "\\r";
    } else if (byte == '\t') {
      text += "\\t";
    } else if (length == 0) {
      text += HexEscape(byte);
    } else if (const std::string_view sequence = bytes.substr(position, length);
               !Acts(base::CodePoint(sequence))) {
      text += sequence;
    } else {
      text += length == 1 ? HexEscape(byte) : UnicodeEscape(base::CodePoint(sequence));
    }
    position += length == 0 ? 1 : length;
  }
  if (position < bytes.size()) text += "...";
  return text;
}

std::string Quoted(std::string_view bytes) { return '"' + Echo(bytes) + '"'; }

std::string EchoValue(const Json& value) {
  if (value.is_string()) return Quoted(value.get_ref<const std::string&>());
  return Echo(JsonText(value));
}

std::string TypeName(const Json& value) {
  if (value.is_null()) return "null";
  return (value.is_structured() ? "an " : "a ") + std::string(value.type_name());
}

std::string Unknown(const std::string& what, std::string_view name, const std::vector<std::string>& known,
                    const std::string& where) {
  return "unknown " + what + " " + Quoted(name) + where + DidYouMean(name, known) +
         (known.empty() ? " (there are none)" : " (known: " + base::Join(known) + ")");
}

std::string DidYouMean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::optional<std::string> nearest = base::Nearest(word, candidates);
  return nearest ? "; did you mean " + Quoted(*nearest) + "?" : "";
}

}  // namespace cppool::protocol
