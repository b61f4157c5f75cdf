// Runs shell command lines and returns their exit code and output.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <stdexcept>
#include <string>

namespace cppool::test {

struct Child {
  int exit_code = -1;  // minus the number of the signal that ended it
  std::string output;  // stdout and stderr
};

// Starts a command line that runs while the test goes on, until FinishChild.
inline FILE* StartChild(const std::string& command_line) {
  FILE* child = popen(("{ " + command_line + "\n} 2>&1").c_str(), "r");
  if (!child) throw std::runtime_error("popen failed");
  return child;
}

inline Child FinishChild(FILE* running) {
  Child child;
  char buffer[4096];
  while (const std::size_t n = fread(buffer, 1, sizeof(buffer), running)) child.output.append(buffer, n);
  const int status = pclose(running);
  child.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return child;
}

inline Child RunChild(const std::string& command_line) { return FinishChild(StartChild(command_line)); }

}  // namespace cppool::test
