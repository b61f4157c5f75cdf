// The start of a world on several machines: the head listens, starts the launcher, and takes the agents that
// come.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "daemon/machines/frame_socket.h"
#include "daemon/machines/launcher.h"

namespace cppool::daemon {

struct GreetedAgent {
  int index = 0;     // its ranks follow those of the agents before it
  std::string node;  // names are unique: "a", or "a:0" and "a:1"
  pid_t pid = 0;
  std::unique_ptr<FrameSocket> socket;
};

// `words`: of `--launch`. Listens until all agents are there, which are returned by index. Throws StartError
// that says who has come, and what to do; `launcher` may have been set then, too.
std::vector<GreetedAgent> GatherAgents(const std::vector<std::string>& words, int world_size,
                                       const std::string& version,
                                       std::chrono::steady_clock::time_point limit,
                                       std::atomic<Launcher*>& launcher);

// At an agent: which one it is of how many, from what the launcher has set; -1: not known.
struct AgentPlace {
  int index = -1, agents = -1;
};
AgentPlace PlaceFromEnvironment();
std::string NodeName();

}  // namespace cppool::daemon
