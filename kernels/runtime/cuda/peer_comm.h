// How ranks of one process exchange by device copies: they meet in host memory, each with its buffers and an
// event recorded after the work that filled them. The rank that needs data copies it, in the order of its own
// stream, and records an event that the owner's stream waits for.
//
// No stream waits for work that has not been enqueued yet: streams that share a hardware queue could block
// each other for good. Instead the calls' host threads wait for each other, as in NCCL's rendezvous: send,
// recv and collectives return when the peers have made the matching calls, whether or not the work is done,
// and calls between group_start and group_end wait together. Abort ends the wait.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/group_shape.h"
#include "kernels/runtime/common/collective_call.h"
#include "kernels/runtime/common/wake_up.h"
#include "kernels/runtime/cuda/device_pool.h"

namespace cppool::kernels::cuda {

using EventRef = std::shared_ptr<CUevent_st>;

// The events of one rank that others wait for. An event is used again once no rank holds it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  ~EventPool();
  // Records an event on a stream of the rank's device. On the rank's thread; references may end on any
  // thread.
  EventRef Record(cudaStream_t stream);

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> spare_;
};

// One message: the receiver copies when it is posted, the sender leaves when it is taken.
struct PeerMessage {
  enum Phase { kOpen, kPosted, kTaken };
  std::atomic<Phase> phase{kOpen};
  const void* data = nullptr;
  std::size_t sent_bytes = 0;
  EventRef ready;  // recorded by the sender
  std::size_t received_bytes = 0;
  EventRef done;  // recorded by the receiver
};

struct PeerSide;

// One collective: the ranks post, work when all have posted, and leave when all have worked.
struct PeerMeeting {
  struct Part {
    std::atomic<bool> posted{false};
    CollectiveCall call;
    EventRef ready, halfway, done;
    // Of ring transfers: where the others' pieces and their flags go.
    std::array<std::byte*, 2> into = {};
    std::uint32_t* flags = nullptr;
    std::uint32_t pass = 0;
  };
  explicit PeerMeeting(std::size_t size) : parts(size) {}
  std::atomic<std::size_t> posted{0}, halfway{0}, done{0};
  std::vector<Part> parts;  // each is written by its rank before the rank is counted
  std::size_t joined = 0;   // under the communicator's lock

  // Every rank compares the same calls, once all have posted, so that either all of them fail or none.
  void CheckSameCall(const PeerSide& side, std::uint64_t position) const;
};

// Holds what the ranks of a group share. Any thread may use it.
class PeerComm {
 public:
  // `ranks` are the members' ranks in the world; `wake_ups` has one per rank of the world.
  PeerComm(std::vector<int> ranks, std::vector<int> devices, std::vector<WakeUp>& wake_ups);

  const std::string& name() const { return name_; }  // "the communicator of ranks 0 and 1"
  const std::vector<int>& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int WorldRank(int member) const { return ranks_[static_cast<std::size_t>(member)]; }
  int Device(int member) const { return devices_[static_cast<std::size_t>(member)]; }
  void WakeMember(int member) { wake_ups_[static_cast<std::size_t>(WorldRank(member))].Notify(); }
  void WakeAll() {
    for (int member = 0; member < size(); ++member) WakeMember(member);
  }

  // The message or collective at a position, which is the same for all its members.
  std::shared_ptr<PeerMessage> Message(int from, int to, std::uint64_t position);
  std::shared_ptr<PeerMeeting> Meeting(std::uint64_t position);
  void Reset();

 private:
  const std::vector<int> ranks_, devices_;
  const std::string name_;
  std::vector<WakeUp>& wake_ups_;
  std::mutex mutex_;
  std::map<std::tuple<int, int, std::uint64_t>, std::shared_ptr<PeerMessage>> messages_;
  std::map<std::uint64_t, std::shared_ptr<PeerMeeting>> meetings_;
};

// One rank's place in a communicator, and how many calls it has made there. A handle is the address.
struct PeerSide {
  PeerComm* comm = nullptr;
  int member = 0;
  std::uint64_t collectives = 0;
  std::vector<std::uint64_t> sends, recvs;  // by peer
};

// What a call needs from its rank.
struct PeerCaller {
  int device = 0;
  EventPool* events = nullptr;
  DevicePool* pool = nullptr;
};

// A call under way, on its rank's thread: Start() once; Work() whenever Ready(), until it returns true; and
// when all calls between group_start and group_end have done so, Leave() once CanLeave(): the stream then
// waits for the ranks that read its buffers. All but Ready(), CanLeave() and Misses() throw RuntimeError.
class PeerOp {
 public:
  explicit PeerOp(cudaStream_t stream) : stream_(stream) {}
  virtual ~PeerOp() = default;
  cudaStream_t stream() const { return stream_; }
  virtual void Start(const PeerCaller& caller, const EventRef& ready) = 0;  // `ready`: of the stream, now
  virtual bool Ready() const = 0;
  virtual bool Work() = 0;
  virtual bool CanLeave() const = 0;
  virtual void Leave() = 0;
  virtual bool Misses(int rank) const = 0;  // waits for a call that this rank (of the world) has not made
  virtual std::string ToString() const = 0;

 private:
  const cudaStream_t stream_;
};

std::unique_ptr<PeerOp> MakeSend(PeerSide& side, int peer, const void* data, std::size_t bytes,
                                 cudaStream_t stream);
std::unique_ptr<PeerOp> MakeRecv(PeerSide& side, int peer, void* data, std::size_t bytes,
                                 cudaStream_t stream);
std::unique_ptr<PeerOp> MakeCollective(PeerSide& side, const CollectiveCall& call, cudaStream_t stream);
void WaitFor(cudaStream_t stream, const EventRef& event);

}  // namespace cppool::kernels::cuda
