// A child process in a process group of its own, whose three standard streams are descriptors of this
// process. No thread, no signal handler; every wait has a limit. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>

#include "base/spawn.h"
#include "base/unique_fd.h"
#include "client/src/peer.h"

namespace cppool::client {

// A pipe whose read end is non-blocking; close-on-exec, and never on 0, 1 or 2. Throws std::system_error.
void MakePipe(base::UniqueFd* read_end, base::UniqueFd* write_end);

class Process : public Peer {
 public:
  // As base::Spawn.
  static std::unique_ptr<Process> Spawn(const base::SpawnCommand& command);

  ~Process() override;  // kills the group at once, unless Terminate has ended it

  pid_t pid() const override { return pid_; }
  int pidfd() const override { return pidfd_.get(); }
  // What the process writes to its stdin can be read from the socket.
  int input() const override { return input_.get(); }
  int output() const override { return output_.get(); }
  base::UniqueFd TakeErrors() override { return std::move(errors_); }

  void CloseInput() override;  // also when a forked child of this process holds a copy of the descriptor

  bool Ended() override;  // does not reap
  bool WaitEnd(Clock::time_point until) override;
  // SIGTERM to the group, waits `grace`, SIGKILL to the group, waits at most `kill_limit`, reaps.
  bool Terminate(std::chrono::milliseconds grace, std::chrono::milliseconds kill_limit) override;
  std::string DescribeEnd() override;  // also "was killed by signal 11 (Segmentation fault)"
  bool EndedInOrder() override;        // with exit code 0
  bool EndIsUnknown() override;        // its exit status went to somebody else (SIGCHLD ignored, wait(-1))
  void Abandon() override;

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
