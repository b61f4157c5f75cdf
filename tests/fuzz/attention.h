// Prepares requests as the daemon does, without a world: gives the run, or why it is refused.
#pragma once

#include <memory>
#include <string>

#include "daemon/prepare.h"

namespace cppool::fuzz {

const daemon::CaseRegistry& Registry();  // with the attention case

struct Prepared {
  std::shared_ptr<const daemon::PreparedRun> run;  // null: refused
  std::string refusal;
};

// Requires that a refusal is for an invalid or unsupported request and has a valid text, and that an accepted
// run has all parameters.
Prepared Prepare(const protocol::RunRequest& request, int world_size);

}  // namespace cppool::fuzz
