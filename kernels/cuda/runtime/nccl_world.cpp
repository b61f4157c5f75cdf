#include "runtime/nccl_world.h"

#include <chrono>
#include <thread>

namespace cppool::kernels::cuda {
namespace {

using namespace std::chrono_literals;

// Older ones write into the buffers of peers in the same process, which stream-ordered memory does not allow
// without more set-up.
constexpr int kOldestNccl = 22400;

std::string VersionText(int code) {
  return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
         std::to_string(code % 100);
}

void CheckVersion() {
  int version = 0;
  CheckNccl(ncclGetVersion(&version), "asking NCCL for its version");
  if (version < kOldestNccl || version / 10000 != NCCL_VERSION_CODE / 10000) {
    throw RuntimeError(CPPOOL_NCCL, "NCCL " + VersionText(version) + " was loaded; this build needs NCCL " +
                                        std::to_string(NCCL_MAJOR) + ", at least " +
                                        VersionText(kOldestNccl) + " (built with " +
                                        VersionText(NCCL_VERSION_CODE) +
                                        "): put that one's folder first in LD_LIBRARY_PATH");
  }
}

}  // namespace

NcclWorld::NcclWorld(int size) : size_(size) {
  CheckVersion();
  for (int rank = 0; rank < size; ++rank) ranks_.push_back(std::make_unique<Rank>());
  id_ = std::async(std::launch::async, [] {
          ncclUniqueId id;
          CheckNccl(ncclGetUniqueId(&id), "making the communicators' id");
          return id;
        }).share();
}

void NcclWorld::Arrive(int rank, const std::string& failure) {
  std::unique_lock lock(start_mutex_);
  ++arrived_;
  if (!failure.empty() && start_failure_.empty())
    start_failure_ = "rank " + std::to_string(rank) + " could not start: " + failure;
  start_changed_.notify_all();
  // A context takes seconds on a busy machine; a rank that has not come after a minute will not.
  const bool all =
      start_changed_.wait_for(lock, 60s, [&] { return arrived_ == size_ || !start_failure_.empty(); });
  if (!start_failure_.empty()) throw RuntimeError(CPPOOL_CUDA, start_failure_);
  if (!all) {
    throw RuntimeError(CPPOOL_TIMEOUT, std::to_string(size_ - arrived_) + " of " + std::to_string(size_) +
                                           " ranks have no CUDA context after 60 s");
  }
}

void NcclWorld::JoinWorld(int rank) {
  const ncclUniqueId id = id_.get();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  // Pairs and strides then use the world's buffers and connections (it is the parent's setting that counts):
  // nearly a gigabyte less per device and group. NCCL runs a rank's communicators one after another in the
  // order of the calls, as schedules ask for with events anyway.
  config.splitShare = 1;
  NcclGroup& world = ranks_[rank]->groups[CPPOOL_WORLD];
  ncclComm_t comm = nullptr;
  // Waits for the other ranks, which have all arrived. Should one fail in here, it throws and its process has
  // to end.
  CheckNccl(ncclCommInitRankConfig(&comm, size_, id, rank, &config), "joining the world's communicator");
  world = {comm, rank, size_};
}

void NcclWorld::JoinGroups(int rank) {
  if (!HasGroups()) return;
  const Call call(*this, rank);
  Rank& mine = *ranks_[rank];
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  config.splitShare = 1;
  const ncclComm_t world = mine.groups[CPPOOL_WORLD].comm;
  ncclComm_t pair = nullptr;
  CheckNccl(ncclCommSplit(world, rank / 2, rank, &pair, &config), "splitting the pairs off");
  mine.groups[CPPOOL_PAIR] = {pair, rank % 2, 2};
  ncclComm_t stride = nullptr;
  CheckNccl(ncclCommSplit(world, rank % 2, rank, &stride, &config), "splitting the strides off");
  mine.groups[CPPOOL_STRIDE] = {stride, rank / 2, size_ / 2};
}

void NcclWorld::Leave(int rank) noexcept {
  if (aborted()) return;  // without the lock, which the abort may hold for long
  const std::lock_guard lock(ranks_[rank]->in_call);
  if (aborted()) return;
  NcclGroup* const groups = ranks_[rank]->groups;
  for (const cppool_group which :
       {CPPOOL_STRIDE, CPPOOL_PAIR, CPPOOL_WORLD}) {  // children before their parent
    if (groups[which].comm) ncclCommDestroy(groups[which].comm);
    groups[which] = {};
  }
}

void NcclWorld::ThrowIfAborted() const {
  if (!aborted()) return;
  const std::lock_guard lock(abort_mutex_);
  throw RuntimeError(CPPOOL_NCCL, "the world was aborted: " + abort_reason_);
}

void NcclWorld::CheckHealth(int rank) {
  const Call call(*this, rank);
  for (const NcclGroup& group : ranks_[rank]->groups) {
    if (!group.comm) continue;
    ncclResult_t state = ncclSuccess;
    CheckNccl(ncclCommGetAsyncError(group.comm, &state), "asking a communicator for its state");
    if (state != ncclInProgress) CheckNccl(state, "a communicator failed");
  }
}

void NcclWorld::Abort(const std::shared_ptr<NcclWorld>& world, const std::string& reason) {
  {
    const std::lock_guard lock(world->abort_mutex_);
    if (world->aborted_) return;
    world->abort_reason_ = reason;
    world->aborted_.store(true, std::memory_order_release);
  }
  // ncclCommAbort can wait for the device: nobody joins this thread, and it keeps what it uses alive.
  std::thread([world] { world->AbortCommunicators(); }).detach();
}

void NcclWorld::AbortCommunicators() {
  // Calls that return are waited for; one that is stuck is what the abort is for.
  const auto patience = std::chrono::steady_clock::now() + 200ms;
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  for (const auto& rank : ranks_) locks.emplace_back(rank->in_call, patience);
  for (const cppool_group which : {CPPOOL_STRIDE, CPPOOL_PAIR, CPPOOL_WORLD}) {
    for (const auto& rank : ranks_) {
      if (rank->groups[which].comm) ncclCommAbort(rank->groups[which].comm);
    }
  }
}

}  // namespace cppool::kernels::cuda
