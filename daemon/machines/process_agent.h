// Ranks of an agent that are Python processes: what the head says to them and they to it goes through here.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "daemon/fork_server.h"
#include "daemon/machines/frame_socket.h"
#include "daemon/world.h"
#include "kernels/backend.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

class ProcessAgent {
 public:
  // On the main thread, before it starts others. `head` outlives it. `node`: the number of the agent.
  ProcessAgent(FrameSocket& head, const kernels::Place& place, int node, BackendChoice backend);

  // On the main thread, with which fork servers die: adds members to the answer to `server`, `fork` or
  // `check`. Throws StartError.
  void Do(const protocol::Json& job, protocol::Json& answer);
  // On the reading thread: `to_rank`, `kill` or `look`. False: another frame.
  bool Take(const protocol::Json& frame);
  void Close();  // ends all ranks, and what they have started

 private:
  struct World;  // its ranks, which threads of their own serve until they have ended
  void Start(const protocol::Json& job, protocol::Json& answer);
  void Fork(const protocol::Json& job, protocol::Json& answer);

  FrameSocket& head_;
  const kernels::Place place_;
  const int node_;
  const BackendChoice backend_;
  std::mutex mutex_;
  std::shared_ptr<ForkServer> server_;  // under `mutex_`, as the next one
  std::shared_ptr<World> world_;        // the latest
};

}  // namespace cppool::daemon
