#include "kernels/runtime/cuda/nccl_world.h"

#include <array>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "kernels/runtime/common/dtype.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

using namespace std::chrono_literals;

// Older versions write into the buffers of peers in the same process, which stream-ordered memory does not
// allow without further set-up.
constexpr int kOldestNccl = 22400;

std::string VersionText(int code) {
  return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
         std::to_string(code % 100);
}

void CheckVersion(const NcclApi& nccl) {
  int version = 0;
  CheckNccl(nccl.GetVersion(&version), "asking NCCL for its version");
  if (version < kOldestNccl || version / 10000 != NCCL_VERSION_CODE / 10000) {
    throw RuntimeError(CPPOOL_NCCL, "NCCL " + VersionText(version) + " was loaded; this build needs NCCL " +
                                        std::to_string(NCCL_MAJOR) + ", at least " +
                                        VersionText(kOldestNccl) + " (built with " +
                                        VersionText(NCCL_VERSION_CODE) +
                                        "): put that one's folder first in LD_LIBRARY_PATH");
  }
}

ncclComm_t Handle(cppool_comm comm) { return reinterpret_cast<ncclComm_t>(comm); }

ncclDataType_t DataType(cppool_dtype dtype) {
  CheckDtype(dtype);
  static constexpr auto kTypes =
      std::to_array({ncclFloat16, ncclBfloat16, ncclFloat32, ncclFloat64, ncclInt32, ncclInt64,
                     ncclUint8});  // in the order of the enumerators
  static_assert(kTypes.size() == CPPOOL_UINT8 + 1);
  return kTypes[dtype];
}

ncclRedOp_t Reduction(cppool_reduce reduce) {
  CheckReduction(reduce);
  return reduce == CPPOOL_SUM ? ncclSum : ncclMax;
}

}  // namespace

NcclWorld::NcclWorld(const Place& place, WorldLink link)
    : CommWorld(place, place.ranks, std::move(link.tell)),
      nccl_(Nccl()),
      copies_(size(), size()),
      copying_(place.whole() && size() > 1 && !copies_.WhyNoRing()),
      exchange_(std::move(link.exchange)) {
  CheckVersion(nccl_);
  for (int rank = 0; rank < size(); ++rank) ranks_.push_back(std::make_unique<Rank>());
  if (place.first == 0) {
    id_ = std::async(std::launch::async, [&nccl = nccl_] {
            ncclUniqueId id;
            CheckNccl(nccl.GetUniqueId(&id), "making the communicators' id");
            return id;
          }).share();
  }
}

ncclUniqueId NcclWorld::ExchangeId() {
  ncclUniqueId id{};
  std::string own;
  if (place().first == 0) {
    id = id_.get();
    for (const char byte : id.internal) {
      own += "0123456789abcdef"[static_cast<unsigned char>(byte) >> 4];
      own += "0123456789abcdef"[byte & 15];
    }
  }
  const std::string text = exchange_(own).at(0);
  if (text.size() != 2 * sizeof(id.internal))
    throw RuntimeError(CPPOOL_NCCL, "the first process of the world sent no id of NCCL");
  for (std::size_t i = 0; i < sizeof(id.internal); ++i)
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

ncclUniqueId NcclWorld::IdFor(int rank) {
  if (place().whole()) return id_.get();
  if (rank == place().first) {  // for all ranks here, which have arrived
    try {
      shared_id_.set_value(ExchangeId());
    } catch (...) {
      shared_id_.set_exception(std::current_exception());
    }
  }
  return shared_id_over_.get();
}

void NcclWorld::JoinWorld(int rank) {
  const ncclUniqueId id = IdFor(rank);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  // Communicators split off this one then use its buffers and connections (the parent's setting decides):
  // nearly a gigabyte less per device and group. NCCL runs the calls on a rank's communicators in the order
  // in which they were made, as schedules require with events anyway.
  config.splitShare = 1;
  ncclComm_t comm = nullptr;
  // Waits for the other ranks, which have all arrived: those of other processes before the exchange. If one
  // of them fails here, its process must end.
  const ncclResult_t joined = nccl_.CommInitRankConfig(&comm, size(), id, rank, &config);
  CheckNccl(joined, joined == ncclInvalidUsage && !place().whole()
                        ? "joining the world's communicator, for which each process needs GPUs of its own "
                          "(CUDA_VISIBLE_DEVICES)"
                        : "joining the world's communicator");
  AddGroup(rank, {size(), 1}, reinterpret_cast<cppool_comm>(comm));
  if (copying_) copies_.JoinWorld(rank, OpenPool(rank));
}

CommGroup NcclWorld::group(int rank, cppool_comm comm) const {
  const CommGroup found = CommWorld::group(rank, comm);
  return found.comm ? found : copies_.group(rank, comm);
}

void NcclWorld::JoinGroup(int rank, GroupShape shape) {
  const Call call(*this, rank);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  config.splitShare = 1;
  const ncclComm_t world = Handle(group(rank, GroupShape{size(), 1}).comm);
  ncclComm_t comm = nullptr;
  const ncclResult_t result = nccl_.CommSplit(world, shape.First(rank), rank, &comm, &config);
  if (result != ncclSuccess) split_failed_ = true;
  CheckNccl(result, ("splitting " + CommunicatorOf(shape.Ranks(rank), size()) + " off").c_str());
  AddGroup(rank, shape, reinterpret_cast<cppool_comm>(comm));
}

void NcclWorld::Leave(int rank) noexcept {
  if (aborted()) return;  // without the lock, which the abort may hold for long
  const std::lock_guard lock(ranks_[rank]->in_call);
  if (aborted() || InGroup(rank)) return;
  ForEachGroup(rank,
               [&](const CommGroup& group) { nccl_.CommDestroy(Handle(group.comm)); });  // children first
  ForgetGroups(rank);
  copies_.Leave(rank);
}

void NcclWorld::BeginCase(int rank) {
  CommWorld::BeginCase(rank);
  if (InGroup(rank))
    throw RuntimeError(CPPOOL_NCCL,
                       "rank " + std::to_string(rank) + " is in a group of calls that did not end");
  copies_.BeginCase(rank);
}

void NcclWorld::CheckRestart() const {
  if (aborted()) throw RuntimeError(CPPOOL_NCCL, "the communicators of nccl do not outlive an abort");
  if (split_failed_) throw RuntimeError(CPPOOL_NCCL, "a communicator could not be made on every rank");
  for (int rank = 0; rank < size(); ++rank) {
    if (InGroup(rank)) {
      throw RuntimeError(
          CPPOOL_NCCL, "rank " + std::to_string(rank) + " is in a group of calls, which NCCL cannot forget");
    }
  }
}

void NcclWorld::GroupStart(int rank) {
  {
    const Call call(*this, rank);
    CheckNccl(nccl_.GroupStart(), "starting a group of calls");
    ++ranks_[rank]->group_depth;
  }
  copies_.GroupStart(rank);
}

void NcclWorld::GroupEnd(int rank) {
  {
    const Call call(*this, rank);
    int& depth = ranks_[rank]->group_depth;
    if (depth > 0) --depth;  // also when the call fails; NCCL itself reports an end without a start
    CheckNccl(nccl_.GroupEnd(), "ending a group of calls");
  }
  copies_.GroupEnd(rank);  // waits for the other ranks' calls, without the lock
}

void NcclWorld::Send(int rank, const void* data, std::size_t bytes, int peer, cppool_comm comm,
                     cudaStream_t stream) {
  if (IsOfCopies(rank, comm)) return copies_.Send(rank, data, bytes, peer, comm, stream);
  const Call call(*this, rank);
  CheckNccl(nccl_.Send(data, bytes, ncclUint8, peer, Handle(comm), stream), "sending");
}

void NcclWorld::Recv(int rank, void* data, std::size_t bytes, int peer, cppool_comm comm,
                     cudaStream_t stream) {
  if (IsOfCopies(rank, comm)) return copies_.Recv(rank, data, bytes, peer, comm, stream);
  const Call call(*this, rank);
  CheckNccl(nccl_.Recv(data, bytes, ncclUint8, peer, Handle(comm), stream), "receiving");
}

void NcclWorld::Collect(int rank, const CollectiveCall& made, cppool_comm comm, cudaStream_t stream) {
  if (IsOfCopies(rank, comm)) return copies_.Collect(rank, made, comm, stream);
  const Call call(*this, rank);
  const auto [what, dtype, reduce, count, in, out] = made;
  const auto type = DataType(dtype);
  CheckNccl(what == Collective::kAllGather ? nccl_.AllGather(in, out, count, type, Handle(comm), stream)
            : what == Collective::kReduceScatter
                ? nccl_.ReduceScatter(in, out, count, type, Reduction(reduce), Handle(comm), stream)
                : nccl_.AllReduce(in, out, count, type, Reduction(reduce), Handle(comm), stream),
            NameOf(what));
}

void NcclWorld::CheckHealth(int rank) {
  const Call call(*this, rank);
  ForEachGroup(rank, [&](const CommGroup& group) {
    ncclResult_t state = ncclSuccess;
    CheckNccl(nccl_.CommGetAsyncError(Handle(group.comm), &state), "asking a communicator for its state");
    if (state == ncclSuccess || state == ncclInProgress) return;
    try {
      CheckNccl(state, "a communicator failed");
    } catch (const RuntimeError& error) {  // NCCL does not name the rank that caused it
      throw RuntimeError(error.status(), error.what(), RuntimeError::kElsewhere);
    }
  });
}

void NcclWorld::Abort(const std::string& reason) {
  if (!NoteAbort(reason)) return;
  WakeAll();
  copies_.Abort(reason);
  // ncclCommAbort can wait for the device: no thread joins this one, and it keeps what it uses alive. The
  // world cannot be used afterwards.
  std::thread([world = shared_from_this()] {
    world->AbortCommunicators();
    world->abort_done_.set_value();
  }).detach();
}

void NcclWorld::AwaitAbort(std::chrono::milliseconds limit) {
  if (aborted()) abort_over_.wait_for(limit);
}

void NcclWorld::AbortCommunicators() {
  // Waits for calls that return; one that is stuck is the reason for the abort.
  const auto patience = std::chrono::steady_clock::now() + 200ms;
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  for (const auto& rank : ranks_) locks.emplace_back(rank->in_call, patience);
  // A shape at a time over all ranks, children before their parent. A rank may lack the last ones.
  std::vector<GroupShape> made;
  for (int rank = 0; rank < size(); ++rank) {
    const std::vector<GroupShape> shapes = this->shapes(rank);
    if (shapes.size() > made.size()) made = shapes;
  }
  for (auto shape = made.rbegin(); shape != made.rend(); ++shape) {
    for (int rank = 0; rank < size(); ++rank) {
      if (const CommGroup known = group(rank, *shape); known.comm) nccl_.CommAbort(Handle(known.comm));
    }
  }
}

}  // namespace cppool::kernels::cuda
