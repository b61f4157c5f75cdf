// Commands as a POSIX shell takes them, for people to paste.
#pragma once

#include <string>
#include <vector>

namespace cppool::client {

std::string ShellQuote(const std::string& word);  // as one word
std::string ShellCommand(const std::vector<std::string>& words);

}  // namespace cppool::client
