// What a head knows of an agent: its node, its ranks, and the frames from it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/machines/gather.h"
#include "daemon/rank_threads.h"
#include "kernels/backend.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

class AgentLink {
 public:
  using Clock = std::chrono::steady_clock;
  using Json = protocol::Json;
  struct Events {
    // Once, any thread, before others see it.
    std::function<void(const AgentLink& agent, const std::string& why)> gone;
    std::function<void(const std::string& text)> write;  // to the channel of answers: for faults
    std::function<void(const Json& news)> tell;          // what one of its ranks tells the other agents
  };

  AgentLink(GreetedAgent agent, const kernels::Place& place, Events events);
  ~AgentLink();
  AgentLink(const AgentLink&) = delete;
  AgentLink& operator=(const AgentLink&) = delete;

  const std::string& node() const { return agent_.node; }
  pid_t pid() const { return agent_.pid; }
  const kernels::Place& place() const { return place_; }
  RankThreads& threads() { return threads_; }  // a thread of the head stands for each of its ranks
  std::string Name() const;                    // "node a (ranks 0 and 1)"

  // Any thread, all of these. False: it has gone.
  bool Send(const Json& frame) { return agent_.socket->Send(frame); }
  // Sends the frame, and returns the answer to it. Nothing: it has gone, or `until` has come.
  std::optional<Json> Ask(Json frame, Clock::time_point until);
  // The next frame of its start. Nothing: likewise, or it cannot start.
  std::optional<Json> NextOfStart(Clock::time_point until);
  std::optional<Json> Unstarted() const;  // why it cannot: the frame `unstarted`
  // From now on frames of ranks are those of this run; what others have sent is dropped.
  void BeginRun(std::uint64_t run);
  // The next frame of the rank. Nothing: it has gone.
  std::optional<Json> NextOf(int rank);
  // From now on frames of Python ranks are handed to this function and to no other, and NULL when the agent
  // has gone; on the reading thread.
  void Follow(std::function<void(Json* frame)> follow);
  // Why it has gone, for people; empty: it has not.
  std::string Gone() const;
  // What its crash reporter has said before: the frame `crash`.
  std::optional<Json> Crash() const;
  void Shut() { agent_.socket->Shut(); }

 private:
  void Take(Json frame);
  void BeGone(const std::string& why);
  bool Wait(std::unique_lock<std::mutex>& lock, Clock::time_point until, const std::function<bool()>& ready);

  const kernels::Place place_;
  const Events events_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t asked_ = 0, run_ = 0;
  std::map<std::uint64_t, Json> answers_;  // by number; null: not there yet
  std::deque<Json> start_;
  std::vector<std::deque<Json>> of_rank_;
  std::optional<Json> crash_, unstarted_;
  std::string gone_;
  std::mutex following_;  // held while the next one is called
  std::function<void(Json*)> follow_;
  const GreetedAgent agent_;  // its socket's threads use all above until they have ended
  RankThreads threads_;       // these, too, and the socket
};

}  // namespace cppool::daemon
