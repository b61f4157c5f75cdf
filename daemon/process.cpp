#include "daemon/process.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>

#include "daemon/start_error.h"

namespace cppool::daemon {

pid_t ParentToWatch() {
  const pid_t parent = getppid();
  if (const char* expected = std::getenv("CPPOOL_PARENT_PID")) {
    pid_t pid = 0;
    const auto [end, error] = std::from_chars(expected, expected + std::strlen(expected), pid);
    if (error != std::errc() || *end != '\0')
      throw StartError("CPPOOL_PARENT_PID='" + std::string(expected) + "' is not a process id");
    const bool lives = pid > 0 && (kill(pid, 0) == 0 || errno == EPERM);
    if (pid != parent && lives) {
      throw StartError("the parent is " + std::to_string(parent) + ", not " + std::string(expected) +
                       ", which started this (CPPOOL_PARENT_PID): exec cppoold from a wrapper, or unset "
                       "CPPOOL_PARENT_PID there; or it has ended and is not reaped");
    }
    if (pid != parent)
      throw StartError("the parent process " + std::string(expected) + " is gone (CPPOOL_PARENT_PID)",
                       protocol::FailureKind::kInternal);
  }
  return parent;
}

namespace {

// A field of a process's stat, by its number in proc_pid_stat(5), from 3 on. Empty: there is no such process.
std::string FieldOf(const std::string& stat, int number) {
  std::istringstream fields(stat.substr(stat.rfind(')') + 1));  // the name before it may hold spaces
  std::string field;
  for (int i = 3; i <= number; ++i) fields >> field;
  return fields ? field : "";
}

std::string StatOf(const std::string& pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + pid + "/stat"), stat);
  return stat;
}

}  // namespace

std::string StartTime(const std::string& pid) { return FieldOf(StatOf(pid), 22); }

char StateOf(pid_t pid) {
  const std::string state = FieldOf(StatOf(std::to_string(pid)), 3);
  return state.empty() ? 'X' : state[0];
}

std::optional<int> StatusOfEnding(pid_t pid, pid_t parent) {
  constexpr unsigned long kExiting = 4;  // PF_EXITING of the kernel
  const std::string stat = StatOf(std::to_string(pid));
  const bool ending = FieldOf(stat, 4) == std::to_string(parent) &&
                      (std::strtoul(FieldOf(stat, 9).c_str(), nullptr, 10) & kExiting) != 0;
  const int status = ending ? std::atoi(FieldOf(stat, 52).c_str()) : 0;  // 0 also for who may not know
  return status == 0 ? std::nullopt : std::optional(status);
}

double MillisecondsSinceSpawn() {
  const std::string start = StartTime("self");
  timespec now{};
  if (start.empty() || clock_gettime(CLOCK_BOOTTIME, &now) != 0) return -1;
  const double ticks = std::strtod(start.c_str(), nullptr);
  const double started = ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  const double ms =
      (static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 - started) * 1000;
  return ms < 0 ? 0 : ms;
}

void KeepHeapTight() {
  constexpr int kThreshold = 128 << 10;  // malloc's initial value; setting it stops its growth
  mallopt(M_MMAP_THRESHOLD, kThreshold);
  mallopt(M_TRIM_THRESHOLD, kThreshold);
}

Usage OwnUsage() {
  Usage usage;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream fields(line);
    std::string key;
    std::uint64_t value = 0;
    if (!(fields >> key >> value)) continue;
    if (key == "VmRSS:") usage.resident_bytes = value * 1024;
    if (key == "Threads:") usage.threads = value;
  }
  status.close();  // it must not be counted below
  std::error_code error;
  const std::filesystem::directory_iterator folder("/proc/self/fd", error);
  if (!error)
    usage.fds = static_cast<std::uint64_t>(std::distance(begin(folder), end(folder))) - 1;  // its own
  return usage;
}

namespace {

int requests_fd = -1, answers_fd = -1;
thread_local pid_t forking = 0;  // the process that forks

// In the child, before fork() returns there.
void Restrain() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != forking) _exit(0);  // it has ended before
  close(requests_fd);
  close(answers_fd);
  std::signal(SIGTERM, SIG_DFL);  // the daemon's handler would end the daemon
}

}  // namespace

std::set<int> ChildProcesses(const std::string& pid) {
  std::set<int> children;
  std::error_code none;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + pid + "/task", none)) {
    std::ifstream file(thread.path() / "children");
    for (int child = 0; file >> child;) children.insert(child);
  }
  return children;
}

void RestrainForkedChildren(int requests, int answers) {
  requests_fd = requests;
  answers_fd = answers;
  pthread_atfork([] { forking = getpid(); }, nullptr, Restrain);
}

}  // namespace cppool::daemon
