// What both sides know of a daemon's start.
#pragma once

#include <string_view>

namespace cppool::protocol {

inline constexpr int kMaxWorldSize = 64;

// On the stderr of a daemon that cannot start, which ends with exit code 2: a world with more ranks than devices. A suite
// skips such cells, as the machine cannot run them.
inline constexpr std::string_view kTooFewDevices = "needs as many devices, and CUDA sees";

}  // namespace cppool::protocol
