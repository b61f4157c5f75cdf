// What forks the fork servers of all daemons of one parent process that would import the same modules in the
// same environment. client/python/cppool/_ranks/README.md describes it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <utility>

#include "base/spawn.h"
#include "base/unique_fd.h"

namespace cppool::daemon {

// A connection to it, which becomes that of a fork server, and its pid where there was none and this process
// has started it by the command; 0: another daemon has. Throws StartError at the deadline, and
// std::system_error.
std::pair<base::UniqueFd, pid_t> JoinTemplate(const base::SpawnCommand& command,
                                              std::chrono::steady_clock::time_point deadline);

// Those that this process has started end when no daemon needs them: reaps `more` (0: none) and those of
// earlier calls that have. Thread-safe.
void ReapTemplates(pid_t more = 0);

}  // namespace cppool::daemon
