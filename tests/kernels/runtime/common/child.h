// Runs a command line and gives back its exit code and what it printed.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <stdexcept>
#include <string>

namespace cppool::test {

struct Child {
  int exit_code = -1;  // -1: it was killed
  std::string output;  // stdout and stderr
};

inline Child RunChild(const std::string& command_line) {
  FILE* pipe = popen((command_line + " 2>&1").c_str(), "r");
  if (!pipe) throw std::runtime_error("popen failed");
  Child child;
  char buffer[4096];
  while (const std::size_t n = fread(buffer, 1, sizeof(buffer), pipe)) child.output.append(buffer, n);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) child.exit_code = WEXITSTATUS(status);
  return child;
}

}  // namespace cppool::test
