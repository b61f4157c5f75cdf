// The calls of ranks in a world of several processes: by letters (mail.h) instead of shared memory. They mean
// the same, fail with the same words, and reduce in the same order.
#include "kernels/runtime/host/comm.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/error.h"
#include "kernels/runtime/common/dtype.h"
#include "kernels/runtime/host/mail.h"
#include "kernels/runtime/host/reduce.h"

namespace cppool::kernels::host {
namespace {

// `from` and `to`: members.
LetterHead HeadOf(const HostComm& comm, LetterKind kind, int from, int to, std::uint64_t position) {
  LetterHead head;
  head.kind = kind;
  head.from = comm.WorldRank(from);
  head.to = comm.WorldRank(to);
  head.size = comm.shape().size;
  head.stride = comm.shape().stride;
  head.position = position;
  return head;
}

// As in shared memory, it ends when the receiver has the data, so that a send without a recv is seen.
class LetterSend final : public MessageOp {
 public:
  LetterSend(HostComm& comm, int rank, int peer, std::uint64_t position, const void* data, std::size_t bytes)
      : MessageOp(comm, true, rank, peer, position, bytes), data_(data) {}

  bool Ready() const override { return !posted_ || comm_.mail()->Has(Answer()); }

  bool Step() override {
    if (!posted_) {
      posted_ = true;
      comm_.mail()->Send(HeadOf(comm_, LetterKind::kMessage, rank_, peer_, position_), data_, bytes_);
      return false;
    }
    CheckBytes(comm_.mail()->Take(Answer())->head.count);
    return true;
  }

  bool Withdraw() override { return true; }  // a letter has a copy of the data
  bool Misses(int rank) const override { return posted_ && IsPeer(rank) && !Ready(); }

 private:
  LetterHead Answer() const { return HeadOf(comm_, LetterKind::kTaken, peer_, rank_, position_); }

  const void* const data_;
  bool posted_ = false;
};

class LetterRecv final : public MessageOp {
 public:
  LetterRecv(HostComm& comm, int rank, int peer, std::uint64_t position, void* data, std::size_t bytes)
      : MessageOp(comm, false, rank, peer, position, bytes), data_(data) {}

  bool Ready() const override { return comm_.mail()->Has(Message()); }

  bool Step() override {
    const auto letter = comm_.mail()->Take(Message());
    const std::size_t sent = letter->size();
    if (sent == bytes_ && bytes_ > 0) std::memcpy(data_, letter->data(), bytes_);
    LetterHead taken = HeadOf(comm_, LetterKind::kTaken, rank_, peer_, position_);
    taken.count = bytes_;
    comm_.mail()->Send(taken, nullptr, 0);
    CheckBytes(sent);
    return true;
  }

  bool Withdraw() override { return true; }
  bool Misses(int rank) const override { return IsPeer(rank) && !Ready(); }

 private:
  LetterHead Message() const { return HeadOf(comm_, LetterKind::kMessage, peer_, rank_, position_); }

  void* const data_;
};

// Sends each member what it needs of this rank's input, and works once it has theirs. An all_reduce is a
// reduce_scatter and an all_gather of the ranks' shares, as in shared memory.
class LetterCollective final : public CollectiveCommOp {
 public:
  LetterCollective(HostComm& comm, int rank, std::uint64_t position, const CollectiveCall& call)
      : CollectiveCommOp(comm, rank, position, call),
        width_(WidthOf(call.dtype)),
        letters_(static_cast<std::size_t>(comm.size())) {}

  bool Ready() const override {
    if (stage_ == Stage::kPost) return true;
    for (int member = 0; member < comm_.size(); ++member)
      if (!HasLetterOf(member)) return false;
    return true;
  }

  bool Step() override {
    if (stage_ == Stage::kPost) {
      stage_ = Stage::kWork;
      for (int member = 0; member < comm_.size(); ++member) {
        const auto [begin, count] = PartFor(member);
        Post(LetterKind::kInput, member, At(call_.in, begin), count);
      }
      return false;
    }
    for (int member = 0; member < comm_.size(); ++member)
      letters_[Index(member)] = comm_.mail()->Take(Expected(member));
    if (stage_ == Stage::kGather) {
      for (int member = 0; member < comm_.size(); ++member) {
        const std::size_t begin = ShareBegin(Index(member));
        Copy(At(call_.out, begin), *letters_[Index(member)], ShareBegin(Index(member) + 1) - begin);
      }
      return true;
    }
    CheckSameCall();
    return Work();
  }

  bool Withdraw() override { return true; }

  bool Misses(int rank) const override {
    if (stage_ == Stage::kPost) return false;
    for (int member = 0; member < comm_.size(); ++member)
      if (comm_.WorldRank(member) == rank) return !HasLetterOf(member);
    return false;
  }

 private:
  enum class Stage { kPost, kWork, kGather };

  static std::size_t Index(int member) { return static_cast<std::size_t>(member); }
  // In elements.
  const std::byte* At(const void* buffer, std::size_t element) const {
    return static_cast<const std::byte*>(buffer) + element * width_;
  }
  std::byte* At(void* buffer, std::size_t element) const {
    return static_cast<std::byte*>(buffer) + element * width_;
  }

  // What a member needs of this rank's input: begin and count.
  std::pair<std::size_t, std::size_t> PartFor(int member) const {
    switch (call_.what) {
      case Collective::kAllGather:
      case Collective::kRing:  // never comes here
        break;
      case Collective::kReduceScatter:
        return {Index(member) * call_.count, call_.count};
      case Collective::kAllReduce:
        return {ShareBegin(Index(member)), ShareBegin(Index(member) + 1) - ShareBegin(Index(member))};
    }
    return {0, call_.count};
  }

  void Post(LetterKind kind, int member, const void* data, std::size_t count) {
    LetterHead head = HeadOf(comm_, kind, rank_, member, position_);
    head.what = call_.what;
    head.dtype = call_.dtype;
    head.reduce = call_.reduce;
    head.count = call_.count;
    comm_.mail()->Send(head, data, count * width_);
  }

  LetterHead Expected(int member) const {
    const LetterKind kind = stage_ == Stage::kGather ? LetterKind::kReduced : LetterKind::kInput;
    return HeadOf(comm_, kind, member, rank_, position_);
  }
  bool HasLetterOf(int member) const { return comm_.mail()->Has(Expected(member)); }

  static CollectiveCall CallOf(const LetterHead& head) {
    CollectiveCall call;
    call.what = head.what;
    call.dtype = static_cast<cppool_dtype>(head.dtype);
    call.reduce = static_cast<cppool_reduce>(head.reduce);
    call.count = head.count;
    return call;
  }

  // Every rank compares the same calls, so that either all of them fail or none.
  void CheckSameCall() const {
    std::vector<CollectiveCall> calls;
    bool same = true;
    for (const auto& letter : letters_) {
      calls.push_back(CallOf(letter->head));
      same = same && calls.back().SameAs(calls.front());
    }
    if (!same) throw Disagreement(calls, rank_, comm_.ranks(), position_, comm_.name());
  }

  void Copy(void* to, const Letter& from, std::size_t count) const {
    if (from.size() != count * width_)
      throw RuntimeError(CPPOOL_INTERNAL, "a part of a collective has " + std::to_string(from.size()) +
                                              " bytes, and not " + std::to_string(count * width_));
    if (count > 0) std::memcpy(to, from.data(), count * width_);
  }

  // True: the call is over.
  bool Work() {
    if (call_.what == Collective::kAllGather) {
      for (int member = 0; member < comm_.size(); ++member)
        Copy(At(call_.out, Index(member) * call_.count), *letters_[Index(member)], call_.count);
      return true;
    }
    const auto [begin, count] = PartFor(rank_);
    std::vector<const void*> in;
    for (const auto& letter : letters_) {
      if (letter->size() != count * width_)
        throw RuntimeError(CPPOOL_INTERNAL, "a part of a collective has another size than the call");
      in.push_back(letter->data());
    }
    void* const out = call_.what == Collective::kAllReduce ? At(call_.out, begin) : At(call_.out, 0);
    if (count > 0) Reduce(call_.dtype, call_.reduce, in, count, out);
    if (call_.what == Collective::kReduceScatter) return true;
    stage_ = Stage::kGather;
    for (int member = 0; member < comm_.size(); ++member) Post(LetterKind::kReduced, member, out, count);
    return false;
  }

  std::size_t width_;
  std::vector<std::optional<Letter>> letters_;  // by member
  Stage stage_ = Stage::kPost;
};

}  // namespace

std::unique_ptr<CommOp> MakeLetterSend(HostComm& comm, int rank, int peer, std::uint64_t position,
                                       const void* data, std::size_t bytes) {
  return std::make_unique<LetterSend>(comm, rank, peer, position, data, bytes);
}
std::unique_ptr<CommOp> MakeLetterRecv(HostComm& comm, int rank, int peer, std::uint64_t position, void* data,
                                       std::size_t bytes) {
  return std::make_unique<LetterRecv>(comm, rank, peer, position, data, bytes);
}
std::unique_ptr<CommOp> MakeLetterCollective(HostComm& comm, int rank, std::uint64_t position,
                                             const CollectiveCall& call) {
  return std::make_unique<LetterCollective>(comm, rank, position, call);
}

}  // namespace cppool::kernels::host
