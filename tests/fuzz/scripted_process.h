// The client without processes: linked instead of client/src/process.cpp and stderr_tail.cpp, so that a Pool talks to
// a "daemon" whose answers are written beforehand.
#pragma once

#include <string_view>

namespace cppool::fuzz {

// What each process that is spawned from now on says to its first request, and to its second, after which its stdout
// ends. Referred to, not copied.
void SetAnswers(std::string_view first, std::string_view second);

}  // namespace cppool::fuzz
