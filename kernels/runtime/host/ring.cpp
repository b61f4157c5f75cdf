// Ring transfers on the host (ring_transfers.h): the flags are atomics, and the copies run on the sender's
// stream. A sender waits until the receiver has posted its memory in the order of that rank's stream.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/error.h"
#include "kernels/ring_transfers.h"
#include "kernels/runtime/host/comm.h"
#include "kernels/runtime/host/rank.h"

namespace cppool::kernels::host {

class RingSendOp final : public CommOp {
 public:
  RingSendOp(HostComm& comm, std::uint32_t pass, RingPiece piece)
      : comm_(comm),
        to_(comm.rings_[static_cast<std::size_t>(piece.to)]),
        pass_(pass),
        piece_(std::move(piece)) {}

  bool Ready() const override { return to_.posted.load(std::memory_order_relaxed) == pass_; }
  bool Step() override {
    (void)to_.posted.load(std::memory_order_acquire);
    for (const RingPiece::Rows& part : piece_.parts) {
      std::byte* const into = to_.into[part.buffer].load(std::memory_order_relaxed) + part.offset;
      for (std::size_t row = 0; row < part.rows; ++row)
        std::memcpy(into + row * part.pitch, part.from + row * part.pitch, part.width);
    }
    to_.flags[piece_.flag].store(pass_, std::memory_order_release);
    comm_.WakeMember(piece_.to);
    return true;
  }
  bool Withdraw() override { return true; }
  bool Misses(int rank) const override { return comm_.WorldRank(piece_.to) == rank && !Ready(); }
  CallNote Note() const override { return {&comm_, "the slots of", piece_.to, pass_, piece_.bytes()}; }

 private:
  HostComm& comm_;
  HostComm::RingSide& to_;
  const std::uint32_t pass_;
  const RingPiece piece_;
};

class RingArrivalOp final : public CommOp {
 public:
  RingArrivalOp(HostComm& comm, int member, std::uint32_t pass, std::size_t piece, int from, const char* what)
      : comm_(comm),
        flag_(comm.rings_[static_cast<std::size_t>(member)].flags[piece]),
        pass_(pass),
        from_(from),
        what_(what) {}

  bool Ready() const override { return flag_.load(std::memory_order_relaxed) == pass_; }
  bool Step() override {
    (void)flag_.load(std::memory_order_acquire);
    return true;
  }
  bool Withdraw() override { return true; }
  bool Misses(int rank) const override { return comm_.WorldRank(from_) == rank && !Ready(); }
  CallNote Note() const override { return {&comm_, what_, from_, pass_, 0}; }

 private:
  HostComm& comm_;
  std::atomic<std::uint32_t>& flag_;
  const std::uint32_t pass_;
  const int from_;
  const char* const what_;
};

std::unique_ptr<CommOp> MakeRingSend(HostComm& comm, std::uint32_t pass, RingPiece piece) {
  return std::make_unique<RingSendOp>(comm, pass, std::move(piece));
}
std::unique_ptr<CommOp> MakeRingArrival(HostComm& comm, int member, std::uint32_t pass, std::size_t piece,
                                        int from, const char* what) {
  return std::make_unique<RingArrivalOp>(comm, member, pass, piece, from, what);
}

void HostComm::PostRing(int member, std::uint32_t pass, const std::array<std::byte*, 2>& into) {
  RingSide& side = rings_[static_cast<std::size_t>(member)];
  for (std::size_t i = 0; i < into.size(); ++i) side.into[i].store(into[i], std::memory_order_relaxed);
  side.posted.store(pass, std::memory_order_release);
  for (int other = 0; other < size(); ++other) WakeMember(other);
}

std::optional<std::string> HostRank::WhyNoRing() const {
  if (!world_->has_mail()) return std::nullopt;
  return "the ranks are in several processes";
}

Arrivals HostRank::StartRing(RingTransfers transfers, cppool_comm comm, cppool_stream stream) {
  HostStream& at = At(stream);
  Side& side = At(comm);
  HostComm& group = *side.comm;
  if (group.mail() || group_depth_ > 0 || transfers.arriving.size() > kMostRingPieces)
    throw RuntimeError(CPPOOL_INTERNAL,
                       "ring transfers with letters, in a group of calls, or of too many pieces");
  const std::uint32_t pass = ++side.rings;
  const int member = side.rank;
  at.Push(HostStream::Run::kUnlessFailed,
          [&group, member, pass, into = transfers.into] { group.PostRing(member, pass, into); });
  for (RingPiece& piece : transfers.leaving) {
    CheckPeer(piece.to, group.size(), "a piece of ring transfers");
    MarkStage(stream, piece.stage.c_str());
    TraceSlice* const slice = trace_ ? TraceTransfer(at, side, "push", piece.bytes(), piece.to) : nullptr;
    auto op = MakeRingSend(group, pass, std::move(piece));
    op->slice = slice;
    Submit(at, std::move(op));
  }
  if (!transfers.leaving.empty()) MarkStage(stream, nullptr);
  struct Awaited {
    int from;
    const char* what;
  };
  std::vector<Awaited> arriving;
  {
    const std::lock_guard lock(progress_mutex_);
    for (const RingTransfers::Arriving& piece : transfers.arriving)
      arriving.push_back({piece.from, stages_.emplace(piece.what + " from").first->c_str()});
  }
  Arrivals arrivals;
  arrivals.pass = pass;
  arrivals.await = [this, &main = *streams_.front(), &group, member, pass,
                    arriving = std::move(arriving)](std::size_t piece) {
    std::vector<std::unique_ptr<CommOp>> ops;
    ops.push_back(MakeRingArrival(group, member, pass, piece, arriving[piece].from, arriving[piece].what));
    world_->Run(rank_, failure_, main.waits, ops);
  };
  return arrivals;
}

}  // namespace cppool::kernels::host
