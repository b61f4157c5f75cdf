// The file of model tables, built into the program.
#pragma once

#include <string>

namespace cppool::protocol {

std::string ModelText(const std::string& name);  // "models"; empty for another name

}  // namespace cppool::protocol
