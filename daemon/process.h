// This process: its parent, its memory, the processes that it forks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>

namespace cppool::daemon {

// The parent, whose death ends the daemon; 0 when it is in another PID namespace. Throws StartError when
// CPPOOL_PARENT_PID is set and names another process than the parent: then the parent has already died, or
// there is a wrapper between the two.
pid_t ParentToWatch();

// The start of a process in the kernel's ticks since boot: field 22 of its stat. `pid`: a number, or "self".
// Empty: there is no such process.
std::string StartTime(const std::string& pid);

// 'R', 'S' and so on, as proc_pid_stat(5) has it; 'X': there is no such process.
char StateOf(pid_t pid);

// How a process ends, as wait() tells it, while the kernel still closes what it had open, or until it is
// reaped. Nothing: it does not end, the kernel does not say, or it is no child of `parent`, since its number
// has been used again.
std::optional<int> StatusOfEnding(pid_t pid, pid_t parent);

// Time since this process was created, with a resolution of 10 ms; negative: unknown.
double MillisecondsSinceSpawn();

// Fixes malloc's thresholds, so that freed memory returns to the system. By default they grow with the
// largest block freed, and every thread's arena may keep twice as much: an idle daemon would hold the memory
// of its largest case.
void KeepHeapTight();

// Resident memory, threads and open descriptors of this process. 0: unknown.
struct Usage {
  std::uint64_t resident_bytes = 0, threads = 0, fds = 0;
};
Usage OwnUsage();

// The children of a process, those that nobody has waited for, too. `pid`: as above.
std::set<int> ChildProcesses(const std::string& pid = "self");

// From here on a process that a case forks without exec, which has the daemon's descriptors and handlers and
// none of its threads, lets go of the pipes of requests and answers, so that the client sees the daemon's
// end, takes SIGTERM by its default, and is killed with the thread that forked it, at the latest when the
// daemon ends. Call it once.
void RestrainForkedChildren(int requests, int answers);

}  // namespace cppool::daemon
