// The client without processes: linked instead of client/src/process.cpp and stderr_tail.cpp, so that a Pool talks to
// a "daemon" whose whole stdout is written beforehand.
#pragma once

#include <string_view>

namespace cppool::fuzz {

// What each process that is spawned from now on says, before it ends. Referred to, not copied.
void SetOutput(std::string_view bytes);

}  // namespace cppool::fuzz
