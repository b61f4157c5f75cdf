#include "client/src/shell.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string_view>

#include "base/words.h"

namespace cppool::client {

std::vector<std::string> SplitFolders(const std::string& search_path) {
  std::vector<std::string> folders = base::Split(search_path, ':');
  std::erase(folders, "");
  return folders;
}

std::vector<std::string> SearchPath() {
  const char* path = getenv("PATH");
  return SplitFolders(path != nullptr ? path : "");
}

bool IsProgram(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && access(path.c_str(), X_OK) == 0;
}

std::string InPath(const std::string& program) {
  for (const std::string& folder : SearchPath())
    if (IsProgram(folder + "/" + program)) return folder + "/" + program;
  return "";
}

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
