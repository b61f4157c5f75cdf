// A library that stands for NCCL where no GPU is: communicators are made when all of their ranks have come,
// as NCCL makes them, whichever world or process object they are of. It moves no data.
#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

namespace {

struct Comm {
  std::string id;
  int ranks = 0, splits = 0;
};

std::mutex mutex;
std::condition_variable changed;
std::map<std::string, int> arrived;  // by id; of a split: by the parent's id and its number
int made = 0;

// False: not all have come in time.
bool Meet(const std::string& id, int ranks) {
  std::unique_lock lock(mutex);
  ++arrived[id];
  changed.notify_all();
  return changed.wait_for(lock, std::chrono::seconds(20), [&] { return arrived[id] >= ranks; });
}

ncclResult_t Success() { return ncclSuccess; }

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(mutex);
  ++made;
  for (std::size_t i = 0; i < sizeof(id->internal); ++i)
    id->internal[i] = static_cast<char>(i * 37 + static_cast<std::size_t>(made));
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "simulated error"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int, ncclConfig_t*) {
  const std::string name(id.internal, sizeof(id.internal));
  if (!Meet(name, ranks)) return ncclSystemError;
  *comm = reinterpret_cast<ncclComm_t>(new Comm{name, ranks});
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int, ncclComm_t* made_comm, ncclConfig_t*) {
  auto* const parent = reinterpret_cast<Comm*>(comm);
  const std::string name = parent->id + "/" + std::to_string(++parent->splits);
  if (!Meet(name, parent->ranks)) return ncclSystemError;
  *made_comm = reinterpret_cast<ncclComm_t>(new Comm{name + "/" + std::to_string(color), 0});
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete reinterpret_cast<Comm*>(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
  *state = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() { return Success(); }
ncclResult_t ncclGroupEnd() { return Success(); }
ncclResult_t ncclSend(const void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return Success();
}
ncclResult_t ncclRecv(void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return Success(); }
ncclResult_t ncclAllGather(const void*, void*, std::size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
  return Success();
}
ncclResult_t ncclReduceScatter(const void*, void*, std::size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                               cudaStream_t) {
  return Success();
}
ncclResult_t ncclAllReduce(const void*, void*, std::size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t) {
  return Success();
}

}  // extern "C"
