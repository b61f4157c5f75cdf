// What the lines for programs on a daemon's stderr (start.h, crash.h) have in common.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <string>

#include "protocol/failure.h"

namespace cppool::protocol {

// The first `length` bytes of `text`, or less: not in the middle of a UTF-8 character.
inline std::string Cut(const std::string& text, std::size_t length) {
  if (text.size() <= length) return text;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  return text.substr(0, length) + "...";
}

// False: the member is there and has another type.
inline bool ReadText(const Json& json, const char* name, std::string& out) {
  const auto found = json.find(name);
  if (found == json.end()) return true;
  if (!found->is_string()) return false;
  out = found->get<std::string>();
  return true;
}

inline bool ReadNumber(const Json& json, const char* name, std::optional<int>& out) {
  const auto found = json.find(name);
  if (found == json.end()) return true;
  if (!found->is_number_integer()) return false;
  const double value = found->get<double>();
  if (value < 0 || value > std::numeric_limits<int>::max()) return false;
  out = found->get<int>();
  return true;
}

}  // namespace cppool::protocol
