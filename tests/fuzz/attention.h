// Requests as far as the daemon takes them without a world: what it would run, or why it does not.
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

// Requires of a refusal that it is the request's fault and has a proper text, and of what would run that it has all
// parameters.
Prepared Prepare(const protocol::RunRequest& request, int world_size);

}  // namespace cppool::fuzz
