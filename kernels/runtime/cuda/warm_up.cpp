// What would otherwise happen at the first use, in the middle of a case: NCCL connects peers when they first
// talk, CUDA loads its own kernels and starts its callback thread when they are first needed, and all of it
// can wait for the device.
#include <cstring>

#include "kernels/runtime.h"
#include "kernels/runtime/cuda/break_device.h"
#include "kernels/runtime/cuda/rank.h"
#include "kernels/runtime/cuda/hold_stream.h"

namespace cppool::kernels::cuda {
namespace {

constexpr std::size_t kFloats = std::size_t{4}
                                << 20;  // 16 MiB: enough for NCCL to choose what it uses for large buffers

void WarmUpGroup(cppool_runtime* rt, const Group& group, float* in, float* out) {
  const cppool_stream stream = rt->stream;
  const std::size_t part = kFloats / static_cast<std::size_t>(group.size);
  const std::size_t piece = part / static_cast<std::size_t>(group.size);
  Check(rt, rt->all_reduce(rt, in, out, 1, CPPOOL_FLOAT32, CPPOOL_SUM, group.comm, stream));
  Check(rt, rt->all_reduce(rt, in, out, kFloats, CPPOOL_FLOAT32, CPPOOL_SUM, group.comm, stream));
  Check(rt, rt->all_gather(rt, in, out, part * sizeof(float), group.comm, stream));
  Check(rt, rt->reduce_scatter(rt, in, out, part, CPPOOL_FLOAT32, CPPOOL_SUM, group.comm, stream));
  GroupedCalls calls(rt);
  for (int peer = 0; peer < group.size; ++peer) {
    const std::size_t offset = static_cast<std::size_t>(peer) * piece;
    Check(rt, rt->send(rt, in + offset, piece * sizeof(float), peer, group.comm, stream));
    Check(rt, rt->recv(rt, out + offset, piece * sizeof(float), peer, group.comm, stream));
  }
  calls.End();
}

}  // namespace

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
  cppool_runtime* const rt = rank.seam();
  {
    const Buffer in(rt, kFloats * sizeof(float), rt->stream);
    const Buffer out(rt, kFloats * sizeof(float), rt->stream);
    Check(rt, rt->fill(rt, in.get(), 0, kFloats * sizeof(float), rt->stream));
    for (const cppool_group which : {CPPOOL_WORLD, CPPOOL_PAIR, CPPOOL_STRIDE}) {
      const Group group = GetGroup(rt, which);
      if (group.comm) WarmUpGroup(rt, group, in.get<float>(), out.get<float>());
    }
    Check(rt, rt->stream_synchronize(rt, rt->stream));
  }
  rank.EndCase();
  rank.Trim();
}

}  // namespace cppool::kernels::cuda
