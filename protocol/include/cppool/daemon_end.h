// What a daemon that ends says on its stderr, for programs. The protocol writes and reads it as lines:
// protocol/README.md.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace cppool {

// Why a daemon could not start, from the line for programs at the end of its stderr. What it does not say is
// empty or absent.
struct StartFailure {
  std::string error;   // for people
  std::string kind;    // as Failure has it
  std::string detail;  // what happened, without advice
  std::string stage;   // "arguments", "process", "backend", "cases", "ranks"
  std::optional<int> rank;
  std::optional<int> world_size;
  // How many CUDA sees; with kind "unsupported" and less than world_size: too many ranks.
  std::optional<int> devices;
  std::string backend, transport;
};

// Where a daemon was when a case or a library ended it, from a line for programs on its stderr. What is not
// known is empty or absent.
struct Crash {
  std::string error;  // for people
  std::optional<int> rank;
  std::string stage;  // the last mark that the rank had come to
  std::string case_name;
  std::string library;             // the file whose code it was, or that the case is from; empty: built in
  std::vector<std::string> stack;  // the thread's functions, innermost first
};

}  // namespace cppool
