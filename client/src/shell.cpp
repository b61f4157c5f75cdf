#include "client/src/shell.h"

#include <string_view>

namespace cppool::client {

std::string ShellQuote(const std::string& word) {
  constexpr std::string_view kPlain = "_@%+=:,./-";
  bool plain = !word.empty();
  for (char c : word) {
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    plain = plain && (letter || kPlain.find(c) != std::string_view::npos);
  }
  if (plain) return word;
  std::string quoted = "'";
  for (char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string ShellCommand(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + ShellQuote(word);
  return text;
}

}  // namespace cppool::client
