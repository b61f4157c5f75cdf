// NCCL's settings in the environment.
#pragma once

#include <map>
#include <string>

namespace cppool::base {

// The variables NCCL_* of this process, by name.
std::map<std::string, std::string> NcclSettings();

}  // namespace cppool::base
