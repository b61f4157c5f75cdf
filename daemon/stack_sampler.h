// Where threads of this process are, while they may be stuck: each is sent a signal, whose handler notes the return addresses of what
// it interrupted. Nothing waits for a thread that does not answer.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace cppool::daemon {

// To be called early: installs the handler, and loads the unwinder, which a handler cannot. Once is enough.
void PrepareStackSampling();

// For each thread its frames as text, innermost first, without the machinery around the case's code; a thread that gave none has one
// line in parentheses that says why. The signals are answered until `until`; names are looked up in the files of the program after
// that, which takes as long as the disk does. One call at a time; the others wait.
std::vector<std::vector<std::string>> SampleStacks(const std::vector<pid_t>& threads,
                                                   std::chrono::steady_clock::time_point until);

}  // namespace cppool::daemon
