#include "base/utf8.h"

namespace cppool::base {

std::size_t Utf8Length(std::string_view bytes) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  if (bytes.empty()) return 0;
  const unsigned char lead = at(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                             : lead >= 0xE0 && lead <= 0xEF ? 3
                             : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                            : 0;
  if (length == 0 || bytes.size() < length) return 0;
  // The second byte's range is what excludes overlong forms, surrogates and code points past U+10FFFF.
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (at(1) < low || at(1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (at(i) < 0x80 || at(i) > 0xBF) return 0;
  }
  return length;
}

unsigned CodePoint(std::string_view sequence) {
  const auto lead = static_cast<unsigned char>(sequence[0]);
  if (sequence.size() == 1) return lead;
  unsigned code = lead & (0xFFu >> (sequence.size() + 1));
  for (const char next : sequence.substr(1)) code = code << 6 | (static_cast<unsigned char>(next) & 0x3F);
  return code;
}

std::size_t ValidUtf8Prefix(std::string_view bytes) {
  std::size_t position = 0;
  while (position < bytes.size()) {
    const std::size_t length = Utf8Length(bytes.substr(position));
    if (length == 0) break;
    position += length;
  }
  return position;
}

}  // namespace cppool::base
