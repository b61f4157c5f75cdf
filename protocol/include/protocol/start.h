// What a daemon that cannot start says on stderr, as far as programs read it. It ends with exit code 2.
#pragma once

#include <string_view>

namespace cppool::protocol {

// In the message of a world with more ranks than devices: a suite skips such cells, as the machine cannot run them.
inline constexpr std::string_view kTooFewDevices = "needs as many devices, and CUDA sees";

}  // namespace cppool::protocol
