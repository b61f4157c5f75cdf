// Work that would otherwise be done at the first use, during a case: NCCL connects peers at their first
// exchange, CUDA loads its own kernels and starts its callback thread when they are first needed. All of it
// can wait for the device.
#include <cstring>

#include "kernels/runtime.h"
#include "kernels/runtime/cuda/device_faults.h"
#include "kernels/runtime/cuda/rank.h"

namespace cppool::kernels::cuda {
namespace {

// 16 MiB: enough for NCCL to choose the algorithms that it uses for large buffers.
constexpr std::size_t kFloats = std::size_t{4} << 20;

}  // namespace

WarmUpBuffers::WarmUpBuffers(cppool_runtime* rt)
    : in(rt, kFloats * sizeof(float), rt->stream), out(rt, kFloats * sizeof(float), rt->stream) {
  Check(rt, rt->fill(rt, in.get(), 0, in.bytes(), rt->stream));
}

// Not through the rank's table: these calls are no part of the case that may be running.
void WarmUpGroup(CudaRank& rank, const CommGroup& group, const WarmUpBuffers& buffers) {
  CommWorld& world = rank.world();
  const int me = rank.rank();
  const cudaStream_t stream = rank.main_stream();
  float* const in = buffers.in.get<float>();
  float* const out = buffers.out.get<float>();
  const std::size_t part = kFloats / static_cast<std::size_t>(group.size);
  const std::size_t piece = part / static_cast<std::size_t>(group.size);
  const auto collect = [&](Collective what, std::size_t count, cppool_dtype dtype = CPPOOL_FLOAT32) {
    world.Collect(me, {what, dtype, CPPOOL_SUM, count, in, out}, group.comm, stream);
  };
  collect(Collective::kAllReduce, 1);
  collect(Collective::kAllReduce, kFloats);
  collect(Collective::kAllGather, part * sizeof(float), CPPOOL_UINT8);
  collect(Collective::kReduceScatter, part);
  world.GroupStart(me);
  for (int peer = 0; peer < group.size; ++peer) {
    const std::size_t offset = static_cast<std::size_t>(peer) * piece;
    world.Send(me, in + offset, piece * sizeof(float), peer, group.comm, stream);
    world.Recv(me, out + offset, piece * sizeof(float), peer, group.comm, stream);
  }
  world.GroupEnd(me);
  rank.Synchronize(stream);
}

void WarmUpDevice(CudaRank& rank) {
  cppool_runtime* const rt = rank.seam();
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  {
    const Stream side(rt);
    Event event(rt);
    Buffer buffer(rt, kBytes, rt->stream);
    void* host = nullptr;
    Check(rt, rt->alloc_host(rt, kBytes, &host));
    std::memset(host, 0, kBytes);
    Check(rt, rt->mark(rt, rt->stream, "warm_up"));
    Check(rt, rt->fill(rt, buffer.get(), 0, kBytes, rt->stream));
    Check(rt, rt->copy(rt, buffer.get(), host, kBytes, rt->stream));
    Check(rt, rt->copy(rt, buffer.at(kBytes / 2), buffer.get(), kBytes / 2, rt->stream));
    Check(rt, rt->copy(rt, host, buffer.get(), kBytes, rt->stream));
    Check(rt, rt->enqueue(
                  rt, rt->stream, [](void*) {}, nullptr));
    event.Record(rt->stream);
    event.Wait(side.get());
    HoldStream(rank.main_stream(), std::chrono::nanoseconds(0));
    LoadDeviceFaults();
    Check(rt, rt->mark(rt, rt->stream, nullptr));
    Check(rt, rt->stream_synchronize(rt, side.get()));
    Check(rt, rt->free_host(rt, host));
  }
  rank.EndCase();
}

void WarmUpCommunicators(CudaRank& rank) {
  {
    const WarmUpBuffers buffers(rank.seam());
    for (const GroupShape shape : rank.Groups())
      WarmUpGroup(rank, rank.world().group(rank.rank(), shape), buffers);
  }
  rank.EndCase();
  rank.Trim();
}

}  // namespace cppool::kernels::cuda
