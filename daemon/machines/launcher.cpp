#include "daemon/machines/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/poll_timeout.h"
#include "base/spawn.h"
#include "base/words.h"
#include "daemon/process.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

bool IsProgram(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

void CheckProgram(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    if (!IsProgram(name)) throw StartError("--launch: " + name + " is no program");
    return;
  }
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (IsProgram((folder.empty() ? "." : folder) + "/" + name)) return;
  throw StartError("--launch: there is no program " + name + " on PATH");
}

}  // namespace

std::vector<std::string> SplitWords(const std::string& text) try {
  std::vector<std::string> words = base::SplitCommand(text);
  if (!words.empty()) return words;
  throw StartError(
      "--launch is empty: give the launcher, such as --launch \"srun -N 2 --ntasks-per-node=1\"");
} catch (const std::invalid_argument& error) {
  throw StartError(std::string("--launch: ") + error.what());
}

int ExecLauncher(char** words) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (const char* const head = std::getenv("CPPOOL_HEAD_PID"); !head || std::atoi(head) != getppid())
    return 1;
  unsetenv("CPPOOL_HEAD_PID");
  execvp(words[0], words);
  std::fprintf(stderr, "cppoold: the launcher %s cannot be started: %s\n", words[0], std::strerror(errno));
  return 127;
}

Launcher::Launcher(const std::vector<std::string>& words, const std::vector<std::string>& agent,
                   const std::vector<std::string>& environment)
    : name_(words.front().substr(words.front().rfind('/') + 1)) {
  CheckProgram(words.front());
  base::SpawnCommand command;
  command.path = "/proc/self/exe";
  command.arguments = {kExecLauncher};
  command.arguments.insert(command.arguments.end(), words.begin(), words.end());
  command.arguments.insert(command.arguments.end(), agent.begin(), agent.end());
  command.environment = environment;
  command.environment.push_back("CPPOOL_HEAD_PID=" + std::to_string(getpid()));
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const base::UniqueFd none(open("/dev/null", O_RDONLY | O_CLOEXEC));
  try {
    pid_ = base::Spawn(command, none.get(), STDERR_FILENO, STDERR_FILENO);
  } catch (const std::system_error& error) {
    throw StartError(std::string("--launch: ") + error.what(), protocol::FailureKind::kInternal);
  }
  process_ = base::UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  std::thread([this] { Reap(); }).detach();
}

// Until no child is left, and with that nobody who could leave one.
void Launcher::Reap() {
  pthread_setname_np(pthread_self(), "launcher");
  for (;;) {
    siginfo_t ended{};
    if (waitid(P_ALL, 0, &ended, WEXITED | WNOWAIT) != 0) {
      if (errno == EINTR) continue;
      return;
    }
    if (ended.si_pid == pid_) Ended(Clock::now());  // keeps how
    const std::lock_guard lock(mutex_);
    waitpid(ended.si_pid, nullptr, WNOHANG);
  }
}

std::optional<std::string> Launcher::Ended(Clock::time_point limit) {
  pollfd ended = {process_.get(), POLLIN, 0};
  if (process_) poll(&ended, 1, base::PollTimeout(limit));
  const std::lock_guard lock(mutex_);
  int status = 0;
  if (!ended_ && waitpid(pid_, &status, WNOHANG) == pid_) ended_ = base::DescribeStatus(status);
  return ended_;
}

void Launcher::End(Clock::time_point limit, std::chrono::milliseconds termination) {
  if (!Ended(limit)) {
    kill(-pid_, SIGTERM);
    kill(-pid_, SIGCONT);  // what is stopped takes it then
    Ended(Clock::now() + termination);
  }
  Kill();
}

void Launcher::Kill() {
  kill(-pid_, SIGKILL);  // stopped processes, too
  const auto limit = Clock::now() + std::chrono::seconds(1);
  Ended(limit);
  // Each that ends leaves its own children to this process.
  for (bool left = true; left && Clock::now() < limit;) {
    {
      const std::lock_guard lock(mutex_);
      const std::set<int> children = ChildProcesses();
      left = !children.empty();
      for (const int child : children) {
        kill(child, SIGKILL);
        waitpid(child, nullptr, WNOHANG);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace cppool::daemon
