// The user's case, built outside of the project: installs the build into a fresh prefix, configures, builds. Once per process.
#pragma once

#include <string>

namespace cppool::test {

struct UserCase {
  std::string daemon;   // cppoold of the prefix
  std::string library;  // the case
};

// Why it cannot be built on this machine, to which the build folder may have been moved; empty when it can.
std::string UserCaseNeeds();

// Throws std::runtime_error with the log of what went wrong.
const UserCase& BuildUserCase();

}  // namespace cppool::test
