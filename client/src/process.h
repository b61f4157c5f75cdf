// A child process in a process group of its own, with its three standard streams on descriptors of ours.
// Passive: no thread, no signal handler; every wait has a time at which it gives up. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "posix/unique_fd.h"

namespace cppool::client {

using Clock = std::chrono::steady_clock;

// Milliseconds for poll(2) until `until`, rounded up; 0 when it has passed.
int PollTimeout(Clock::time_point until);

// A pipe whose read end is non-blocking; close-on-exec, and never on 0, 1 or 2. Throws std::system_error.
void MakePipe(posix::UniqueFd* read_end, posix::UniqueFd* write_end);

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

  ~Process();  // kills the group, without a grace, if that has not been done
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable when the process has ended; -1 on kernels without it
  // A socket to its stdin: send(2) with MSG_NOSIGNAL raises no SIGPIPE.
  int input() const { return input_.get(); }
  int output() const { return output_.get(); }          // its stdout, non-blocking
  posix::UniqueFd TakeErrors() { return std::move(errors_); }  // its stderr, non-blocking

  // End of file on its stdin, also when a fork of ours holds a copy of the descriptor.
  void CloseInput();

  bool Ended();                           // a look; the process stays to be reaped
  bool WaitEnd(Clock::time_point until);  // false: it runs on
  // SIGTERM to the group, `grace`, SIGKILL to the group, at most `kill_limit`, and reaped.
  // False: even that did not end it; may be tried again.
  bool Terminate(std::chrono::milliseconds grace, std::chrono::milliseconds kill_limit);
  std::string DescribeEnd();  // "exited with code 3", "was killed by signal 11 (Segmentation fault)"
  bool EndedInOrder();        // with exit code 0
  bool EndIsUnknown();        // ended, and somebody else has learnt how (SIGCHLD ignored, wait(-1))

  // In a forked child of the spawner: closes the copies of the descriptors, touches nothing else.
  void Abandon();

 private:
  Process() = default;
  enum class End { kRunning, kExited, kSignalled, kUnknown };

  bool GroupIsOurs() const;  // as of the last look; false: the number has gone to somebody else

  pid_t pid_ = -1;
  posix::UniqueFd pidfd_, input_, output_, errors_;
  End end_ = End::kRunning;
  int exit_code_ = 0;
  int signal_ = 0;
  bool reaped_ = false;
};

}  // namespace cppool::client
