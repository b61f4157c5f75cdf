// `features` of the answer to `hello`: what a daemon can do beyond the first protocol 1. Clients and daemons of different versions
// compare these names and not versions. A name is never taken away or given another meaning; clients accept names that they do not
// know. A new feature gets its line here, and protocol_minor is raised (request.h).
#pragma once

#include <string_view>

namespace cppool::protocol {

struct Feature {
  std::string_view name;
  std::string_view meaning;
};

inline constexpr std::string_view kFaultFeature = "fault";  // only of a daemon that was started for it

inline constexpr Feature kFeatures[] = {
    {"validate", "op `validate`: whether a `run` would run"},
    {"perturb", "key `perturb` of `run`: random delays at every mark"},
    {"dump", "key `dump` of `run`: tensors are written to a folder, by cases that can"},
    {"inputs", "key `inputs` of `run`: tensors are read from a folder, by cases that can"},
    {kFaultFeature, "key `fault` of `run`: the daemon was started with --allow-faults"},
    {"ratio", "member `ratio` of `checks`: our largest error over that of plain attention"},
    {"stack", "member `stack` of `ranks` after a passed deadline: where the rank's threads are"},
    {"idle_exit", "option --idle-exit: the daemon ends after a time without requests"},
    {"a2a_size", "parameter `a2a_size` of the case `attention`"},
    {"kernels", "key `kernels` of `run`: whose attention kernels, of a library too (cppool/attention.h)"},
    {"load", "key `load` of `run`, `validate` and `list`: libraries with cases, for this request"},
    {"digests", "key `digests` of `run`: which content of the libraries that it names is meant"},
    {"crash_line", "a daemon that a crash ends writes a line for programs to its stderr (crash.h)"},
    {"samples", "member `samples` of `ranks`, with `repeat`: the time of every timed iteration"},
    {"sampling", "key `sampling` of `run`: iterations until the medians are precise enough"},
    {"waits", "key `waits` of `run`: stages for what the main stream waits for"},
    {"profile", "key `profile` of `run`: the timed iterations are the range of a profiler"},
    {"trace", "key `trace` of `run`: a timeline of the run is written to a file"},
    {"inapplicable", "`failure.kind` `inapplicable`, with `skipped`: impossible in a world of this size"},
    {"warnings", "member `warnings` of the answer to `run`"},
    {"leaks", "member `leaks` of the answer to `run`: what the case has left behind"},
    {"fp8", "parameters `scaling_mode`, `fp8_dpa`, `fp8_mha`, `fp8_bwd` and `f16_O` of the case `attention`"},
    {"start_line", "a daemon that cannot start ends its stderr with a line for programs (start.h)"},
};

}  // namespace cppool::protocol
