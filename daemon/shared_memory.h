// Names in /dev/shm.
#pragma once

#include <ctime>
#include <set>
#include <string>

namespace cppool::daemon {

// Removes those that have one of these numbers, as a whole one, in them and are not older than `since`, of
// CLOCK_REALTIME_COARSE. For ranks whose fork server, which does the same for each of its ranks, is dead:
// client/python/cppool/_ranks/__main__.py. Never throws.
void RemoveSharedMemory(const std::set<std::string>& numbers, const timespec& since);

}  // namespace cppool::daemon
