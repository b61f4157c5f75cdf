// What the ranks of a host backend share: communicators, the memory gate, and how a case ends for all of
// them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/group_shape.h"
#include "kernels/runtime/common/group_meeting.h"
#include "kernels/runtime/common/wake_up.h"
#include "kernels/runtime/host/comm.h"
#include "kernels/runtime/host/mail.h"
#include "kernels/runtime/host/memory.h"
#include "kernels/runtime/host/stream.h"

namespace cppool::kernels::host {

class HostWorld {
 public:
  // `available` is MemoryGate's.
  explicit HostWorld(int size, std::function<std::size_t()> available = AvailableMemory);
  // The part of a world that this process has. The others are reached through `link`.
  HostWorld(const Place& place, std::unique_ptr<HostLink> link);
  ~HostWorld();

  int size() const { return size_; }
  const Place& place() const { return place_; }
  bool has_mail() const { return mail_ != nullptr; }  // all calls are letters
  MemoryGate& memory() { return memory_; }
  WakeUp& wake_up(int rank) { return wake_ups_[static_cast<std::size_t>(rank)]; }

  // On the rank's thread: the communicator that the rank is in. A shape that the world does not have yet is
  // made once all ranks have asked for it. Throws RuntimeError.
  HostComm& Comm(GroupShape shape, int rank);
  std::vector<GroupShape> Shapes() const;  // those made so far; any thread
  const GroupMeeting& meeting() const { return meeting_; }

  // May be called on any thread.
  void Abort(const std::string& reason);
  bool aborted() const { return aborted_.load(std::memory_order_relaxed); }
  // Any thread: the rank has ended its case, and all of its calls are over. Calls that wait for another one
  // fail.
  void Finished(int rank);
  // On the rank's thread. All ranks begin a case before any communicates in it.
  void BeginCase(int rank) { begun_[At(rank)].fetch_add(1, std::memory_order_relaxed); }
  void ThrowAborted() const;
  // Forgets the abort and resets all communicators. No call may be under way.
  void Restart();
  std::uint64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }  // counts restarts

  // Runs calls together, in any order that works, on a stream's thread of `rank`. Throws when one of them
  // fails, the rank has failed or the world is aborted; no call is then under way any more. `note`: the
  // stream's.
  void Run(int rank, const Failure& failure, WaitNote& note, std::vector<std::unique_ptr<CommOp>>& ops);

 private:
  static std::size_t At(int rank) { return static_cast<std::size_t>(rank); }
  void AddComms(GroupShape shape);  // comms_mutex_ held, or in the constructor
  HostWorld(const Place& place, std::function<std::size_t()> available, std::unique_ptr<HostLink> link);
  // Whether `rank` has finished the case that `waiting` has begun, or a later one.
  bool HasFinished(int rank, int waiting) const {
    return finished_[At(rank)].load(std::memory_order_relaxed) >
           begun_[At(waiting)].load(std::memory_order_relaxed);
  }
  void TakeNews(const LetterHead& head);  // of ranks of other processes
  // A rank that has finished while one of the calls waits for it; -1: there is none.
  int FinishedWithout(int rank, const std::vector<std::unique_ptr<CommOp>>& ops) const;

  const Place place_;
  const int size_;
  MemoryGate memory_;
  std::vector<WakeUp> wake_ups_;  // by rank
  // Ranks take this when they ask for a communicator for the first time, and in no call on one: it would
  // order their streams.
  mutable std::mutex comms_mutex_;
  std::map<GroupShape, std::vector<std::unique_ptr<HostComm>>> comms_;  // by GroupShape::Index
  // By rank: how many cases it has begun; and 1 more than that when it finished last, which other processes
  // hear of. A rank that finishes is thus not taken for one that has finished the next case.
  std::vector<std::atomic<std::uint64_t>> begun_, finished_;
  std::atomic<bool> aborted_{false};
  std::atomic<std::uint64_t> epoch_{0};
  GroupMeeting meeting_;
  mutable std::mutex reason_mutex_;  // taken only around an abort
  std::string reason_;
  std::unique_ptr<Mail> mail_;  // NULL: all ranks are here; the last member, since its threads use the others
};

}  // namespace cppool::kernels::host
