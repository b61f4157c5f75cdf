// The functions of the seam's table for a CudaRank. No exception leaves them.
#include "kernels/runtime/cuda/rank.h"

namespace cppool::kernels::cuda {
namespace {

CudaRank& RankOf(cppool_runtime* rt) { return *static_cast<CudaRank*>(rt->self); }
cudaStream_t Cuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Cuda(cppool_event event) { return reinterpret_cast<cudaEvent_t>(event); }

template <typename Body>
cppool_status Guard(cppool_runtime* rt, Body body) noexcept {
  CudaRank& rank = RankOf(rt);
  return rank.last_error().Guard([&] { body(rank); });
}

const char* LastErrorText(cppool_runtime* rt) { return RankOf(rt).last_error().failure().text; }
const cppool_failure* LastFailure(cppool_runtime* rt) { return &RankOf(rt).last_error().failure(); }

cppool_status Alloc(cppool_runtime* rt, size_t bytes, cppool_stream stream, void** out) {
  return Guard(rt, [&](CudaRank& rank) { *out = rank.Allocate(bytes, Cuda(stream)); });
}

cppool_status Free(cppool_runtime* rt, void* pointer, cppool_stream stream) {
  return Guard(rt, [&](CudaRank& rank) { rank.Free(pointer, Cuda(stream)); });
}

cppool_status AllocHost(cppool_runtime* rt, size_t bytes, void** out) {
  return Guard(rt, [&](CudaRank& rank) { *out = rank.AllocateHost(bytes); });
}

cppool_status FreeHost(cppool_runtime* rt, void* pointer) {
  return Guard(rt, [&](CudaRank& rank) { rank.FreeHost(pointer); });
}

cppool_status Copy(cppool_runtime* rt, void* to, const void* from, size_t bytes, cppool_stream stream) {
  return Guard(rt, [&](CudaRank&) {
    if (bytes) CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Cuda(stream)), "copying");
  });
}

cppool_status Fill(cppool_runtime* rt, void* to, int byte, size_t bytes, cppool_stream stream) {
  return Guard(rt, [&](CudaRank&) {
    if (bytes) CheckCuda(cudaMemsetAsync(to, byte, bytes, Cuda(stream)), "filling");
  });
}

cppool_status StreamCreate(cppool_runtime* rt, cppool_stream* out) {
  return Guard(rt, [&](CudaRank& rank) { *out = reinterpret_cast<cppool_stream>(rank.CreateStream()); });
}

cppool_status StreamDestroy(cppool_runtime* rt, cppool_stream stream) {
  return Guard(rt, [&](CudaRank& rank) { rank.DestroyStream(Cuda(stream)); });
}

cppool_status StreamSynchronize(cppool_runtime* rt, cppool_stream stream) {
  return Guard(rt, [&](CudaRank& rank) { rank.Synchronize(Cuda(stream)); });
}

cppool_status EventCreate(cppool_runtime* rt, cppool_event* out) {
  return Guard(rt, [&](CudaRank& rank) { *out = reinterpret_cast<cppool_event>(rank.CreateEvent()); });
}

cppool_status EventDestroy(cppool_runtime* rt, cppool_event event) {
  return Guard(rt, [&](CudaRank& rank) { rank.DestroyEvent(Cuda(event)); });
}

cppool_status EventRecord(cppool_runtime* rt, cppool_event event, cppool_stream stream) {
  return Guard(rt, [&](CudaRank& rank) {
    CheckCuda(cudaEventRecord(Cuda(event), Cuda(stream)), "recording an event");
    rank.NoteRecord(Cuda(event), Cuda(stream));
  });
}

cppool_status StreamWait(cppool_runtime* rt, cppool_stream stream, cppool_event event) {
  return Guard(rt, [&](CudaRank& rank) {
    CheckCuda(cudaStreamWaitEvent(Cuda(stream), Cuda(event), 0), "waiting for an event");
    rank.NoteWait(Cuda(stream), Cuda(event));
  });
}

cppool_status Enqueue(cppool_runtime* rt, cppool_stream stream, void (*function)(void*), void* argument) {
  return Guard(rt, [&](CudaRank& rank) { rank.Enqueue(Cuda(stream), function, argument); });
}

cppool_status GetGroup(cppool_runtime* rt, cppool_group which, cppool_comm* out, int* rank_out,
                       int* size_out) {
  return Guard(rt, [&](CudaRank& rank) {
    const auto shape = ShapeOf(which, rt->world_size);
    const CommGroup group = shape ? rank.world().group(rank.rank(), *shape) : CommGroup{};
    *out = group.comm;
    if (rank_out) *rank_out = group.rank;
    if (size_out) *size_out = group.size;
  });
}

cppool_status GetGroupOf(cppool_runtime* rt, int size, int stride, cppool_comm* out, int* rank_out,
                         int* size_out) {
  return Guard(rt, [&](CudaRank& rank) {
    *out = nullptr;
    const CommGroup group = rank.GroupOf(CheckedShape(size, stride, rt->world_size));
    *out = group.comm;
    if (rank_out) *rank_out = group.rank;
    if (size_out) *size_out = group.size;
  });
}

cppool_status GroupStart(cppool_runtime* rt) {
  return Guard(rt, [](CudaRank& rank) { rank.GroupStart(); });
}

cppool_status GroupEnd(cppool_runtime* rt) {
  return Guard(rt, [](CudaRank& rank) { rank.GroupEnd(); });
}

cppool_status Send(cppool_runtime* rt, const void* buffer, size_t bytes, int peer, cppool_comm comm,
                   cppool_stream stream) {
  return Guard(rt, [&](CudaRank& rank) {
    rank.BeginTransfer(Cuda(stream), "send to", bytes, peer, comm);
    rank.world().Send(rank.rank(), buffer, bytes, peer, comm, Cuda(stream));
    rank.EndCall();
  });
}

cppool_status Recv(cppool_runtime* rt, void* buffer, size_t bytes, int peer, cppool_comm comm,
                   cppool_stream stream) {
  return Guard(rt, [&](CudaRank& rank) {
    rank.BeginTransfer(Cuda(stream), "recv from", bytes, peer, comm);
    rank.world().Recv(rank.rank(), buffer, bytes, peer, comm, Cuda(stream));
    rank.EndCall();
  });
}

cppool_status Collect(cppool_runtime* rt, const CollectiveCall& call, cppool_comm comm,
                      cppool_stream stream) {
  return Guard(rt, [&](CudaRank& rank) {
    rank.BeginCollective(Cuda(stream), call, comm);
    rank.world().Collect(rank.rank(), call, comm, Cuda(stream));
    rank.EndCall();
  });
}

cppool_status Mark(cppool_runtime* rt, cppool_stream stream, const char* stage) {
  return Guard(rt, [&](CudaRank& rank) { rank.Mark(Cuda(stream), stage); });
}

}  // namespace

void FillTable(CudaRank* rank, cppool_runtime* table) {
  *table = {};
  table->abi = CPPOOL_RUNTIME_ABI;
  table->struct_size = sizeof(cppool_runtime);
  table->backend = "cuda";
  table->transport = rank->world().transport();
  table->rank = rank->rank();
  table->world_size = rank->world().size();
  table->device = rank->device();
  table->stream = reinterpret_cast<cppool_stream>(rank->main_stream());
  table->self = rank;
  table->last_error = LastErrorText;
  table->last_failure = LastFailure;
  table->alloc = Alloc;
  table->free = Free;
  table->alloc_host = AllocHost;
  table->free_host = FreeHost;
  table->copy = Copy;
  table->fill = Fill;
  table->stream_create = StreamCreate;
  table->stream_destroy = StreamDestroy;
  table->stream_synchronize = StreamSynchronize;
  table->event_create = EventCreate;
  table->event_destroy = EventDestroy;
  table->event_record = EventRecord;
  table->stream_wait = StreamWait;
  table->enqueue = Enqueue;
  table->group = GetGroup;
  table->group_of = GetGroupOf;
  table->group_start = GroupStart;
  table->group_end = GroupEnd;
  table->send = Send;
  table->recv = Recv;
  SetCollectives<Collect>(*table);
  table->mark = Mark;
}

}  // namespace cppool::kernels::cuda
