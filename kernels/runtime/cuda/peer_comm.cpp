#include "kernels/runtime/cuda/peer_comm.h"

#include <algorithm>
#include <utility>

#include "kernels/error.h"
#include "kernels/runtime/common/dtype.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/reduce.h"

namespace cppool::kernels::cuda {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{4} << 20;  // how much of one rank's part is fetched at a time
constexpr std::size_t kShareUnit = 16;                     // elements: shares begin on 16 bytes or more

void CopyFrom(const void* from, int from_device, void* to, int to_device, std::size_t bytes,
              cudaStream_t stream) {
  if (bytes && from != to)
    CheckCuda(cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream), "copying from a peer");
}

// One end of a message.
class MessageOp : public PeerOp {
 public:
  MessageOp(PeerSide& side, bool sends, int peer, std::size_t bytes, cudaStream_t stream)
      : PeerOp(stream), side_(side), sends_(sends), peer_(peer), bytes_(bytes) {}
  std::string ToString() const override {
    return (sends_ ? "send of " : "recv of ") + std::to_string(bytes_) + " bytes " +
           (sends_ ? "to rank " : "from rank ") + std::to_string(side_.comm->WorldRank(peer_));
  }

 protected:
  bool IsIn(PeerMessage::Phase phase) const {
    return message_->phase.load(std::memory_order_acquire) == phase;
  }
  void CheckBytes(std::size_t of_peer) const {
    CheckSameBytes(sends_, side_.comm->WorldRank(side_.member), bytes_, side_.comm->WorldRank(peer_),
                   of_peer);
  }

  PeerSide& side_;
  const bool sends_;
  const int peer_;
  const std::size_t bytes_;
  std::shared_ptr<PeerMessage> message_;
};

class SendOp final : public MessageOp {
 public:
  SendOp(PeerSide& side, int peer, const void* data, std::size_t bytes, cudaStream_t stream)
      : MessageOp(side, true, peer, bytes, stream), data_(data) {}

  void Start(const PeerCaller&, const EventRef& ready) override {
    message_ = side_.comm->Message(side_.member, peer_, side_.sends[static_cast<std::size_t>(peer_)]++);
    message_->data = data_;
    message_->sent_bytes = bytes_;
    message_->ready = ready;
    message_->phase.store(PeerMessage::kPosted, std::memory_order_release);
    side_.comm->WakeMember(peer_);
  }
  bool Ready() const override { return true; }
  bool Work() override { return true; }
  bool CanLeave() const override { return IsIn(PeerMessage::kTaken); }
  void Leave() override {
    CheckBytes(message_->received_bytes);
    WaitFor(stream(), message_->done);
  }
  bool Misses(int rank) const override { return side_.comm->WorldRank(peer_) == rank && !CanLeave(); }

 private:
  const void* const data_;
};

class RecvOp final : public MessageOp {
 public:
  RecvOp(PeerSide& side, int peer, void* data, std::size_t bytes, cudaStream_t stream)
      : MessageOp(side, false, peer, bytes, stream), data_(data) {}

  void Start(const PeerCaller& caller, const EventRef&) override {
    caller_ = caller;
    message_ = side_.comm->Message(peer_, side_.member, side_.recvs[static_cast<std::size_t>(peer_)]++);
  }
  bool Ready() const override { return IsIn(PeerMessage::kPosted); }
  bool Work() override {
    const std::size_t sent = message_->sent_bytes;
    if (sent == bytes_) {
      WaitFor(stream(), message_->ready);
      CopyFrom(message_->data, side_.comm->Device(peer_), data_, caller_.device, bytes_, stream());
      message_->done = caller_.events->Record(stream());
    }
    message_->received_bytes = bytes_;
    message_->phase.store(PeerMessage::kTaken, std::memory_order_release);
    side_.comm->WakeMember(peer_);
    CheckBytes(sent);
    return true;
  }
  bool CanLeave() const override { return true; }
  void Leave() override {}
  bool Misses(int rank) const override {
    return side_.comm->WorldRank(peer_) == rank && IsIn(PeerMessage::kOpen);
  }

 private:
  void* const data_;
  PeerCaller caller_;
};

// An all_reduce is a reduce_scatter and an all_gather of the ranks' shares, with a meeting halfway: every
// element is reduced once, by one rank. No rank writes into another rank's buffers.
class CollectiveOp final : public PeerOp {
 public:
  CollectiveOp(PeerSide& side, const CollectiveCall& call, cudaStream_t stream)
      : PeerOp(stream), side_(side), call_(call), size_(static_cast<std::size_t>(side.comm->size())) {}

  void Start(const PeerCaller& caller, const EventRef& ready) override {
    caller_ = caller;
    position_ = side_.collectives++;
    meeting_ = side_.comm->Meeting(position_);
    Mine().call = call_;
    Mine().ready = ready;
    Mine().posted.store(true, std::memory_order_release);
    Count(meeting_->posted);
  }
  bool Ready() const override { return All(gathers_ ? meeting_->halfway : meeting_->posted); }
  bool Work() override {
    if (gathers_) {
      GatherShares();
    } else {
      meeting_->CheckSameCall(side_, position_);
      if (call_.what == Collective::kAllReduce) {
        ReduceRange(ShareBegin(Member(0)), ShareBegin(Member(0) + 1), At(call_.out, ShareBegin(Member(0))));
        Mine().halfway = caller_.events->Record(stream());
        gathers_ = true;
        Count(meeting_->halfway);
        return false;
      }
      if (call_.what == Collective::kAllGather) {
        Gather();
      } else {
        ReduceRange(Member(0) * call_.count, (Member(0) + 1) * call_.count, call_.out);
      }
    }
    Mine().done = caller_.events->Record(stream());
    Count(meeting_->done);
    return true;
  }
  bool CanLeave() const override { return All(meeting_->done); }
  void Leave() override {
    for (std::size_t i = 1; i < size_; ++i) WaitFor(stream(), meeting_->parts[Member(i)].done);
  }
  bool Misses(int rank) const override {
    for (std::size_t member = 0; member < size_; ++member) {
      if (side_.comm->WorldRank(static_cast<int>(member)) == rank)
        return !meeting_->parts[member].posted.load(std::memory_order_acquire);
    }
    return false;
  }
  std::string ToString() const override { return call_.ToString() + " on " + side_.comm->name(); }

 private:
  using Part = PeerMeeting::Part;

  // The members from this one on, so that not all ranks begin with the same member.
  std::size_t Member(std::size_t i) const { return (static_cast<std::size_t>(side_.member) + i) % size_; }
  Part& Mine() { return meeting_->parts[Member(0)]; }
  std::size_t Bytes(std::size_t count) const { return count * WidthOf(call_.dtype); }
  void* At(void* data, std::size_t element) const { return static_cast<std::byte*>(data) + Bytes(element); }
  const void* At(const void* data, std::size_t element) const {
    return static_cast<const std::byte*>(data) + Bytes(element);
  }
  bool All(const std::atomic<std::size_t>& count) const {
    return count.load(std::memory_order_acquire) == size_;
  }
  void Count(std::atomic<std::size_t>& count) {
    if (count.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) side_.comm->WakeAll();
  }
  void CopyPart(std::size_t member, const void* from, void* to, std::size_t count) {
    CopyFrom(from, side_.comm->Device(static_cast<int>(member)), to, caller_.device, Bytes(count), stream());
  }

  void Gather() {
    for (std::size_t i = 0; i < size_; ++i) {
      const Part& part = meeting_->parts[Member(i)];
      if (i > 0) WaitFor(stream(), part.ready);
      CopyPart(Member(i), part.call.in, At(call_.out, Member(i) * call_.count), call_.count);
    }
  }

  std::size_t ShareBegin(std::size_t member) const {
    return member == size_ ? call_.count : call_.count / kShareUnit * member / size_ * kShareUnit;
  }

  void GatherShares() {
    for (std::size_t i = 1; i < size_; ++i) {
      const Part& part = meeting_->parts[Member(i)];
      const std::size_t begin = ShareBegin(Member(i));
      WaitFor(stream(), part.halfway);
      CopyPart(Member(i), At(part.call.out, begin), At(call_.out, begin), ShareBegin(Member(i) + 1) - begin);
    }
  }

  // Reduces elements begin .. end of all ranks' inputs into `out`, in the order of the ranks. Inputs on other
  // devices are fetched piece by piece: no kernel reads another device's memory.
  void ReduceRange(std::size_t begin, std::size_t end, void* out) {
    for (std::size_t i = 1; i < size_; ++i) WaitFor(stream(), meeting_->parts[Member(i)].ready);
    const std::size_t piece = std::min(end - begin, kPieceBytes / WidthOf(call_.dtype));
    if (piece == 0) return;
    const std::size_t row = (Bytes(piece) + 255) / 256 * 256;
    const auto far = [&](std::size_t member) {
      return side_.comm->Device(static_cast<int>(member)) != caller_.device;
    };
    std::size_t rows = 0;
    for (std::size_t member = 0; member < size_; ++member) rows += far(member);
    const Scratch scratch(*caller_.pool, rows * row, stream());
    const std::size_t step = rows ? piece : end - begin;
    std::vector<const void*> in(size_);
    for (std::size_t at = begin; at < end; at += step) {
      const std::size_t count = std::min(step, end - at);
      std::byte* next = scratch.get();
      for (std::size_t member = 0; member < size_; ++member) {
        in[member] = At(meeting_->parts[member].call.in, at);
        if (!far(member)) continue;
        CopyPart(member, in[member], next, count);
        in[member] = std::exchange(next, next + row);
      }
      LaunchReduce(call_.dtype, call_.reduce, in, count, At(out, at - begin), stream());
    }
  }

  // Memory in the order of a stream; none for 0 bytes.
  class Scratch {
   public:
    Scratch(DevicePool& pool, std::size_t bytes, cudaStream_t stream) : stream_(stream) {
      if (bytes) CheckCuda(pool.Allocate(&data_, bytes, stream), "taking memory for a reduction");
    }
    ~Scratch() {
      if (data_) cudaFreeAsync(data_, stream_);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    std::byte* get() const { return static_cast<std::byte*>(data_); }

   private:
    void* data_ = nullptr;
    cudaStream_t stream_;
  };

  PeerSide& side_;
  const CollectiveCall call_;
  const std::size_t size_;
  PeerCaller caller_;
  std::uint64_t position_ = 0;
  std::shared_ptr<PeerMeeting> meeting_;
  bool gathers_ = false;
};

}  // namespace

void WaitFor(cudaStream_t stream, const EventRef& event) {
  CheckCuda(cudaStreamWaitEvent(stream, event.get(), 0), "waiting for a peer's event");
}

void PeerMeeting::CheckSameCall(const PeerSide& side, std::uint64_t position) const {
  const auto same = [&](const Part& part) { return part.call.SameAs(parts[0].call); };
  if (std::all_of(parts.begin(), parts.end(), same)) return;
  std::vector<CollectiveCall> calls;
  for (const Part& part : parts) calls.push_back(part.call);
  throw Disagreement(calls, side.member, side.comm->ranks(), position, side.comm->name());
}

EventPool::~EventPool() {
  for (cudaEvent_t event : spare_) cudaEventDestroy(event);
}

EventRef EventPool::Record(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      event = spare_.back();
      spare_.pop_back();
    }
  }
  if (!event) CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  EventRef held(event, [pool = shared_from_this()](cudaEvent_t back) {
    const std::lock_guard lock(pool->mutex_);
    pool->spare_.push_back(back);
  });
  CheckCuda(cudaEventRecord(event, stream), "recording an event for a peer");
  return held;
}

PeerComm::PeerComm(std::vector<int> ranks, std::vector<int> devices, std::vector<WakeUp>& wake_ups)
    : ranks_(std::move(ranks)),
      devices_(std::move(devices)),
      name_(CommunicatorOf(ranks_, static_cast<int>(wake_ups.size()))),
      wake_ups_(wake_ups) {}

std::shared_ptr<PeerMessage> PeerComm::Message(int from, int to, std::uint64_t position) {
  const std::lock_guard lock(mutex_);
  const auto [it, first] = messages_.try_emplace({from, to, position});
  if (first) return it->second = std::make_shared<PeerMessage>();
  const auto message = std::move(it->second);  // both have it now
  messages_.erase(it);
  return message;
}

std::shared_ptr<PeerMeeting> PeerComm::Meeting(std::uint64_t position) {
  const std::lock_guard lock(mutex_);
  auto it = meetings_.find(position);
  if (it == meetings_.end())
    it = meetings_.emplace(position, std::make_shared<PeerMeeting>(ranks_.size())).first;
  const auto meeting = it->second;
  if (++meeting->joined == ranks_.size()) meetings_.erase(it);
  return meeting;
}

void PeerComm::Reset() {
  const std::lock_guard lock(mutex_);
  messages_.clear();
  meetings_.clear();
}

std::unique_ptr<PeerOp> MakeSend(PeerSide& side, int peer, const void* data, std::size_t bytes,
                                 cudaStream_t stream) {
  return std::make_unique<SendOp>(side, peer, data, bytes, stream);
}
std::unique_ptr<PeerOp> MakeRecv(PeerSide& side, int peer, void* data, std::size_t bytes,
                                 cudaStream_t stream) {
  return std::make_unique<RecvOp>(side, peer, data, bytes, stream);
}
std::unique_ptr<PeerOp> MakeCollective(PeerSide& side, const CollectiveCall& call, cudaStream_t stream) {
  return std::make_unique<CollectiveOp>(side, call, stream);
}

}  // namespace cppool::kernels::cuda
