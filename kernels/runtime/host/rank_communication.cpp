// The communication of a HostRank: its places in communicators, and the calls on them.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kernels/error.h"
#include "kernels/runtime/common/dtype.h"
#include "kernels/runtime/host/rank.h"

namespace cppool::kernels::host {

void HostRank::ResetSides() {
  epoch_ = world_->epoch();
  for (auto& [shape, side] : sides_) {
    side.collectives = 0;
    side.rings = 0;
    std::fill(side.sends.begin(), side.sends.end(), 0);
    std::fill(side.recvs.begin(), side.recvs.end(), 0);
  }
}

HostRank::Side& HostRank::At(cppool_comm comm) {
  if (world_->aborted()) world_->ThrowAborted();
  if (epoch_ != world_->epoch()) ResetSides();
  for (auto& [shape, side] : sides_) {
    if (reinterpret_cast<cppool_comm>(&side) == comm) return side;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "not a communicator of this rank");
}

cppool_comm HostRank::GroupOf(GroupShape shape, int* rank, int* size) {
  auto known = sides_.find(shape);
  if (known == sides_.end()) {
    if (group_depth_ > 0) throw RuntimeError(CPPOOL_INTERNAL, "group_of between group_start and group_end");
    const TraceRecorder::Call call(trace_.get(), "open communicator");
    const std::vector<std::uint64_t> none(static_cast<std::size_t>(shape.size));
    const Side side{&world_->Comm(shape, rank_), shape.Member(rank_), 0, none, none, 0};
    known = sides_.emplace(shape, side).first;
  }
  if (rank) *rank = shape.Member(rank_);
  if (size) *size = shape.size;
  return reinterpret_cast<cppool_comm>(&known->second);
}

void HostRank::GroupEnd() {
  if (group_depth_ == 0) throw RuntimeError(CPPOOL_INTERNAL, "group_end without group_start");
  if (--group_depth_ > 0) return;
  auto grouped = std::move(grouped_);
  grouped_.clear();
  for (auto& [stream, ops] : grouped) RunOps(*stream, std::move(ops));
}

void HostRank::Send(const void* data, std::size_t bytes, int peer, cppool_comm comm, cppool_stream stream) {
  HostStream& at = At(stream);
  Side& side = At(comm);
  CheckPeer(peer, side.comm->size(), "send");
  auto op = MakeSend(*side.comm, side.rank, peer, side.sends[static_cast<std::size_t>(peer)]++, data, bytes);
  if (trace_) op->slice = TraceTransfer(at, side, "send", bytes, peer);
  Submit(at, std::move(op));
}

void HostRank::Recv(void* data, std::size_t bytes, int peer, cppool_comm comm, cppool_stream stream) {
  HostStream& at = At(stream);
  Side& side = At(comm);
  CheckPeer(peer, side.comm->size(), "recv");
  auto op = MakeRecv(*side.comm, side.rank, peer, side.recvs[static_cast<std::size_t>(peer)]++, data, bytes);
  if (trace_) op->slice = TraceTransfer(at, side, "recv", bytes, peer);
  Submit(at, std::move(op));
}

void HostRank::Collect(const CollectiveCall& call, cppool_comm comm, cppool_stream stream) {
  HostStream& at = At(stream);
  Side& side = At(comm);
  CheckDtype(call.dtype);
  CheckReduction(call.reduce);
  auto op = MakeCollective(*side.comm, side.rank, side.collectives++, call);
  if (trace_) op->slice = TraceTransfer(at, side, NameOf(call.what), call.bytes(), {});
  Submit(at, std::move(op));
}

TraceSlice* HostRank::TraceTransfer(const HostStream& stream, const Side& side, const char* what,
                                    std::size_t bytes, std::optional<int> peer) {
  TraceSlice* const slice = trace_->Add(TraceSlice::Kind::kTransfer, stream.index, what, iteration_);
  if (!slice) return nullptr;
  slice->bytes = bytes;
  slice->ranks = side.comm->size();
  if (peer) slice->peer = side.comm->WorldRank(*peer);
  return slice;
}

void HostRank::Submit(HostStream& stream, std::unique_ptr<CommOp> op) {
  if (group_depth_ > 0) {
    auto it = std::find_if(grouped_.begin(), grouped_.end(),
                           [&](const auto& known) { return known.first == &stream; });
    if (it == grouped_.end()) it = grouped_.emplace(it, &stream, std::vector<std::unique_ptr<CommOp>>{});
    it->second.push_back(std::move(op));
    return;
  }
  std::vector<std::unique_ptr<CommOp>> ops;
  ops.push_back(std::move(op));
  RunOps(stream, std::move(ops));
}

void HostRank::RunOps(HostStream& stream, std::vector<std::unique_ptr<CommOp>> ops) {
  // std::function requires a copyable target, so the calls are shared. They are never copied.
  auto shared = std::make_shared<std::vector<std::unique_ptr<CommOp>>>(std::move(ops));
  stream.Push(HostStream::Run::kUnlessFailed,
              [this, shared, &stream] { world_->Run(rank_, failure_, stream.waits, *shared); });
}

}  // namespace cppool::kernels::host
