// The state of a process that does not answer, from /proc: for every thread whether it runs or where it
// waits, and its CPU time.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "client/src/process.h"

namespace cppool::client {

struct ThreadState {
  int id = 0;
  std::string name;
  char state = '?';        // a letter of proc(5)
  std::string waits_in;    // the kernel's function; empty: not waiting, or unknown
  double cpu_seconds = 0;  // since the thread's start
};

struct ProcessState {
  Clock::time_point when;
  std::vector<ThreadState> threads;  // the main thread first; empty: no such process, or no /proc
};

// Takes milliseconds: it reads a bounded number of threads, and nothing whose reading could wait for the
// process.
ProcessState ReadProcessState(pid_t pid);

// "; it was stopped; its threads: ...", of bounded length; "" without threads. CPU times are the differences
// from `before`, which may be empty.
std::string Describe(const ProcessState& before, const ProcessState& now);

}  // namespace cppool::client
