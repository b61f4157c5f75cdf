// Communicators of a host world, and the calls on them: in memory and in stream order, without locks.
//
// Every call gets a position when it is made, counted per communicator (collectives) or per channel (send and
// recv from one rank to another). The streams' threads meet at that position. A meeting orders what the call
// promises and no more: the receiver after the sender's work, the sender after its data has been taken, all
// ranks of a collective after each other's.
//
// A call that the others have accepted is finished even when the world is aborted, since they read its
// buffers.
#pragma once

#include <cppool/runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/group_shape.h"
#include "kernels/ring_transfers.h"
#include "kernels/runtime/common/collective_call.h"
#include "kernels/runtime/common/wake_up.h"
#include "kernels/runtime/host/wait.h"
#include "kernels/trace.h"

namespace cppool::kernels::host {

class Mail;

// Holds what the ranks of a group share.
class HostComm {
 public:
  // Of the group that `rank` is in. `wake_ups` has one per rank of the world. `mail`: the members' calls are
  // made by letters (letter_calls.cpp); NULL: in memory.
  HostComm(GroupShape shape, int rank, std::vector<WakeUp>& wake_ups, Mail* mail = nullptr);

  int size() const { return static_cast<int>(ranks_.size()); }
  const std::string& name() const { return name_; }  // "the communicator of ranks 0 and 1"
  int WorldRank(int member) const { return ranks_[static_cast<std::size_t>(member)]; }
  const std::vector<int>& ranks() const { return ranks_; }
  GroupShape shape() const { return shape_; }
  Mail* mail() const { return mail_; }
  // All positions start at 0 again. No call may be under way.
  void Reset();
  // Any thread: the ranks of the world that have not joined the collective at `position`; when all have,
  // those that have not left it.
  std::vector<int> Missing(std::uint64_t position) const;
  // In stream order: a member's memory may be written to in this pass (ring_transfers.h).
  void PostRing(int member, std::uint32_t pass, const std::array<std::byte*, 2>& into);

 private:
  friend class RingSendOp;
  friend class RingArrivalOp;
  friend class SendOp;
  friend class RecvOp;
  friend class CollectiveOp;

  // How many calls of a channel or communicator may be unfinished before the next one has to wait.
  static constexpr std::uint64_t kMessageSlots = 4;
  static constexpr std::uint64_t kCollectiveSlots = 8;

  // One message. `state` is 4 * position + phase: it tells whose turn it is.
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
    // How many ranks have got this far, over all uses of the slot. Only counts: the entries order memory.
    std::atomic<std::uint64_t> posted{0}, halfway{0}, left{0};
    std::vector<Entry> entries;
  };

  // A member's side of ring transfers. Nothing is written to it while another rank's piece of the pass before
  // is still to come, since its rank waits for all of them.
  struct alignas(64) RingSide {
    std::atomic<std::uint32_t> posted{0};  // the pass
    std::array<std::atomic<std::byte*>, 2> into{};
    std::vector<std::atomic<std::uint32_t>> flags = std::vector<std::atomic<std::uint32_t>>(kMostRingPieces);
  };

  MessageSlot& Message(int from, int to, std::uint64_t position) {
    const auto channel = static_cast<std::uint64_t>(from) * ranks_.size() + static_cast<std::uint64_t>(to);
    return messages_[channel * kMessageSlots + position % kMessageSlots];
  }
  void WakeMember(int member) { wake_ups_[static_cast<std::size_t>(WorldRank(member))].Notify(); }

  GroupShape shape_;
  Mail* const mail_;
  std::vector<int> ranks_;
  std::string name_;
  std::vector<WakeUp>& wake_ups_;
  std::vector<MessageSlot> messages_;
  std::vector<std::unique_ptr<CollectiveSlot>> collectives_;
  std::vector<RingSide> rings_;  // none where the members make letters
};

// A call under way, driven by the stream's thread: Step() whenever Ready(), until it returns true. A call
// whose Step throws RuntimeError is finished as well.
class CommOp {
 public:
  virtual ~CommOp() = default;
  virtual bool Ready() const = 0;  // relaxed reads only
  virtual bool Step() = 0;
  // Takes the call back; false when another rank has already accepted it, so that it must be finished.
  virtual bool Withdraw() = 0;
  // Whether it waits for a call that `rank` (of the world) has not made.
  virtual bool Misses(int rank) const = 0;
  virtual CallNote Note() const = 0;
  TraceSlice* slice = nullptr;  // in a trace
};

// One end of a message.
class MessageOp : public CommOp {
 public:
  // `peer`: the other end's number in the communicator, as `rank`.
  MessageOp(HostComm& comm, bool sends, int rank, int peer, std::uint64_t position, std::size_t bytes)
      : comm_(comm), sends_(sends), rank_(rank), peer_(peer), position_(position), bytes_(bytes) {}
  CallNote Note() const override {
    return {&comm_, sends_ ? "send to" : "recv from", peer_, position_, bytes_};
  }

 protected:
  bool IsPeer(int rank) const { return comm_.WorldRank(peer_) == rank; }  // `rank`: of the world
  void CheckBytes(std::size_t of_peer) const {
    CheckSameBytes(sends_, comm_.WorldRank(rank_), bytes_, comm_.WorldRank(peer_), of_peer);
  }

  HostComm& comm_;
  const bool sends_;
  const int rank_, peer_;
  const std::uint64_t position_;
  const std::size_t bytes_;
};

// One rank's part of a collective.
class CollectiveCommOp : public CommOp {
 public:
  CollectiveCommOp(HostComm& comm, int rank, std::uint64_t position, const CollectiveCall& call)
      : comm_(comm), rank_(rank), position_(position), call_(call) {}
  CallNote Note() const override {
    return {&comm_, NameOf(call_.what), CallNote::kNoPeer, position_, call_.bytes()};
  }

 protected:
  // A rank reduces the elements from here to the next rank's in an all_reduce.
  std::size_t ShareBegin(std::size_t member) const {
    return call_.count * member / static_cast<std::size_t>(comm_.size());
  }

  HostComm& comm_;
  const int rank_;
  const std::uint64_t position_;
  const CollectiveCall call_;
};

std::unique_ptr<CommOp> MakeSend(HostComm& comm, int rank, int peer, std::uint64_t position, const void* data,
                                 std::size_t bytes);
std::unique_ptr<CommOp> MakeRecv(HostComm& comm, int rank, int peer, std::uint64_t position, void* data,
                                 std::size_t bytes);
std::unique_ptr<CommOp> MakeCollective(HostComm& comm, int rank, std::uint64_t position,
                                       const CollectiveCall& call);
// letter_calls.cpp: the same by letters.
std::unique_ptr<CommOp> MakeLetterSend(HostComm& comm, int rank, int peer, std::uint64_t position,
                                       const void* data, std::size_t bytes);
std::unique_ptr<CommOp> MakeLetterRecv(HostComm& comm, int rank, int peer, std::uint64_t position, void* data,
                                       std::size_t bytes);
std::unique_ptr<CommOp> MakeLetterCollective(HostComm& comm, int rank, std::uint64_t position,
                                             const CollectiveCall& call);
// ring.cpp: a piece of a pass that leaves, and the wait for one that arrives. `what` lives as long as the
// case.
std::unique_ptr<CommOp> MakeRingSend(HostComm& comm, std::uint32_t pass, RingPiece piece);
std::unique_ptr<CommOp> MakeRingArrival(HostComm& comm, int member, std::uint32_t pass, std::size_t piece,
                                        int from, const char* what);

}  // namespace cppool::kernels::host
