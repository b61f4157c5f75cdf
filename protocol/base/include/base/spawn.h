// A program in a process of its own, started from a process that may have threads, a CUDA context and
// signal handlers.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace cppool::base {

struct SpawnCommand {
  std::string path;
  std::vector<std::string> arguments;    // without argv[0], which is the path
  std::vector<std::string> environment;  // "NAME=value", replacing or adding to the caller's
  bool own_group = true;                 // else it is in the caller's
};

// Starts it by posix_spawn with an empty signal mask, default dispositions, and no descriptor but these three
// as 0, 1 and 2. Returns its pid; the caller waits for it. Throws std::system_error.
pid_t Spawn(const SpawnCommand& command, int input, int output, int errors);

// For people: "exited with code 5", "was killed by signal 11 (Segmentation fault)".
std::string DescribeExit(int code);
std::string DescribeSignal(int signal);
std::string DescribeStatus(int status);  // as waitpid has it

}  // namespace cppool::base
