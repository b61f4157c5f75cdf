// NCCL's functions, found in libnccl.so.2 when the first world needs them: without the transport nccl it need
// not be installed.
#pragma once

#include <nccl.h>

namespace cppool::kernels::cuda {

struct NcclApi {
  // Opens the library and finds the functions. Throws RuntimeError(CPPOOL_NCCL) that says what to do.
  explicit NcclApi(const char* file);

  decltype(&ncclGetVersion) GetVersion;
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&ncclCommSplit) CommSplit;
  decltype(&ncclCommDestroy) CommDestroy;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclGroupStart) GroupStart;
  decltype(&ncclGroupEnd) GroupEnd;
  decltype(&ncclSend) Send;
  decltype(&ncclRecv) Recv;
  decltype(&ncclAllGather) AllGather;
  decltype(&ncclReduceScatter) ReduceScatter;
  decltype(&ncclAllReduce) AllReduce;
};

// libnccl.so.2, opened by the first call that succeeds. Any thread. Throws as NcclApi's constructor does.
const NcclApi& Nccl();

// Throws RuntimeError(CPPOOL_NCCL) with NCCL's own last error text where it has one. `what` says what was
// being done.
void CheckNccl(ncclResult_t result, const char* what);

}  // namespace cppool::kernels::cuda
