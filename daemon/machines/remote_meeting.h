// Where the ranks of an agent meet all others: at the head, which is asked for each step.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "daemon/machines/frame_socket.h"
#include "daemon/meeting.h"
#include "daemon/rank_threads.h"
#include "kernels/backend.h"

namespace cppool::daemon {

// Called on the ranks' threads, which wait as long as the head lives: without it the process ends.
class RemoteMeeting : public Meeting {
 public:
  // All outlive it.
  RemoteMeeting(FrameSocket& head, const RankThreads& threads, const kernels::Place& place,
                std::uint64_t run);

  void Take(const protocol::Json& met);  // a frame of the head; on the reading thread

  bool Begin(int rank, bool clean) override;
  std::optional<Obstacle> FirstIteration(int rank) override;
  std::vector<int> NotReady() const override { return {}; }  // the head knows
  bool MayBegin(std::int64_t index) override;
  std::int64_t StartSampling() override;
  std::int64_t NextDecision(const kernels::StageSamples& samples) override;
  void Profile(bool begin) override;
  FailureTime Failed() override;
  void Leave(int rank, cppool_status status) override;

 private:
  protocol::Json Ask(protocol::Json frame) const;  // of the calling thread's rank

  FrameSocket& head_;
  const std::vector<pid_t> threads_;  // by rank of the place
  const kernels::Place place_;
  const std::uint64_t run_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable std::vector<std::optional<protocol::Json>> results_;  // by rank of the place
};

}  // namespace cppool::daemon
