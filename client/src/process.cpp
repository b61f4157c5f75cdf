#include "client/src/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include "base/poll_timeout.h"

namespace cppool::client {
namespace {

constexpr std::chrono::milliseconds kReaping{100};

void Check(int error, const char* what) {
  if (error != 0) throw std::system_error(error, std::generic_category(), what);
}

// Unlike a pipe, a socket can be written without SIGPIPE, and can be shut down even when other processes hold
// copies of the descriptor.
void MakeSocket(base::UniqueFd* ours, base::UniqueFd* theirs) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) Check(errno, "socketpair");
  base::UniqueFd first(fds[0]);
  *theirs = base::AboveStandard(fds[1]);
  *ours = base::AboveStandard(first.Release());
}

}  // namespace

void MakePipe(base::UniqueFd* read_end, base::UniqueFd* write_end) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) Check(errno, "pipe2");
  base::UniqueFd first(fds[0]);
  *write_end = base::AboveStandard(fds[1]);
  *read_end = base::AboveStandard(first.Release());
  if (fcntl(read_end->get(), F_SETFL, O_NONBLOCK) != 0) Check(errno, "fcntl");
}

std::unique_ptr<Process> Process::Spawn(const base::SpawnCommand& command) {
  std::unique_ptr<Process> process(new Process);
  base::UniqueFd child_input, child_output, child_errors;
  MakeSocket(&process->input_, &child_input);
  MakePipe(&process->output_, &child_output);
  MakePipe(&process->errors_, &child_errors);

  const pid_t pid = base::Spawn(command, child_input.get(), child_output.get(), child_errors.get());
  process->pid_ = pid;
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));  // close-on-exec by itself
  // For other errors it goes on without one: the kernel has none, a filter forbids it, or the process has
  // ended.
  if (pidfd < 0 && (errno == EMFILE || errno == ENFILE)) Check(errno, "pidfd_open");
  process->pidfd_ = base::AboveStandard(pidfd);
  return process;
}

Process::~Process() {
  if (pid_ > 0 && !reaped_) Terminate(std::chrono::milliseconds(0), std::chrono::seconds(1));
}

void Process::CloseInput() {
  if (input_.get() >= 0) shutdown(input_.get(), SHUT_WR);
  input_.Reset();
}

bool Process::Ended() {
  if (end_ != End::kRunning) return true;
  siginfo_t info;
  memset(&info, 0, sizeof info);
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    if (errno == ECHILD) end_ = End::kUnknown;
  } else if (info.si_pid == pid_) {
    end_ = info.si_code == CLD_EXITED ? End::kExited : End::kSignalled;
    (end_ == End::kExited ? exit_code_ : signal_) = info.si_status;
  }
  return end_ != End::kRunning;
}

bool Process::WaitEnd(Clock::time_point until) {
  while (!Ended()) {
    if (Clock::now() >= until) return false;
    if (pidfd_.get() >= 0) {
      pollfd fd = {pidfd_.get(), POLLIN, 0};
      poll(&fd, 1, base::PollTimeout(until));  // interrupted or not: the loop checks
    } else {
      std::this_thread::sleep_for(
          std::min<Clock::duration>(until - Clock::now(), std::chrono::milliseconds(5)));
    }
  }
  return true;
}

// Until the leader is reaped, nobody else can have its number. When somebody else has reaped it, the kernel
// gives the number to another process only after the group is empty: so if no process has the number, the
// group is ours or does not exist.
bool Process::GroupIsOurs() const {
  if (end_ != End::kUnknown) return true;
  // A leader that is being reaped right now keeps its number for a moment.
  for (const auto until = Clock::now() + kReaping;;
       std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    if (kill(pid_, 0) != 0 && errno == ESRCH) return true;
    if (Clock::now() >= until) return false;
  }
}

bool Process::Terminate(std::chrono::milliseconds grace, std::chrono::milliseconds kill_limit) {
  if (reaped_) return true;
  if (!Ended()) {
    kill(-pid_, SIGTERM);
    kill(-pid_, SIGCONT);  // a stopped process takes no signal but SIGKILL before it is continued
    WaitEnd(Clock::now() + grace);
  }
  // Also when the leader has ended: others of the group may be left.
  if (GroupIsOurs()) kill(-pid_, SIGKILL);
  if (!WaitEnd(Clock::now() + kill_limit)) return false;
  if (end_ != End::kUnknown) {
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {  // does not wait: the process has ended
    }
  }
  reaped_ = true;
  return true;
}

bool Process::EndedInOrder() { return Ended() && end_ == End::kExited && exit_code_ == 0; }

bool Process::EndIsUnknown() { return Ended() && end_ == End::kUnknown; }

std::string Process::DescribeEnd() {
  if (!Ended()) return "is running";
  switch (end_) {
    case End::kExited:
      return base::DescribeExit(exit_code_);
    case End::kSignalled:
      return base::DescribeSignal(signal_);
    default:
      return "ended (how is unknown: SIGCHLD is ignored, or another part of this process waited for it)";
  }
}

void Process::Abandon() {
  reaped_ = true;  // the process belongs to the parent: never kill it here
  for (base::UniqueFd* fd : {&pidfd_, &input_, &output_, &errors_}) fd->ResetInherited();
}

}  // namespace cppool::client
