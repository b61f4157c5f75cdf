// Stacks of this process's threads, which may be stuck. Each thread gets a signal, whose handler records the
// return addresses of the code that it interrupted. A thread that does not answer delays nothing.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace cppool::daemon {

// Installs the handler and loads the unwinder, which a handler cannot do. Call it early; further calls do
// nothing.
void PrepareStackSampling();

// The names of a stack's frames, innermost first: `frames` as backtrace() writes them, from the first that is
// of interest on. Without those of the daemon around the case's code. Reads files.
std::vector<std::string> NameFrames(void* const* frames, int count);

// For each thread the names of its frames, innermost first, without those of the daemon around the case's
// code. A thread without frames has one line in parentheses that says why. Waits for the threads until
// `until`, then reads names from the program's files, which has no limit. Calls of several threads take
// turns.
std::vector<std::vector<std::string>> SampleStacks(const std::vector<pid_t>& threads,
                                                   std::chrono::steady_clock::time_point until);

// The same within 0.35 s of `start`, from a thread that is left behind where the reading of files gets stuck:
// nothing then.
std::optional<std::vector<std::vector<std::string>>> SampleStacksInTime(
    const std::vector<pid_t>& threads, std::chrono::steady_clock::time_point start);

}  // namespace cppool::daemon
