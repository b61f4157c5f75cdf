// The functions of the seam's table for a CudaRank. Exceptions end here.
#include <new>

#include "runtime/cuda_rank.h"

namespace cppool::kernels::cuda {
namespace {

CudaRank& RankOf(cppool_runtime* rt) { return *static_cast<CudaRank*>(rt->self); }
cudaStream_t Cuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Cuda(cppool_event event) { return reinterpret_cast<cudaEvent_t>(event); }
ncclComm_t Nccl(cppool_comm comm) { return reinterpret_cast<ncclComm_t>(comm); }

template <typename Body>
cppool_status Guard(cppool_runtime* rt, Body body) noexcept {
  CudaRank& rank = RankOf(rt);
  try {
    body(rank);
    return CPPOOL_OK;
  } catch (const RuntimeError& error) {
    return rank.Fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return rank.Fail(CPPOOL_OUT_OF_MEMORY, "no host memory");
  } catch (const std::exception& error) {
    return rank.Fail(CPPOOL_INTERNAL, error.what());
  } catch (...) {
    return rank.Fail(CPPOOL_INTERNAL, "an exception of no known type");
  }
}

// As Guard, for calls of NCCL.
template <typename Body>
cppool_status GuardNccl(cppool_runtime* rt, Body body) noexcept {
  return Guard(rt, [&](CudaRank& rank) {
    const NcclWorld::Call call(rank.world(), rank.rank());
    body(rank);
  });
}

ncclDataType_t DataType(cppool_dtype dtype) {
  switch (dtype) {
    case CPPOOL_FLOAT16:
      return ncclFloat16;
    case CPPOOL_BFLOAT16:
      return ncclBfloat16;
    case CPPOOL_FLOAT32:
      return ncclFloat32;
    case CPPOOL_FLOAT64:
      return ncclFloat64;
    case CPPOOL_INT32:
      return ncclInt32;
    case CPPOOL_INT64:
      return ncclInt64;
    case CPPOOL_UINT8:
      return ncclUint8;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such dtype: " + std::to_string(static_cast<int>(dtype)));
}

ncclRedOp_t Reduction(cppool_reduce reduce) {
  switch (reduce) {
    case CPPOOL_SUM:
      return ncclSum;
    case CPPOOL_MAX:
      return ncclMax;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such reduction: " + std::to_string(static_cast<int>(reduce)));
}

const char* LastError(cppool_runtime* rt) { return RankOf(rt).last_error(); }

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
  return Guard(
      rt, [&](CudaRank&) { CheckCuda(cudaEventRecord(Cuda(event), Cuda(stream)), "recording an event"); });
}

cppool_status StreamWait(cppool_runtime* rt, cppool_stream stream, cppool_event event) {
  return Guard(rt, [&](CudaRank&) {
    CheckCuda(cudaStreamWaitEvent(Cuda(stream), Cuda(event), 0), "waiting for an event");
  });
}

cppool_status Enqueue(cppool_runtime* rt, cppool_stream stream, void (*function)(void*), void* argument) {
  return Guard(rt, [&](CudaRank& rank) { rank.Enqueue(Cuda(stream), function, argument); });
}

cppool_status GetGroup(cppool_runtime* rt, cppool_group which, cppool_comm* out, int* rank_out,
                       int* size_out) {
  return Guard(rt, [&](CudaRank& rank) {
    if (which < CPPOOL_WORLD || which > CPPOOL_STRIDE) throw RuntimeError(CPPOOL_INTERNAL, "no such group");
    const NcclGroup& group = rank.world().group(rank.rank(), which);
    *out = reinterpret_cast<cppool_comm>(group.comm);
    *rank_out = group.rank;
    *size_out = group.size;
  });
}

cppool_status GroupStart(cppool_runtime* rt) {
  return GuardNccl(rt, [](CudaRank&) { CheckNccl(ncclGroupStart(), "starting a group of calls"); });
}

cppool_status GroupEnd(cppool_runtime* rt) {
  return GuardNccl(rt, [](CudaRank&) { CheckNccl(ncclGroupEnd(), "ending a group of calls"); });
}

cppool_status Send(cppool_runtime* rt, const void* buffer, size_t bytes, int peer, cppool_comm comm,
                   cppool_stream stream) {
  return GuardNccl(rt, [&](CudaRank&) {
    CheckNccl(ncclSend(buffer, bytes, ncclUint8, peer, Nccl(comm), Cuda(stream)), "sending");
  });
}

cppool_status Recv(cppool_runtime* rt, void* buffer, size_t bytes, int peer, cppool_comm comm,
                   cppool_stream stream) {
  return GuardNccl(rt, [&](CudaRank&) {
    CheckNccl(ncclRecv(buffer, bytes, ncclUint8, peer, Nccl(comm), Cuda(stream)), "receiving");
  });
}

cppool_status AllGather(cppool_runtime* rt, const void* in, void* out, size_t bytes, cppool_comm comm,
                        cppool_stream stream) {
  return GuardNccl(rt, [&](CudaRank&) {
    CheckNccl(ncclAllGather(in, out, bytes, ncclUint8, Nccl(comm), Cuda(stream)), "all_gather");
  });
}

cppool_status ReduceScatter(cppool_runtime* rt, const void* in, void* out, size_t count, cppool_dtype dtype,
                            cppool_reduce reduce, cppool_comm comm, cppool_stream stream) {
  return GuardNccl(rt, [&](CudaRank&) {
    CheckNccl(ncclReduceScatter(in, out, count, DataType(dtype), Reduction(reduce), Nccl(comm), Cuda(stream)),
              "reduce_scatter");
  });
}

cppool_status AllReduce(cppool_runtime* rt, const void* in, void* out, size_t count, cppool_dtype dtype,
                        cppool_reduce reduce, cppool_comm comm, cppool_stream stream) {
  return GuardNccl(rt, [&](CudaRank&) {
    CheckNccl(ncclAllReduce(in, out, count, DataType(dtype), Reduction(reduce), Nccl(comm), Cuda(stream)),
              "all_reduce");
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
  table->rank = rank->rank();
  table->world_size = rank->world().size();
  table->device = rank->rank();
  table->stream = reinterpret_cast<cppool_stream>(rank->main_stream());
  table->self = rank;
  table->last_error = LastError;
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
  table->group_start = GroupStart;
  table->group_end = GroupEnd;
  table->send = Send;
  table->recv = Recv;
  table->all_gather = AllGather;
  table->reduce_scatter = ReduceScatter;
  table->all_reduce = AllReduce;
  table->mark = Mark;
}

}  // namespace cppool::kernels::cuda
