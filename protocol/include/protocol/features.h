// `features` of the answer to `hello`: what a daemon can do beyond the first protocol 1. Clients and daemons
// of different versions compare these names and not versions. A name is never taken away or given another
// meaning; clients accept names that they do not know. protocol/README.md says what each one means. A new
// feature gets its name there and here, and protocol_minor is raised (request.h). The members of `run` that
// came after protocol 1.0 are features, too: run_record.h has their names.
#pragma once

#include <string_view>

namespace cppool::protocol {

inline constexpr std::string_view kFeatures[] = {
    "validate", "ratio",        "stack",    "idle_exit", "a2a_size", "crash_line",
    "samples",  "inapplicable", "warnings", "leaks",     "fp8",      "start_line",
    "cancel",   "status",       "worst",    "transfers", "launches",
};

}  // namespace cppool::protocol
