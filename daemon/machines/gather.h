// The start of a world on several machines: the head listens, starts the launcher, and takes the agents that
// come.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
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

// Starts the launcher with the words of an agent and variables ("NAME=value"). Throws StartError.
using Launch = std::function<Launcher&(const std::vector<std::string>& agent,
                                       const std::vector<std::string>& environment)>;

// Launches, and listens until all agents are there, which are returned by index. Throws StartError that says
// who has come, and what to do.
std::vector<GreetedAgent> GatherAgents(const Launch& launch, int world_size, const std::string& version,
                                       std::chrono::steady_clock::time_point limit);

// At an agent: which one it is of how many, from what the launcher has set; -1: not known.
struct AgentPlace {
  int index = -1, agents = -1;
};
AgentPlace PlaceFromEnvironment();
std::string NodeName();

}  // namespace cppool::daemon
