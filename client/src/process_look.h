// What /proc tells of a process that does not answer: who runs, who waits and where in the kernel, who uses processors.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "client/src/process.h"

namespace cppool::client {

struct ThreadLook {
  int id = 0;
  std::string name;
  char state = '?';        // as proc(5) has it
  std::string waits_in;    // the kernel's function; empty: it does not wait, or the kernel does not say
  double cpu_seconds = 0;  // used so far
};

struct ProcessLook {
  Clock::time_point when;
  std::vector<ThreadLook> threads;  // the first one first; empty: there is no such process, or no /proc
};

// Takes milliseconds: a bounded number of threads is looked at, and nothing is read that can wait for the process.
ProcessLook LookAtProcess(pid_t pid);

// "; it was stopped; its threads: ...", of bounded length; "" when there is nothing to tell. What was used of processors is the
// difference from `before`, which may be empty.
std::string Describe(const ProcessLook& before, const ProcessLook& now);

}  // namespace cppool::client
