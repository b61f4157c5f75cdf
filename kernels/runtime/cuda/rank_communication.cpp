// The communication of a CudaRank: its communicators, and the calls on them.
#include "kernels/runtime/cuda/peer_world.h"
#include "kernels/runtime/cuda/rank.h"

namespace cppool::kernels::cuda {
namespace {

cppool_comm Give(const CommGroup& group, int* rank, int* size) {
  if (rank) *rank = group.rank;
  if (size) *size = group.size;
  return group.comm;
}

}  // namespace

cppool_comm CudaRank::Group(GroupShape shape, int* rank, int* size) {
  return Give(world_->group(rank_, shape), rank, size);
}

cppool_comm CudaRank::GroupOf(GroupShape shape, int* rank, int* size) {
  const CommGroup known = world_->group(rank_, shape);
  if (known.comm) return Give(known, rank, size);
  if (InGroup()) throw RuntimeError(CPPOOL_INTERNAL, "group_of between group_start and group_end");
  const TraceRecorder::Call call(Recorder(), "open communicator");
  // NCCL splits a communicator only while it is idle.
  WaitForStreams();
  const WarmUpBuffers buffers(&table_);
  const CommGroup made = world_->MakeGroup(rank_, shape);
  WarmUpGroup(*this, made, buffers);
  return Give(made, rank, size);
}

Group CudaRank::CopyGroup(GroupShape shape) {
  if (!world_->copies()) return {};
  const CommGroup group = world_->copies()->CopyGroup(rank_, shape);
  return {group.comm, group.rank, group.size};
}

std::optional<std::string> CudaRank::WhyNoRing() const {
  return world_->copies() ? world_->copies()->WhyNoRing()
                          : "not all GPUs reach each other, or several processes have them";
}

// A case may pass a communicator of its own: it is noted as if it were the world's.
void CudaRank::BeginTransfer(cudaStream_t stream, const char* what, std::size_t bytes, int peer,
                             cppool_comm comm) {
  const CommGroup group = world_->group(rank_, comm);
  const int world_rank = group.comm ? group.shape.WorldRank(rank_, peer) : peer;
  marks_.Note(stream, {what, " rank ", world_rank, ""});
  if (trace_) TraceCall(stream, what, bytes, group.comm ? group.size : world_->size(), world_rank);
}

void CudaRank::Send(const void* data, std::size_t bytes, int peer, cppool_comm comm, cudaStream_t stream) {
  BeginTransfer(stream, "send to", bytes, peer, comm);
  world_->Send(rank_, data, bytes, peer, comm, stream);
  EndCall();
}

void CudaRank::Recv(void* data, std::size_t bytes, int peer, cppool_comm comm, cudaStream_t stream) {
  BeginTransfer(stream, "recv from", bytes, peer, comm);
  world_->Recv(rank_, data, bytes, peer, comm, stream);
  EndCall();
}

void CudaRank::Collect(const CollectiveCall& call, cppool_comm comm, cudaStream_t stream) {
  const CommGroup group = world_->group(rank_, comm);
  const int ranks = group.comm ? group.size : world_->size();
  marks_.Note(stream, {NameOf(call.what), " with ", ranks, " ranks"});
  if (trace_) TraceCall(stream, NameOf(call.what), call.bytes(), ranks, TraceSlice::kNoPeer);
  world_->Collect(rank_, call, comm, stream);
  EndCall();
}

Arrivals CudaRank::StartRing(RingTransfers transfers, cppool_comm comm, cppool_stream on) {
  const auto stream = reinterpret_cast<cudaStream_t>(on);
  const RingHooks hooks{[&](const RingPiece& piece) {
                          MarkStage(stream, piece.stage.c_str());
                          BeginTransfer(stream, "push to", piece.bytes(), piece.to, comm);
                        },
                        [&] { EndCall(); }};
  const bool leaves = !transfers.leaving.empty();
  world_->ThrowIfAborted();
  Arrivals arrivals =
      world_->copies()->StartRing(rank_, std::move(transfers), comm, stream, main_stream(), hooks);
  if (leaves) MarkStage(stream, nullptr);
  return arrivals;
}

void CudaRank::TraceCall(cudaStream_t stream, std::string_view what, std::size_t bytes, int ranks, int peer) {
  const std::string_view name = what.substr(0, what.find(' '));  // "send" of "send to"
  const int track = static_cast<int>(marks_.Here(stream).track);
  trace_->recorder().NameStream(track, marks_.NameOf(stream));
  TraceSlice* const slice = trace_->recorder().Add(TraceSlice::Kind::kTransfer, track, name, iteration_);
  if (slice) {
    slice->bytes = bytes;
    slice->ranks = ranks;
    slice->peer = peer;
  }
  trace_->BeginCall(stream, slice);
}

void CudaRank::GroupStart() {
  world_->GroupStart(rank_);
  if (trace_) trace_->GroupStart();
}

void CudaRank::GroupEnd() {
  if (trace_) trace_->BeginGroupEnd();
  world_->GroupEnd(rank_);
  if (trace_) trace_->EndGroupEnd();
}

}  // namespace cppool::kernels::cuda
