// From the reports of all ranks to one answer. Pure functions: no threads, no devices.
#pragma once

#include <string>
#include <vector>

#include "daemon/prepare.h"
#include "daemon/rank_report.h"
#include "protocol/response.h"

namespace cppool::daemon {

// `reports` are those of all ranks of the world, by rank.

// The rank whose failure explains the others; null: none has failed.
const RankReport* Cause(const std::vector<RankReport>& reports);

// After a failed check or a skipped case the world is as before. After everything else it must be probed. All
// ranks are done.
bool NeedsProbe(const std::vector<RankReport>& reports, bool aborted);

// `stopped`: by which limit sampling ended; empty: without. `unsound`: what the probe has found wrong; empty:
// nothing, or the world was not probed. The result is fatal with such a finding, and when a rank is not done.
// Of a rank that is not done, the failure and the streams are used, but no results, as they may be half of
// them.
protocol::RunResult Judge(const PreparedRun& run, const std::vector<RankReport>& reports,
                          const std::string& stopped, const std::string& unsound);

}  // namespace cppool::daemon
