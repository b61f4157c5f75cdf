// The folders in which programs are searched.
#pragma once

#include <string>
#include <vector>

namespace cppool::client {

std::vector<std::string> SearchPath();  // the folders of PATH
bool IsProgram(const std::string& path);

}  // namespace cppool::client
