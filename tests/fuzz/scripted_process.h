// Replaces client/src/process.cpp and stderr_tail.cpp when it is linked first: a Pool then starts no process,
// and gets answers that were set before.
#pragma once

#include <string_view>

namespace cppool::fuzz {

// Sets the answers of each process that is spawned from now on: to its first request, and to its second,
// after which its stdout ends. The texts are not copied and must outlive the processes.
void SetAnswers(std::string_view first, std::string_view second);

}  // namespace cppool::fuzz
