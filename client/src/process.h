// A child process in a process group of its own, whose three standard streams are descriptors of this
// process. No thread, no signal handler; every wait has a limit. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace cppool::client {

using Clock = std::chrono::steady_clock;

// Milliseconds for poll(2) until `until`, rounded up; 0 when it has passed.
int PollTimeout(Clock::time_point until);

// A pipe whose read end is non-blocking; close-on-exec, and never on 0, 1 or 2. Throws std::system_error.
void MakePipe(base::UniqueFd* read_end, base::UniqueFd* write_end);

class Process {
 public:
  struct Command {
    std::string path;
    std::vector<std::string> arguments;    // without argv[0], which is the path
    std::vector<std::string> environment;  // "NAME=value", replacing or adding to the caller's
  };

  // The child has an empty signal mask, default dispositions and no descriptor but 0, 1 and 2.
  // Throws std::system_error.
  static std::unique_ptr<Process> Spawn(const Command& command);

  ~Process();  // kills the group at once, unless Terminate has ended it
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable when the process has ended; -1 on kernels without it
  // Returns a socket to its stdin: send(2) with MSG_NOSIGNAL raises no SIGPIPE. What it writes to its stdin
  // can be read from it.
  int input() const { return input_.get(); }
  int output() const { return output_.get(); }                // its stdout, non-blocking
  base::UniqueFd TakeErrors() { return std::move(errors_); }  // its stderr, non-blocking

  // End of file on its stdin, also when a forked child of this process holds a copy of the descriptor.
  void CloseInput();

  bool Ended();                           // does not wait, and does not reap
  bool WaitEnd(Clock::time_point until);  // false: it runs on
  // SIGTERM to the group, waits `grace`, SIGKILL to the group, waits at most `kill_limit`, reaps.
  // False: it has not ended; may be called again.
  bool Terminate(std::chrono::milliseconds grace, std::chrono::milliseconds kill_limit);
  std::string DescribeEnd();  // "exited with code 3", "was killed by signal 11 (Segmentation fault)"
  bool EndedInOrder();        // with exit code 0
  bool EndIsUnknown();        // ended, and its exit status went to somebody else (SIGCHLD ignored, wait(-1))

  // In a forked child of the process that spawned it: closes the copies of the descriptors and does nothing
  // else.
  void Abandon();

 private:
  Process() = default;
  enum class End { kRunning, kExited, kSignalled, kUnknown };

  bool GroupIsOurs() const;  // after Ended(); false: the group's number may belong to another process now

  pid_t pid_ = -1;
  base::UniqueFd pidfd_, input_, output_, errors_;
  End end_ = End::kRunning;
  int exit_code_ = 0;
  int signal_ = 0;
  bool reaped_ = false;
};

}  // namespace cppool::client
