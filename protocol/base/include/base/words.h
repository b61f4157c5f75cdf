// Header-only.
#pragma once

#include <sstream>
#include <string>
#include <vector>

namespace cppool::base {

// The pieces between separators; the text's own end is one, so that "a\nb\n" has two lines.
inline std::vector<std::string> Split(const std::string& text, char separator) {
  std::istringstream in(text);
  std::vector<std::string> pieces;
  for (std::string piece; std::getline(in, piece, separator);) pieces.push_back(piece);
  return pieces;
}

inline std::string Join(const std::vector<std::string>& words, const std::string& separator = ", ") {
  std::string text;
  for (const std::string& word : words) text += (&word == &words.front() ? "" : separator) + word;
  return text;
}

}  // namespace cppool::base
