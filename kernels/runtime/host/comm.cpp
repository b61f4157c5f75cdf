#include "kernels/runtime/host/comm.h"

#include <cstring>
#include <utility>

#include "kernels/error.h"
#include "kernels/group_shape.h"
#include "kernels/runtime/common/dtype.h"
#include "kernels/runtime/host/mail.h"
#include "kernels/runtime/host/reduce.h"

namespace cppool::kernels::host {

class SendOp final : public MessageOp {
 public:
  SendOp(HostComm& comm, int rank, int peer, std::uint64_t position, const void* data, std::size_t bytes)
      : MessageOp(comm, true, rank, peer, position, bytes),
        slot_(comm.Message(rank, peer, position)),
        data_(data) {}

  bool Ready() const override {
    return slot_.state.load(std::memory_order_relaxed) == At(posted_ ? HostComm::kTaken : HostComm::kFree);
  }

  bool Step() override {
    if (!posted_) {
      slot_.data.store(data_, std::memory_order_relaxed);
      slot_.sent_bytes.store(bytes_, std::memory_order_relaxed);
      slot_.state.store(At(HostComm::kPosted), std::memory_order_release);
      posted_ = true;
      comm_.WakeMember(peer_);
      return false;
    }
    (void)slot_.state.load(std::memory_order_acquire);
    const std::size_t received = slot_.received_bytes.load(std::memory_order_relaxed);
    slot_.state.store(4 * (position_ + HostComm::kMessageSlots) + HostComm::kFree, std::memory_order_relaxed);
    comm_.WakeMember(rank_);  // a later send of this rank, on another stream, may be waiting for the slot
    CheckBytes(received);
    return true;
  }

  bool Withdraw() override {
    if (!posted_) return true;
    std::uint64_t expected = At(HostComm::kPosted);
    // "Free" of this old position: no rank uses the slot until the world restarts.
    return slot_.state.compare_exchange_strong(expected, At(HostComm::kFree), std::memory_order_relaxed);
  }

  bool Misses(int rank) const override {
    return posted_ && IsPeer(rank) && slot_.state.load(std::memory_order_relaxed) == At(HostComm::kPosted);
  }

 private:
  std::uint64_t At(HostComm::Phase phase) const { return 4 * position_ + phase; }

  HostComm::MessageSlot& slot_;
  const void* const data_;
  bool posted_ = false;
};

class RecvOp final : public MessageOp {
 public:
  RecvOp(HostComm& comm, int rank, int peer, std::uint64_t position, void* data, std::size_t bytes)
      : MessageOp(comm, false, rank, peer, position, bytes),
        slot_(comm.Message(peer, rank, position)),
        data_(data) {}

  bool Ready() const override {
    return slot_.state.load(std::memory_order_relaxed) == 4 * position_ + HostComm::kPosted;
  }

  bool Step() override {
    std::uint64_t expected = 4 * position_ + HostComm::kPosted;
    // A sender that is aborted may withdraw at the same moment: the first of the two decides.
    if (!slot_.state.compare_exchange_strong(expected, 4 * position_ + HostComm::kClaimed,
                                             std::memory_order_acquire, std::memory_order_relaxed)) {
      return false;
    }
    const std::size_t sent = slot_.sent_bytes.load(std::memory_order_relaxed);
    const void* from = slot_.data.load(std::memory_order_relaxed);
    if (sent == bytes_ && bytes_ && from != data_) std::memcpy(data_, from, bytes_);
    slot_.received_bytes.store(bytes_, std::memory_order_relaxed);
    slot_.state.store(4 * position_ + HostComm::kTaken, std::memory_order_release);
    comm_.WakeMember(peer_);
    CheckBytes(sent);
    return true;
  }

  bool Withdraw() override { return true; }  // nothing is shared before the Step that finishes it

  bool Misses(int rank) const override { return IsPeer(rank) && !Ready(); }

 private:
  HostComm::MessageSlot& slot_;
  void* const data_;
};

// Posts its buffers, works when all ranks have posted, and leaves when all have worked. An all_reduce is a
// reduce_scatter and an all_gather of the ranks' shares with a meeting halfway: each element is reduced once,
// by one rank.
class CollectiveOp final : public CollectiveCommOp {
 public:
  CollectiveOp(HostComm& comm, int rank, std::uint64_t position, const CollectiveCall& call)
      : CollectiveCommOp(comm, rank, position, call),
        slot_(*comm.collectives_[position % HostComm::kCollectiveSlots]) {
    before_ = position / HostComm::kCollectiveSlots * static_cast<std::uint64_t>(comm.size());
    all_ = before_ + static_cast<std::uint64_t>(comm.size());
  }

  bool Ready() const override {
    switch (stage_) {
      case Stage::kPost:
        return slot_.left.load(std::memory_order_relaxed) >= before_;
      case Stage::kWork:
        return slot_.posted.load(std::memory_order_relaxed) >= all_;
      case Stage::kGather:
        return slot_.halfway.load(std::memory_order_relaxed) >= all_;
      case Stage::kLeave:
        return slot_.left.load(std::memory_order_relaxed) >= all_;
    }
    return false;
  }

  bool Step() override {
    Entry& mine = slot_.entries[static_cast<std::size_t>(rank_)];
    switch (stage_) {
      case Stage::kPost:
        mine.what.store(call_.what, std::memory_order_relaxed);
        mine.dtype.store(call_.dtype, std::memory_order_relaxed);
        mine.reduce.store(call_.reduce, std::memory_order_relaxed);
        mine.count.store(call_.count, std::memory_order_relaxed);
        mine.in.store(call_.in, std::memory_order_relaxed);
        mine.out.store(call_.out, std::memory_order_relaxed);
        Arrive(mine.posted, slot_.posted, Stage::kWork);
        return false;
      case Stage::kWork:
        Acquire(&Entry::posted);
        CheckSameCall();
        if (call_.what == Collective::kAllReduce && comm_.size() > 1) {
          ReduceShare();
          Arrive(mine.halfway, slot_.halfway, Stage::kGather);
        } else {
          Work();
          // Not used here, but the counters count every use of the slot.
          slot_.halfway.fetch_add(1, std::memory_order_relaxed);
          Arrive(mine.left, slot_.left, Stage::kLeave);
        }
        return false;
      case Stage::kGather:
        Acquire(&Entry::halfway);
        GatherShares();
        Arrive(mine.left, slot_.left, Stage::kLeave);
        return false;
      case Stage::kLeave:
        Acquire(&Entry::left);
        // A later collective of this rank, on another stream, may be waiting for the slot.
        comm_.WakeMember(rank_);
        return true;
    }
    return true;
  }

  bool Withdraw() override {
    if (stage_ == Stage::kPost) return true;
    if (stage_ != Stage::kWork) return false;
    // Once all have posted, all are working and no rank can back out. With one rank less, they never start.
    std::uint64_t posted = slot_.posted.load(std::memory_order_relaxed);
    while (posted < all_) {
      if (slot_.posted.compare_exchange_weak(posted, posted - 1, std::memory_order_relaxed)) return true;
    }
    return false;
  }

  bool Misses(int rank) const override {
    if (stage_ != Stage::kWork) return false;
    for (int member = 0; member < comm_.size(); ++member) {
      if (comm_.WorldRank(member) != rank) continue;
      const Entry& entry = slot_.entries[static_cast<std::size_t>(member)];
      return entry.posted.load(std::memory_order_relaxed) <= position_;
    }
    return false;
  }

 private:
  using Entry = HostComm::Entry;
  enum class Stage { kPost, kWork, kGather, kLeave };

  void Arrive(std::atomic<std::uint64_t>& mine, std::atomic<std::uint64_t>& count, Stage next) {
    mine.store(position_ + 1, std::memory_order_release);
    stage_ = next;
    if (count.fetch_add(1, std::memory_order_relaxed) + 1 < all_) return;
    for (int member = 0; member < comm_.size(); ++member) {
      if (member != rank_) comm_.WakeMember(member);
    }
  }

  // The count says that all ranks have arrived; this makes their work visible. Their stores come at once: no
  // need to sleep.
  void Acquire(std::atomic<std::uint64_t> Entry::*counter) {
    for (Entry& entry : slot_.entries) {
      while ((entry.*counter).load(std::memory_order_relaxed) < position_ + 1) {
      }
      (void)(entry.*counter).load(std::memory_order_acquire);
    }
  }

  CollectiveCall CallOf(int member) const {
    const Entry& entry = slot_.entries[static_cast<std::size_t>(member)];
    CollectiveCall call;
    call.what = entry.what.load(std::memory_order_relaxed);
    call.dtype = entry.dtype.load(std::memory_order_relaxed);
    call.reduce = entry.reduce.load(std::memory_order_relaxed);
    call.count = entry.count.load(std::memory_order_relaxed);
    call.in = entry.in.load(std::memory_order_relaxed);
    call.out = entry.out.load(std::memory_order_relaxed);
    return call;
  }

  // Every rank compares the same calls, so that either all of them fail or none.
  void CheckSameCall() const {
    const CollectiveCall first = CallOf(0);
    bool same = true;
    for (int member = 1; member < comm_.size(); ++member) same = same && CallOf(member).SameAs(first);
    if (same) return;
    std::vector<CollectiveCall> calls;
    for (int member = 0; member < comm_.size(); ++member) calls.push_back(CallOf(member));
    throw Disagreement(calls, rank_, comm_.ranks_, position_, comm_.name());
  }

  static void Copy(void* to, const void* from, std::size_t bytes) {
    if (to != from && bytes) std::memcpy(to, from, bytes);
  }

  void Work() {
    const std::size_t bytes = call_.count * WidthOf(call_.dtype);
    const auto ranks = static_cast<std::size_t>(comm_.size());
    if (call_.what == Collective::kAllGather) {
      for (std::size_t i = 0; i < ranks; ++i) {
        Copy(static_cast<std::byte*>(call_.out) + i * bytes, CallOf(static_cast<int>(i)).in, bytes);
      }
      return;
    }
    ReduceRange(static_cast<std::size_t>(call_.what == Collective::kReduceScatter ? rank_ : 0) * call_.count,
                call_.count, call_.out);
  }

  // Reduces elements begin .. begin + count of all ranks' inputs.
  void ReduceRange(std::size_t begin, std::size_t count, void* out) {
    if (count == 0) return;
    std::vector<const void*> in;
    in.reserve(static_cast<std::size_t>(comm_.size()));
    for (int member = 0; member < comm_.size(); ++member) {
      in.push_back(static_cast<const std::byte*>(CallOf(member).in) + begin * WidthOf(call_.dtype));
    }
    Reduce(call_.dtype, call_.reduce, in, count, out);
  }

  void ReduceShare() {
    const auto member = static_cast<std::size_t>(rank_);
    const std::size_t begin = ShareBegin(member);
    ReduceRange(begin, ShareBegin(member + 1) - begin,
                static_cast<std::byte*>(call_.out) + begin * WidthOf(call_.dtype));
  }

  void GatherShares() {
    const std::size_t width = WidthOf(call_.dtype);
    for (std::size_t i = 0; i < static_cast<std::size_t>(comm_.size()); ++i) {
      if (static_cast<int>(i) == rank_) continue;
      const std::size_t begin = ShareBegin(i);
      Copy(static_cast<std::byte*>(call_.out) + begin * width,
           static_cast<const std::byte*>(CallOf(static_cast<int>(i)).out) + begin * width,
           (ShareBegin(i + 1) - begin) * width);
    }
  }

  HostComm::CollectiveSlot& slot_;
  std::uint64_t before_;  // the slot's counters when its earlier uses are over
  std::uint64_t all_;     // and when this one is complete
  Stage stage_ = Stage::kPost;
};

std::unique_ptr<CommOp> MakeSend(HostComm& comm, int rank, int peer, std::uint64_t position, const void* data,
                                 std::size_t bytes) {
  if (comm.mail()) return MakeLetterSend(comm, rank, peer, position, data, bytes);
  return std::make_unique<SendOp>(comm, rank, peer, position, data, bytes);
}
std::unique_ptr<CommOp> MakeRecv(HostComm& comm, int rank, int peer, std::uint64_t position, void* data,
                                 std::size_t bytes) {
  if (comm.mail()) return MakeLetterRecv(comm, rank, peer, position, data, bytes);
  return std::make_unique<RecvOp>(comm, rank, peer, position, data, bytes);
}
std::unique_ptr<CommOp> MakeCollective(HostComm& comm, int rank, std::uint64_t position,
                                       const CollectiveCall& call) {
  if (comm.mail()) return MakeLetterCollective(comm, rank, position, call);
  return std::make_unique<CollectiveOp>(comm, rank, position, call);
}

HostComm::HostComm(GroupShape shape, int rank, std::vector<WakeUp>& wake_ups, Mail* mail)
    : shape_(shape),
      mail_(mail),
      ranks_(shape.Ranks(rank)),
      name_(CommunicatorOf(ranks_, static_cast<int>(wake_ups.size()))),
      wake_ups_(wake_ups),
      messages_(ranks_.size() * ranks_.size() * kMessageSlots),
      rings_(mail ? 0 : ranks_.size()) {
  for (std::uint64_t i = 0; i < kCollectiveSlots; ++i)
    collectives_.push_back(std::make_unique<CollectiveSlot>(ranks_.size()));
  Reset();
}

void HostComm::Reset() {
  for (std::size_t i = 0; i < messages_.size(); ++i) {
    messages_[i].state.store(4 * (i % kMessageSlots) + kFree, std::memory_order_relaxed);
  }
  for (RingSide& side : rings_) {
    side.posted.store(0, std::memory_order_relaxed);
    for (auto& flag : side.flags) flag.store(0, std::memory_order_relaxed);
  }
  for (auto& slot : collectives_) {
    for (auto* counter : {&slot->posted, &slot->halfway, &slot->left})
      counter->store(0, std::memory_order_relaxed);
    for (Entry& entry : slot->entries) {
      for (auto* counter : {&entry.posted, &entry.halfway, &entry.left})
        counter->store(0, std::memory_order_relaxed);
    }
  }
}

std::vector<int> HostComm::Missing(std::uint64_t position) const {
  if (mail_) {
    std::vector<int> missing;
    for (const int rank : ranks_)
      if (!mail_->HasJoined(shape_, LetterKind::kInput, rank, position)) missing.push_back(rank);
    return missing;
  }
  const CollectiveSlot& slot = *collectives_[position % kCollectiveSlots];
  std::vector<int> missing;
  for (const auto counter : {&Entry::posted, &Entry::left}) {
    for (int member = 0; member < size(); ++member) {
      const Entry& entry = slot.entries[static_cast<std::size_t>(member)];
      if ((entry.*counter).load(std::memory_order_relaxed) <= position) missing.push_back(WorldRank(member));
    }
    if (!missing.empty()) break;
  }
  return missing;
}

}  // namespace cppool::kernels::host
