#include "kernels/runtime/cuda/nccl_api.h"

#include <dlfcn.h>

#include <string>

#include "kernels/error.h"

namespace cppool::kernels::cuda {
namespace {

template <typename Function>
void Find(void* library, const char* file, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function) return;
  throw RuntimeError(CPPOOL_NCCL, std::string(file) + " has no " + name +
                                      ": install a newer NCCL, or set LD_LIBRARY_PATH to the folder of one");
}

}  // namespace

NcclApi::NcclApi(const char* file) {
  // Never closed: NCCL has its own threads.
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* const error = dlerror();
    throw RuntimeError(CPPOOL_NCCL,
                       "NCCL was not found (" + std::string(error ? error : file) +
                           "): install libnccl2, or PyPI's nvidia-nccl-cu13 where cppool's wheel is (pip "
                           "install 'cppool[nccl]'), "
                           "or set LD_LIBRARY_PATH to the folder that holds libnccl.so.2, such as "
                           "site-packages/nvidia/nccl/lib. The transport "
                           "peer needs no NCCL");
  }
  Find(library, file, "ncclGetVersion", &GetVersion);
  Find(library, file, "ncclGetUniqueId", &GetUniqueId);
  Find(library, file, "ncclGetErrorString", &GetErrorString);
  Find(library, file, "ncclGetLastError", &GetLastError);
  Find(library, file, "ncclCommInitRankConfig", &CommInitRankConfig);
  Find(library, file, "ncclCommSplit", &CommSplit);
  Find(library, file, "ncclCommDestroy", &CommDestroy);
  Find(library, file, "ncclCommAbort", &CommAbort);
  Find(library, file, "ncclCommGetAsyncError", &CommGetAsyncError);
  Find(library, file, "ncclGroupStart", &GroupStart);
  Find(library, file, "ncclGroupEnd", &GroupEnd);
  Find(library, file, "ncclSend", &Send);
  Find(library, file, "ncclRecv", &Recv);
  Find(library, file, "ncclAllGather", &AllGather);
  Find(library, file, "ncclReduceScatter", &ReduceScatter);
  Find(library, file, "ncclAllReduce", &AllReduce);
}

const NcclApi& Nccl() {
  static const NcclApi api("libnccl.so.2");  // when it throws, the next call tries again
  return api;
}

void CheckNccl(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  const NcclApi& nccl = Nccl();
  std::string detail = std::string(what) + ": " + nccl.GetErrorString(result);
  const char* last = nccl.GetLastError(nullptr);
  if (last && *last) detail += std::string(" (") + last + ")";
  throw RuntimeError(CPPOOL_NCCL, detail);
}

}  // namespace cppool::kernels::cuda
