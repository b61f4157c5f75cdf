// The process on a node: `cppoold --agent HOST:PORT`, which the launcher starts. It runs the ranks of its
// place in the world as the head says, and ends when the head has gone.
#pragma once

#include <string>

#include "daemon/case_registry.h"

namespace cppool::daemon {

// Returns the exit code. Throws StartError: there is no head that it may speak to. `registry` has the cases
// that are built in.
int RunAgent(const std::string& head, CaseRegistry& registry);

}  // namespace cppool::daemon
