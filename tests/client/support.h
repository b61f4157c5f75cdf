// Shared by the client's tests: options for the fake daemon with short limits, and checks that a Pool leaves
// nothing behind.
#pragma once

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

#include <cppool/pool.h>

#include "tests/catch.h"
#include "tests/files.h"
#include "tests/sanitized.h"

namespace cppool::test {

using namespace std::chrono_literals;

inline cppool::PoolOptions FakeOptions(const std::string& start = "") {
  cppool::PoolOptions options;
  options.daemon = CPPOOL_FAKE_DAEMON;
  options.start_limit = 60s;
  options.grace = 200ms;
  options.kill_grace = 300ms;
  if (!start.empty()) options.arguments = {"--start", start};
  return options;
}

inline cppool::Json Do(const std::string& what) { return {{"do", what}}; }

inline cppool::RunOptions Within(std::chrono::milliseconds deadline) {
  cppool::RunOptions options;
  options.deadline = deadline;
  return options;
}

inline int GroupOf(cppool::Pool& pool) { return pool.Run(Do("echo")).json["surroundings"]["group"]; }

inline std::size_t CountLines(const std::string& file) { return Lines(ReadFile(file)).size(); }

inline int CountFds() {
  int count = -1;  // without the one that reads the folder
  DIR* folder = opendir("/proc/self/fd");
  while (dirent* entry = readdir(folder))
    if (entry->d_name[0] != '.') ++count;
  closedir(folder);
  return count;
}

// Waits for at most 60 s, a backstop against hanging.
inline bool Eventually(const std::function<bool()>& holds) {
  const auto limit = std::chrono::steady_clock::now() + 60s;
  for (; std::chrono::steady_clock::now() < limit; std::this_thread::sleep_for(5ms))
    if (holds()) return true;
  return false;
}

// State and group of a process, from /proc/PID/stat; {' ', 0} when there is none.
struct ProcessState {
  char state = ' ';
  int group = 0;
};
inline ProcessState StateOf(const std::string& pid) {
  const std::string text = ReadFile("/proc/" + pid + "/stat");
  ProcessState result;
  std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return result;
  int parent = 0;
  std::istringstream(text.substr(name_end + 1)) >> result.state >> parent >> result.group;
  return result;
}

inline bool Alive(int pid) {  // a zombie is not
  const char state = StateOf(std::to_string(pid)).state;
  return state != ' ' && state != 'Z' && state != 'X';
}

inline bool GroupGone(int group) {  // zombies count as gone: init reaps those of grandchildren
  bool gone = true;
  DIR* folder = opendir("/proc");
  while (dirent* entry = readdir(folder)) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    ProcessState process = StateOf(entry->d_name);
    if (process.group == group && process.state != 'Z' && process.state != 'X') gone = false;
  }
  closedir(folder);
  return gone;
}

inline bool NoChildren() { return waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD; }

// Runs `body`, and checks that it leaves no child, no zombie and no further descriptor.
inline void LeavesNothing(const std::function<void()>& body) {
  int before = CountFds();
  body();
  CHECK(CountFds() == before);
  CHECK(NoChildren());
}

// Runs `body` in a forked child while the test goes on, until AwaitForked. The allocators of the sanitizers
// do not support a fork while other threads allocate.
inline pid_t Fork(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  alarm(50);
  int code = 99;
  try {
    code = body();
  } catch (const std::exception& error) {
    std::string text = std::string(error.what()) + "\n";
    if (write(2, text.data(), text.size()) < 0) code = 98;
  }
  _exit(code);
}

// Its exit code, or minus the signal that ended it.
inline int AwaitForked(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

inline int InChild(const std::function<int()>& body) { return AwaitForked(Fork(body)); }

}  // namespace cppool::test
