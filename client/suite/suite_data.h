// The suites' files, built into the program.
#pragma once

#include <string>

namespace cppool::suite {

std::string SuiteText(const std::string& name);  // "fp8", "matrix", "own" or "smoke"; empty for another

}  // namespace cppool::suite
