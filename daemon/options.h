// The command line of cppoold.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/world.h"
#include "protocol/kernel_choice.h"

namespace cppool::daemon {

struct Options {
  int world_size = 1;
  BackendChoice backend = BackendChoice::kAuto;
  kernels::Transport transport = kernels::Transport::kAuto;
  std::string sentinel;
  std::vector<std::string> case_files;
  protocol::KernelChoice kernels;     // what requests that name none run on
  std::optional<std::string> python;  // ranks are its processes; empty text: the one that FindPython takes
  std::vector<std::string> preload;   // modules
  std::optional<std::string> launch;  // words of a launcher: the ranks are those of agents that it starts
  std::string agent;  // HOST:PORT of a head: the process is an agent, and has no other options
  std::string log_level;
  bool allow_faults = false;
  double idle_exit_s = 0;  // the daemon ends after so many seconds without a request; 0: never
};

// What the command line asks for: to run with these options, or to print a text and end.
struct ParsedOptions {
  std::optional<Options> options;
  // Without options: help or version for stdout (exit_code 0), or what is wrong for stderr (2).
  std::string text;
  int exit_code = 0;
};

// The project's version and the commit, where it is known: "0.1.0+6985ccd0a1b2".
std::string Version();

// What --version prints: the version, and the file of the CUDA module or why it cannot be used.
std::string DescribeInstallation();

// The words of the command line.
const char* NameOf(BackendChoice backend);
const char* NameOf(kernels::Transport transport);

ParsedOptions ParseOptions(int argc, const char* const* argv);

}  // namespace cppool::daemon
