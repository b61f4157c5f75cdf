// The shell commands that repeat runs.
#pragma once

#include <string>
#include <vector>

#include <cppool/pool.h>

#include "client/suite/cell.h"
#include "protocol/request.h"

namespace cppool::suite {

// Returns whether options of `cppool run` say all of it: no member that has none differs from its default,
// and the daemon has no arguments but --allow-faults, which --fault gives it.
bool HasOptions(const PoolOptions& pool, const RunOptions& run);

// Returns the options of `cppool run` that choose the daemon and say how a case runs, where they are not the
// defaults. `libraries`: of --load. `defaults`: of the subcommand.
std::vector<std::string> OptionWords(const PoolOptions& pool, const std::vector<std::string>& libraries,
                                     const RunOptions& run, const RunOptions& defaults = {});

// Returns the shell command that runs a cell again: "cppool run --world-size 2 ... --param key=value ...".
// `program`: how this program was called. `common`: the options of all cells. `subcommand`: "run", or "bench"
// to time it.
std::string RepeatCommand(const std::string& program, const Cell& cell,
                          const std::vector<std::string>& common, const std::string& subcommand = "run");

// Returns the one that sends this request to a pool with these options.
std::string RepeatCommand(const PoolOptions& options, const protocol::RunRequest& request);

// Sends the requests to one daemon as they are, for what `cppool run` does not take.
std::string PipeCommand(PoolOptions options, const std::vector<protocol::Request>& requests);

// "env NAME=value " with each variable that the pool adds to the caller's, to begin a command; empty where it
// adds none. A shell would not take all names without `env`.
std::string Assignments(const PoolOptions& options);

}  // namespace cppool::suite
