// The functions of cppool/runtime.h's table over a backend's rank: every one calls a member of the rank that
// `self` points to, and turns its exception into a status.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>

#include "kernels/backend.h"
#include "kernels/group_shape.h"
#include "kernels/runtime/common/collective_call.h"
#include "kernels/runtime/common/last_error.h"

namespace cppool::kernels {

// All but transport, device and the main stream. The members have handles of types of their own, Rank::Stream
// and Rank::Event: pointers.
template <typename Rank>
void FillSeam(Rank& of, const char* backend, int world_size, cppool_runtime* seam) {
  seam->abi = CPPOOL_RUNTIME_ABI;
  seam->struct_size = sizeof(cppool_runtime);
  seam->backend = backend;
  seam->rank = of.rank();
  seam->world_size = world_size;
  seam->self = static_cast<RankRuntime*>(&of);
  using Rt = cppool_runtime;
  using Bytes = std::size_t;
  using S = cppool_stream;
  using E = cppool_event;
  using C = cppool_comm;
  static constexpr auto kOf = [](Rt* rt) -> Rank& { return static_cast<Rank&>(RuntimeOf(rt)); };
  static constexpr auto kGuard = [](Rt* rt, auto body) noexcept {
    return kOf(rt).last_error().Guard([&] { body(kOf(rt)); });
  };
  static constexpr auto kStream = [](S stream) { return reinterpret_cast<typename Rank::Stream>(stream); };
  static constexpr auto kEvent = [](E event) { return reinterpret_cast<typename Rank::Event>(event); };

  seam->last_error = [](Rt* rt) { return kOf(rt).last_error().failure().text; };
  seam->last_failure = [](Rt* rt) { return &kOf(rt).last_error().failure(); };

  seam->alloc = [](Rt* rt, Bytes bytes, S stream, void** out) {
    return kGuard(rt, [&](Rank& rank) { *out = nullptr, *out = rank.Allocate(bytes, kStream(stream)); });
  };
  seam->free = [](Rt* rt, void* pointer, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Free(pointer, kStream(stream)); });
  };
  seam->alloc_host = [](Rt* rt, Bytes bytes, void** out) {
    return kGuard(rt, [&](Rank& rank) { *out = nullptr, *out = rank.AllocateHost(bytes); });
  };
  seam->free_host = [](Rt* rt, void* pointer) {
    return kGuard(rt, [&](Rank& rank) { rank.FreeHost(pointer); });
  };
  seam->copy = [](Rt* rt, void* to, const void* from, Bytes bytes, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Copy(to, from, bytes, kStream(stream)); });
  };
  seam->fill = [](Rt* rt, void* to, int byte, Bytes bytes, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Fill(to, byte, bytes, kStream(stream)); });
  };

  seam->stream_create = [](Rt* rt, S* out) {
    return kGuard(rt, [&](Rank& rank) { *out = reinterpret_cast<S>(rank.CreateStream()); });
  };
  seam->stream_destroy = [](Rt* rt, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.DestroyStream(kStream(stream)); });
  };
  seam->stream_synchronize = [](Rt* rt, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Synchronize(kStream(stream)); });
  };
  seam->event_create = [](Rt* rt, E* out) {
    return kGuard(rt, [&](Rank& rank) { *out = reinterpret_cast<E>(rank.CreateEvent()); });
  };
  seam->event_destroy = [](Rt* rt, E event) {
    return kGuard(rt, [&](Rank& rank) { rank.DestroyEvent(kEvent(event)); });
  };
  seam->event_record = [](Rt* rt, E event, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Record(kEvent(event), kStream(stream)); });
  };
  seam->stream_wait = [](Rt* rt, S stream, E event) {
    return kGuard(rt, [&](Rank& rank) { rank.WaitFor(kStream(stream), kEvent(event)); });
  };
  seam->enqueue = [](Rt* rt, S stream, void (*function)(void*), void* argument) {
    return kGuard(rt, [&](Rank& rank) { rank.Enqueue(kStream(stream), function, argument); });
  };

  seam->group = [](Rt* rt, cppool_group which, C* out, int* group_rank, int* size) {
    return kGuard(rt, [&](Rank& rank) {
      *out = nullptr;
      if (group_rank) *group_rank = 0;
      if (size) *size = 0;
      if (const auto shape = ShapeOf(which, rt->world_size)) *out = rank.Group(*shape, group_rank, size);
    });
  };
  seam->group_of = [](Rt* rt, int size, int stride, C* out, int* group_rank, int* group_size) {
    return kGuard(rt, [&](Rank& rank) {
      *out = nullptr;
      *out = rank.GroupOf(CheckedShape(size, stride, rt->world_size), group_rank, group_size);
    });
  };
  seam->group_start = [](Rt* rt) { return kGuard(rt, [](Rank& rank) { rank.GroupStart(); }); };
  seam->group_end = [](Rt* rt) { return kGuard(rt, [](Rank& rank) { rank.GroupEnd(); }); };
  seam->send = [](Rt* rt, const void* data, Bytes bytes, int peer, C comm, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Send(data, bytes, peer, comm, kStream(stream)); });
  };
  seam->recv = [](Rt* rt, void* data, Bytes bytes, int peer, C comm, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Recv(data, bytes, peer, comm, kStream(stream)); });
  };
  SetCollectives<[](Rt* rt, const CollectiveCall& call, C comm, S stream) {
    return kGuard(rt, [&](Rank& rank) { rank.Collect(call, comm, kStream(stream)); });
  }>(*seam);

  seam->mark = [](Rt* rt, S stream, const char* stage) {
    return kGuard(rt, [&](Rank& rank) { rank.MarkStage(kStream(stream), stage); });
  };
}

}  // namespace cppool::kernels
