// The program that starts agents on the nodes, such as srun or mpirun: a child of the head.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace cppool::daemon {

// Returns the words of `--launch`, split by base::SplitCommand. Throws StartError: a quote is open, or there
// are none.
std::vector<std::string> SplitWords(const std::string& text);

// `cppoold --exec-launcher WORDS...`: becomes that program, which gets SIGTERM when the head dies. Returns
// only when it cannot.
inline constexpr const char* kExecLauncher = "--exec-launcher";
int ExecLauncher(char** words);

class Launcher {  // never destroyed
 public:
  using Clock = std::chrono::steady_clock;

  // Starts it without a shell, in a process group of its own, with `environment` ("NAME=value") beside this
  // process's. What it writes to stdout goes to stderr. Its words end with `agent`. From now on this process
  // adopts what it leaves behind, and reaps it: it must wait for no other children of its own. Throws
  // StartError.
  Launcher(const std::vector<std::string>& words, const std::vector<std::string>& agent,
           const std::vector<std::string>& environment);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  const std::string& name() const { return name_; }  // "srun"
  pid_t pid() const { return pid_; }
  // Any thread. How it has ended, for people; nothing: it has not by `limit`.
  std::optional<std::string> Ended(Clock::time_point limit);
  // Any thread. Waits for it to end by itself until `limit`; then SIGTERM, and Kill after `termination`. A
  // client sends the head SIGKILL 5 s after SIGTERM.
  void End(Clock::time_point limit, std::chrono::milliseconds termination = std::chrono::seconds(3));
  // Any thread. SIGKILL for what is left of it: its process group, and what this process has adopted.
  void Kill();

 private:
  void Reap();  // on a thread of its own

  const std::string name_;
  pid_t pid_ = -1;
  base::UniqueFd process_;  // a pidfd
  std::mutex mutex_;        // held to reap: a child's pid is not another process's then
  std::optional<std::string> ended_;
};

}  // namespace cppool::daemon
