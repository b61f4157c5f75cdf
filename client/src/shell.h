// Finds programs as a POSIX shell does, and writes commands as it takes them, for people to paste.
#pragma once

#include <string>
#include <vector>

namespace cppool::client {

// Returns the folders of a search path: "/a::/b" has two.
std::vector<std::string> SplitFolders(const std::string& search_path);
std::vector<std::string> SearchPath();  // the folders of PATH
bool IsProgram(const std::string& path);
std::string InPath(const std::string& program);  // its path; empty: it is not in PATH

std::string ShellQuote(const std::string& word);  // as one word
std::string ShellCommand(const std::vector<std::string>& words);

}  // namespace cppool::client
