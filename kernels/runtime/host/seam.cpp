// The host's table of cppool/runtime.h: every function calls a member of HostRank and turns its exception
// into a status.
#include "kernels/runtime/host/rank.h"

namespace cppool::kernels::host {
namespace {

template <typename Body>
cppool_status Guard(cppool_runtime* rt, Body body) noexcept {
  HostRank& rank = HostRank::Of(rt);
  return rank.last_error().Guard([&] { body(rank); });
}

cppool_status Enqueue(cppool_runtime* rt, cppool_stream stream, void (*function)(void*), void* argument) {
  return Guard(rt, [&](HostRank& rank) { rank.Enqueue(stream, [=] { function(argument); }); });
}

cppool_status Collect(cppool_runtime* rt, const CollectiveCall& call, cppool_comm comm,
                      cppool_stream stream) {
  return Guard(rt, [&](HostRank& rank) { rank.Collect(call, comm, stream); });
}

}  // namespace

void FillSeam(cppool_runtime* seam) {
  using Rt = cppool_runtime;
  using Bytes = std::size_t;
  using S = cppool_stream;
  using E = cppool_event;
  using C = cppool_comm;
  seam->last_error = [](Rt* rt) { return HostRank::Of(rt).last_error().failure().text; };
  seam->last_failure = [](Rt* rt) { return &HostRank::Of(rt).last_error().failure(); };

  seam->alloc = [](Rt* rt, Bytes bytes, S stream, void** out) {
    return Guard(rt, [&](HostRank& rank) { *out = nullptr, *out = rank.Alloc(bytes, stream); });
  };
  seam->free = [](Rt* rt, void* ptr, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.Free(ptr, stream); });
  };
  seam->alloc_host = [](Rt* rt, Bytes bytes, void** out) {
    return Guard(rt, [&](HostRank& rank) { *out = nullptr, *out = rank.AllocHost(bytes); });
  };
  seam->free_host = [](Rt* rt, void* ptr) { return Guard(rt, [&](HostRank& rank) { rank.FreeHost(ptr); }); };
  seam->copy = [](Rt* rt, void* to, const void* from, Bytes bytes, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.Copy(to, from, bytes, stream); });
  };
  seam->fill = [](Rt* rt, void* to, int byte, Bytes bytes, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.Fill(to, byte, bytes, stream); });
  };

  seam->stream_create = [](Rt* rt, S* out) {
    return Guard(rt, [&](HostRank& rank) { *out = rank.CreateStream(); });
  };
  seam->stream_destroy = [](Rt* rt, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.DestroyStream(stream); });
  };
  seam->stream_synchronize = [](Rt* rt, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.Synchronize(stream); });
  };
  seam->event_create = [](Rt* rt, E* out) {
    return Guard(rt, [&](HostRank& rank) { *out = rank.CreateEvent(); });
  };
  seam->event_destroy = [](Rt* rt, E event) {
    return Guard(rt, [&](HostRank& rank) { rank.DestroyEvent(event); });
  };
  seam->event_record = [](Rt* rt, E event, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.Record(event, stream); });
  };
  seam->stream_wait = [](Rt* rt, S stream, E event) {
    return Guard(rt, [&](HostRank& rank) { rank.WaitFor(stream, event); });
  };
  seam->enqueue = Enqueue;

  seam->group = [](Rt* rt, cppool_group which, C* out, int* group_rank, int* size) {
    return Guard(rt, [&](HostRank& rank) {
      *out = nullptr;
      if (group_rank) *group_rank = 0;
      if (size) *size = 0;
      if (const auto shape = ShapeOf(which, rt->world_size)) *out = rank.Group(*shape, group_rank, size);
    });
  };
  seam->group_of = [](Rt* rt, int size, int stride, C* out, int* group_rank, int* group_size) {
    return Guard(rt, [&](HostRank& rank) {
      *out = nullptr;
      *out = rank.Group(CheckedShape(size, stride, rt->world_size), group_rank, group_size);
    });
  };
  seam->group_start = [](Rt* rt) { return Guard(rt, [&](HostRank& rank) { rank.GroupStart(); }); };
  seam->group_end = [](Rt* rt) { return Guard(rt, [&](HostRank& rank) { rank.GroupEnd(); }); };
  seam->send = [](Rt* rt, const void* data, Bytes bytes, int peer, C comm, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.Send(data, bytes, peer, comm, stream); });
  };
  seam->recv = [](Rt* rt, void* data, Bytes bytes, int peer, C comm, S stream) {
    return Guard(rt, [&](HostRank& rank) { rank.Recv(data, bytes, peer, comm, stream); });
  };
  SetCollectives<Collect>(*seam);

  seam->mark = [](Rt* rt, S stream, const char* stage) {
    return Guard(rt, [&](HostRank& rank) { rank.MarkStage(stream, stage); });
  };
}

}  // namespace cppool::kernels::host
