// Builds examples outside of the project: installs this build into a new prefix, configures and builds what
// it has in examples/. Once per process.
#pragma once

#include <string>

namespace cppool::test {

struct UserCase {
  std::string daemon;   // cppoold of the prefix
  std::string library;  // the case of daemon/examples/all_reduce
};

// The kernels of kernels/examples.
struct UserKernels {
  std::string daemon;                  // cppoold of the prefix
  std::string command;                 // cppool of the prefix
  std::string naive;                   // plain C, on the host
  std::string forward, with_backward;  // CUDA; there are no such files where there is no nvcc
};

// Why they cannot be built on this machine, to which the build folder may have been moved; empty if it can.
std::string UserCaseNeeds();

// Throws std::runtime_error with the output of the command that failed.
const UserCase& BuildUserCase();
const UserKernels& BuildUserKernels();

}  // namespace cppool::test
