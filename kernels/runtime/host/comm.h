// Communication between the ranks of a host world, in memory and in stream order, without locks.
//
// Every call has a position in its communicator (collectives) or channel (send and recv from one rank to
// another), given out when it is called; the streams' threads meet at that position. What the meeting orders
// is what the call promises and no more: the receiver after the sender's work, the sender after its data has
// been taken, all ranks of a collective after each other's.
//
// A call that the others have accepted is finished even when the world is aborted, since somebody is reading
// its buffers.
#pragma once

#include <cppool/runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/runtime/common/bell.h"
#include "kernels/runtime/host/memory.h"
#include "kernels/runtime/host/stream.h"
#include "kernels/error.h"

namespace cppool::kernels::host {

enum class Collective : std::uint8_t { kAllGather, kReduceScatter, kAllReduce };

// What a collective was called with. `count` is in elements of dtype (bytes of all_gather are uint8).
struct CollectiveCall {
  Collective what = Collective::kAllGather;
  cppool_dtype dtype = CPPOOL_UINT8;
  cppool_reduce reduce = CPPOOL_SUM;
  std::size_t count = 0;
  const void* in = nullptr;
  void* out = nullptr;
  bool SameAs(const CollectiveCall& other) const;  // but for the buffers
  std::string ToString() const;
};

// What the members of a group, with these ranks in the world, have called at the same position, when not all of it is the same. Who
// differs from most others is the culprit for these, where there are most others.
RuntimeError Disagreement(const std::vector<CollectiveCall>& calls, int member, const std::vector<int>& ranks,
                          std::uint64_t position, const std::string& group);

// What the ranks of a group share.
class HostComm {
 public:
  HostComm(std::string name, std::vector<int> ranks, std::vector<Bell>& bells);

  int size() const { return static_cast<int>(ranks_.size()); }
  const std::string& name() const { return name_; }
  int WorldRank(int member) const { return ranks_[static_cast<std::size_t>(member)]; }
  // All positions start at 0 again. Nothing may be under way.
  void Reset();
  // Any thread: the ranks of the world that have not come to the collective at `position`, or when all have, that
  // have not left it.
  std::vector<int> Missing(std::uint64_t position) const;

 private:
  friend class SendOp;
  friend class RecvOp;
  friend class CollectiveOp;

  // As many calls of a channel or communicator as may be unfinished before the next one has to wait.
  static constexpr std::uint64_t kMessageSlots = 4;
  static constexpr std::uint64_t kCollectiveSlots = 8;

  // One message. `state` is 4 * position + phase, so that a slot says whose turn it is.
  enum Phase : std::uint64_t { kFree = 0, kPosted = 1, kClaimed = 2, kTaken = 3 };
  struct alignas(64) MessageSlot {
    std::atomic<std::uint64_t> state{0};
    std::atomic<const void*> data{nullptr};
    std::atomic<std::size_t> sent_bytes{0};
    std::atomic<std::size_t> received_bytes{0};
  };
  // One rank's part of a collective: written by that rank. The counters hold position + 1 and are stored with
  // release.
  struct alignas(64) Entry {
    std::atomic<std::uint64_t> posted{0}, halfway{0}, left{0};
    std::atomic<Collective> what{};
    std::atomic<cppool_dtype> dtype{};
    std::atomic<cppool_reduce> reduce{};
    std::atomic<std::size_t> count{0};
    std::atomic<const void*> in{nullptr};
    std::atomic<void*> out{nullptr};
  };
  struct CollectiveSlot {
    explicit CollectiveSlot(std::size_t size) : entries(size) {}
    // How many ranks have got this far, over all uses of the slot; counts only, the entries order memory.
    std::atomic<std::uint64_t> posted{0}, halfway{0}, left{0};
    std::vector<Entry> entries;
  };

  MessageSlot& Message(int from, int to, std::uint64_t position) {
    const auto channel = static_cast<std::uint64_t>(from) * ranks_.size() + static_cast<std::uint64_t>(to);
    return messages_[channel * kMessageSlots + position % kMessageSlots];
  }
  void Ring(int member) { bells_[static_cast<std::size_t>(WorldRank(member))].Ring(); }

  std::string name_;
  std::vector<int> ranks_;
  std::vector<Bell>& bells_;  // one per rank of the world
  std::vector<MessageSlot> messages_;
  std::vector<std::unique_ptr<CollectiveSlot>> collectives_;
};

// A call under way, driven by the stream's thread: Step() whenever Ready() until it returns true. Step throws
// RuntimeError, and is then finished too.
class CommOp {
 public:
  virtual ~CommOp() = default;
  virtual bool Ready() const = 0;  // relaxed reads only
  virtual bool Step() = 0;
  // Takes the call back; false when another rank has accepted it already, and it has to be finished.
  virtual bool Withdraw() = 0;
  // Whether it waits for a call that `rank`, of the world, has not made.
  virtual bool Misses(int rank) const = 0;
  virtual CallNote Note() const = 0;
};

std::unique_ptr<CommOp> MakeSend(HostComm& comm, int rank, int peer, std::uint64_t position, const void* data,
                                 std::size_t bytes);
std::unique_ptr<CommOp> MakeRecv(HostComm& comm, int rank, int peer, std::uint64_t position, void* data,
                                 std::size_t bytes);
std::unique_ptr<CommOp> MakeCollective(HostComm& comm, int rank, std::uint64_t position,
                                       const CollectiveCall& call);

class HostRank;

// What the ranks of a backend share.
class HostWorld {
 public:
  explicit HostWorld(int size);

  int size() const { return size_; }
  MemoryGate& memory() { return memory_; }
  Bell& bell(int rank) { return bells_[static_cast<std::size_t>(rank)]; }
  // NULL when the world does not have the group. `member` is the rank's number in it.
  HostComm* Comm(cppool_group which, int rank, int* member);

  // Any thread.
  void Abort(const std::string& reason);
  bool aborted() const { return aborted_.load(std::memory_order_relaxed); }
  // Any thread: the rank has ended its case, and all of its calls are over. Who waits for one more fails.
  void Finished(int rank);
  void Unfinished(int rank) {
    finished_[static_cast<std::size_t>(rank)].store(false, std::memory_order_relaxed);
  }
  void ThrowAborted() const;
  // Forgets the abort and starts all communicators anew. Nothing may be under way.
  void Restart();
  std::uint64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }  // counts restarts

  // Runs calls together, in any order that works, on a stream's thread of `rank`. Throws when one fails, when
  // the rank has failed or when the world is aborted; no call is left under way then. `note`: the stream's.
  void Run(int rank, const Failure& failure, WaitNote& note, std::vector<std::unique_ptr<CommOp>>& ops);

 private:
  // A rank that has finished, and that one of the calls waits for; -1 when there is none.
  int FinishedWithout(const std::vector<std::unique_ptr<CommOp>>& ops) const;

  int size_;
  MemoryGate memory_;
  std::vector<Bell> bells_;
  std::vector<std::unique_ptr<HostComm>> comms_;  // the world, then pairs, then strides
  std::vector<std::atomic<bool>> finished_;       // by rank
  std::atomic<bool> aborted_{false};
  std::atomic<std::uint64_t> epoch_{0};
  mutable std::mutex reason_mutex_;  // taken only around an abort
  std::string reason_;
};

}  // namespace cppool::kernels::host
