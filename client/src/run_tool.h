// Runs a compiler, which does not outlive this process.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace cppool::client {

struct ToolEnd {
  bool well = false;   // exit code 0
  std::string output;  // the first MiB that it wrote to stdout and stderr
  std::string how;     // "exited with code 1"
};

// Runs a program, `words[0]` with its path, and waits until it has ended; a process that it leaves in the
// background is killed. Its temporary files are in `folder`, unless that is empty; the caller removes it.
// When this process dies meanwhile, in whatever way, the program is killed, too, and the folder is removed.
// The exit code is known also where SIGCHLD is ignored or another part of this process waits for all
// children. Throws CompileError after `limit`, and when `interrupted`, which may be empty, says so; the
// program is killed.
ToolEnd RunTool(const std::vector<std::string>& words, const std::string& folder,
                std::chrono::milliseconds limit, const std::function<bool()>& interrupted);

}  // namespace cppool::client
