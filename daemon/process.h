// Facts about this process and its parent.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace cppool::daemon {

// The parent, whose death ends the daemon; 0 when it is in another PID namespace. Throws StartError when CPPOOL_PARENT_PID is set
// and names another process than the parent: then the parent has already died, or there is a wrapper between the two.
pid_t ParentToWatch();

// Time since the process was created, with a resolution of 10 ms; negative: unknown.
double MillisecondsSinceSpawn();

// Fixes malloc's thresholds, so that freed memory returns to the system. By default they grow with the largest block freed, and
// every thread's arena may keep twice as much: an idle daemon would hold the memory of its largest case.
void KeepHeapTight();

// Resident memory, threads and open descriptors of this process. 0: unknown.
struct Usage {
  std::uint64_t resident_bytes = 0, threads = 0, fds = 0;
};
Usage OwnUsage();

}  // namespace cppool::daemon
