// Header-only.
#pragma once

#include <sstream>
#include <stdexcept>
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

// The words of a command as a shell takes them, with quotes and backslashes and without any expansion.
// Throws std::invalid_argument: a quote is not closed.
inline std::vector<std::string> SplitCommand(const std::string& text) {
  std::vector<std::string> words;
  char quote = 0;
  bool in_word = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool space = c == ' ' || c == '\t' || c == '\n';
    if (quote == 0 && space) {
      in_word = false;
      continue;
    }
    if (!in_word) words.emplace_back();
    in_word = true;
    const char next = i + 1 < text.size() ? text[i + 1] : 0;
    if (quote != 0 && c == quote) {
      quote = 0;
    } else if (quote == 0 && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == '\\' && next != 0 && (quote == 0 || (quote == '"' && (next == '"' || next == '\\')))) {
      words.back() += next;
      ++i;
    } else {
      words.back() += c;
    }
  }
  if (quote != 0) throw std::invalid_argument(std::string("a ") + quote + " is not closed: " + text);
  return words;
}

}  // namespace cppool::base
