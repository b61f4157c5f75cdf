// The library's parameters and options as the protocol's request.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <cppool/pool.h>
#include "protocol/request.h"

namespace cppool::client {

// Throws std::invalid_argument for options out of range and for values that JSON cannot express. Folders
// become absolute, since this process may have changed its working folder after it spawned the daemon.
protocol::RunRequest ToRequest(const Json& params, const RunOptions& options);

// The last step of ToRequest: absolute paths, and whether JSON can express it. `folder`: what they are
// relative to; empty: the working folder.
protocol::RunRequest Complete(protocol::RunRequest request, const std::string& folder = "");

// What a Result answers.
struct Asked {
  std::shared_ptr<const PoolOptions> options;
  protocol::Operation operation;
};

// Sends requests of the protocol as they are.
struct PoolAccess {
  static Result Run(Pool& pool, protocol::RunRequest request);
  static Result RunAsItIs(Pool& pool, protocol::RunRequest request);
  static Result Validate(Pool& pool, protocol::RunRequest request);
  // Likewise, and returns the answer as it is. Throws PoolError.
  static Json Ask(Pool& pool, const protocol::Operation& operation);
  // With PoolOptions::attach: whether other clients of the server wait until it is called with false. Does
  // nothing without, or when the server does not answer. Throws PoolError kInterrupted and kStart.
  static void KeepTurn(Pool& pool, bool keep);
  static bool IsUp(Pool& pool);  // its daemon lives; waits for a call of another thread
};

// The libraries of `load`. Throws std::invalid_argument for what cannot be a path.
std::vector<std::string> AbsolutePaths(const std::vector<std::string>& files, const std::string& folder = "");

}  // namespace cppool::client
