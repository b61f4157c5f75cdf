// What this process can learn about itself and its parent.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace cppool::daemon {

// The parent whose death ends the daemon; 0 when it cannot be seen from here (another PID namespace). When CPPOOL_PARENT_PID is set
// and the parent is no longer that process, it has died before the daemon could look: throws StartError.
pid_t ParentToWatch();

// From the process's creation to now, in steps of 10 ms; negative when unknown.
double MillisecondsSinceSpawn();

// Makes the heap give back what is freed. By default its thresholds follow the largest block ever freed, and every
// thread's arena keeps up to twice as much: idle, a daemon would hold what its largest case left.
void KeepHeapTight();

// What the process holds of the machine: memory that is resident, threads, descriptors. 0: unknown.
struct Usage {
  std::uint64_t resident_bytes = 0, threads = 0, fds = 0;
};
Usage OwnUsage();

}  // namespace cppool::daemon
