#include "kernels/runtime/cuda/peer_world.h"

#include <algorithm>
#include <utility>

#include "kernels/runtime/common/dtype.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/reduce.h"

namespace cppool::kernels::cuda {
namespace {

// Copies between two devices then go directly, including those of memory that a case has allocated itself.
void EnableAccess(int device, int other) {
  int reaches = 0;
  CheckCuda(cudaDeviceCanAccessPeer(&reaches, device, other), "asking which devices reach each other");
  if (!reaches) return;  // such copies go through the host
  const cudaError_t result = cudaDeviceEnablePeerAccess(other, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  CheckCuda(result, "letting devices reach each other");
}

}  // namespace

PeerWorld::PeerWorld(int size, int devices) : CommWorld(size, devices), ranks_(At(size)) {
  for (const GroupShape shape : UsualShapes(size)) {
    for (int rank = 0; rank < size; ++rank) PeerWorld::JoinGroup(rank, shape);
  }
}

void PeerWorld::JoinGroup(int rank, GroupShape shape) {
  if (group(rank, shape).comm) return;
  PeerComm* comm = nullptr;
  {
    const std::lock_guard lock(comms_mutex_);
    auto& comms = comms_[shape];
    comms.resize(At(size() / shape.size));
    auto& mine = comms[At(shape.Index(rank))];
    if (!mine) {
      const std::vector<int> members = shape.Ranks(rank);
      std::vector<int> on;
      for (const int member : members) on.push_back(device(member));
      mine = std::make_unique<PeerComm>(members, std::move(on), wake_ups());
    }
    comm = mine.get();
  }
  const std::vector<std::uint64_t> none(At(shape.size));
  PeerSide& side = ranks_[At(rank)].sides.emplace_back(PeerSide{comm, shape.Member(rank), 0, none, none});
  AddGroup(rank, shape, reinterpret_cast<cppool_comm>(&side));
}

void PeerWorld::JoinWorld(int rank, std::shared_ptr<DevicePool> pool) {
  Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  mine.events = std::make_shared<EventPool>();
  mine.pool = std::move(pool);
  std::vector<int> others;
  for (int other = 0; other < devices(); ++other) {
    if (other == device(rank)) continue;
    EnableAccess(device(rank), other);
    others.push_back(other);
  }
  mine.pool->Share(others);
  if (devices() == size()) {
    auto ring = std::make_unique<RingState>();
    const std::lock_guard lock(mine.mutex);
    mine.ring = std::move(ring);
  }
  LoadReduce();
}

void PeerWorld::Leave(int rank) noexcept {
  Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  mine.grouped.clear();
  mine.events.reset();
  mine.pool.reset();
  const std::lock_guard lock(mine.mutex);
  mine.ring.reset();
}

void PeerWorld::BeginCase(int rank) {
  CommWorld::BeginCase(rank);
  Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  mine.depth = 0;
  mine.grouped.clear();
  mine.failure = nullptr;
  if (mine.ring) mine.ring->BeginCase();
}

void PeerWorld::CheckCase(int rank) {
  if (const auto& ring = ranks_[static_cast<std::size_t>(rank)].ring) ring->Check();
  if (const auto& failure = ranks_[static_cast<std::size_t>(rank)].failure) std::rethrow_exception(failure);
}

std::optional<std::string> PeerWorld::WhyNoRing() const {
  if (devices() < size()) return "several ranks share a GPU";
  for (int device = 0; device < devices(); ++device) {
    for (int other = 0; other < devices(); ++other) {
      int reaches = device == other;
      if (!reaches)
        CheckCuda(cudaDeviceCanAccessPeer(&reaches, device, other), "asking which devices reach each other");
      if (!reaches) return "not all GPUs reach each other";
    }
  }
  return std::nullopt;
}

Arrivals PeerWorld::StartRing(int rank, RingTransfers transfers, cppool_comm comm, cudaStream_t stream,
                              cudaStream_t kernel, RingHooks hooks) {
  Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  PeerSide& side = SideOf(rank, comm);
  for (const RingPiece& piece : transfers.leaving) SideTo(rank, comm, piece.to, "a piece of ring transfers");
  if (!mine.ring || mine.depth > 0) throw RuntimeError(CPPOOL_INTERNAL, "ring transfers cannot be here");
  Arrivals arrivals = mine.ring->Begin(*side.comm, transfers, kernel);
  Submit(rank, MakeRing(side, std::move(transfers), *mine.ring, std::move(hooks), stream));
  return arrivals;
}

PeerSide& PeerWorld::SideOf(int rank, cppool_comm comm) {
  ThrowIfAborted();
  for (PeerSide& side : ranks_[static_cast<std::size_t>(rank)].sides) {
    if (reinterpret_cast<cppool_comm>(&side) == comm) return side;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "not a communicator of this rank");
}

PeerSide& PeerWorld::SideTo(int rank, cppool_comm comm, int peer, const char* call) {
  PeerSide& side = SideOf(rank, comm);
  CheckPeer(peer, side.comm->size(), call);
  return side;
}

void PeerWorld::GroupStart(int rank) {
  ThrowIfAborted();
  ++ranks_[static_cast<std::size_t>(rank)].depth;
}

void PeerWorld::GroupEnd(int rank) {
  Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  if (mine.depth == 0) throw RuntimeError(CPPOOL_INTERNAL, "group_end without group_start");
  if (--mine.depth > 0) return;
  Run(rank, std::exchange(mine.grouped, {}));
}

void PeerWorld::Send(int rank, const void* data, std::size_t bytes, int peer, cppool_comm comm,
                     cudaStream_t stream) {
  Submit(rank, MakeSend(SideTo(rank, comm, peer, "send"), peer, data, bytes, stream));
}

void PeerWorld::Recv(int rank, void* data, std::size_t bytes, int peer, cppool_comm comm,
                     cudaStream_t stream) {
  Submit(rank, MakeRecv(SideTo(rank, comm, peer, "recv"), peer, data, bytes, stream));
}

void PeerWorld::Collect(int rank, const CollectiveCall& call, cppool_comm comm, cudaStream_t stream) {
  PeerSide& side = SideOf(rank, comm);
  CheckDtype(call.dtype);
  CheckReduction(call.reduce);
  Submit(rank, MakeCollective(side, call, stream));
}

void PeerWorld::Submit(int rank, std::unique_ptr<PeerOp> op) {
  Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  if (mine.depth > 0) {
    mine.grouped.push_back(std::move(op));
    return;
  }
  std::vector<std::unique_ptr<PeerOp>> ops;
  ops.push_back(std::move(op));
  Run(rank, std::move(ops));
}

// Shows a rank's calls to Waiting, once all are started.
class PeerWorld::Running {
 public:
  Running(Rank& rank, const std::vector<std::unique_ptr<PeerOp>>& ops) : rank_(rank) { Set(&ops); }
  ~Running() { Set(nullptr); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  void Set(const std::vector<std::unique_ptr<PeerOp>>* ops) {
    const std::lock_guard lock(rank_.mutex);
    rank_.running = ops;
  }
  Rank& rank_;
};

std::vector<WaitingCall> PeerWorld::Waiting(int rank) const {
  const Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  const std::lock_guard lock(mine.mutex);
  std::vector<WaitingCall> waiting;
  if (mine.ring) {
    if (auto call = mine.ring->Waiting()) waiting.push_back(std::move(*call));
  }
  if (!mine.running) return waiting;
  for (const auto& op : *mine.running) {
    WaitingCall call{op->stream(), "waiting for " + op->ToString(), {}};
    for (int other = 0; other < size(); ++other) {
      if (op->Misses(other)) call.awaits.push_back(other);
    }
    if (!call.awaits.empty()) waiting.push_back(std::move(call));
  }
  return waiting;
}

void PeerWorld::Run(int rank, std::vector<std::unique_ptr<PeerOp>> ops) {
  try {
    Meet(rank, ops);
  } catch (...) {
    auto& failure = ranks_[static_cast<std::size_t>(rank)].failure;
    if (!failure) failure = std::current_exception();
    throw;
  }
}

void PeerWorld::Meet(int rank, const std::vector<std::unique_ptr<PeerOp>>& ops) {
  ThrowIfAborted();
  Rank& mine = ranks_[static_cast<std::size_t>(rank)];
  const PeerCaller caller{device(rank), mine.events.get(), mine.pool.get()};
  std::vector<std::pair<cudaStream_t, EventRef>> ready;  // one event for all calls on a stream
  for (const auto& op : ops) {
    auto it = std::find_if(ready.begin(), ready.end(),
                           [&](const auto& known) { return known.first == op->stream(); });
    if (it == ready.end()) it = ready.emplace(it, op->stream(), mine.events->Record(op->stream()));
    op->Start(caller, it->second);
  }
  // The work of every call comes before any call's wait for its readers: in a ring, a rank's copy does not
  // wait for its neighbour's. Both waits are for the peers' calls, and the watchdog ends them with Abort.
  WakeUp& wake_up = wake_ups()[static_cast<std::size_t>(rank)];
  const Running shown(mine, ops);
  std::vector<PeerOp*> working;
  for (const auto& op : ops) working.push_back(op.get());
  const auto any_ready = [&] {
    return std::any_of(working.begin(), working.end(), [](const PeerOp* op) { return op->Ready(); });
  };
  const auto in_vain = [&](const PeerOp& op) { return FinishedWithout(op) >= 0; };
  const auto throw_if_in_vain = [&](const PeerOp& op) {
    const int gone = FinishedWithout(op);
    if (gone < 0) return;
    throw RuntimeError(CPPOOL_INTERNAL,
                       "rank " + std::to_string(gone) + " has finished the case, and rank " +
                           std::to_string(rank) + " is still waiting for it in " + op.ToString(),
                       gone);
  };
  while (!working.empty()) {
    wake_up.Wait([&] {
      return aborted() || any_ready() ||
             std::any_of(working.begin(), working.end(), [&](const PeerOp* op) { return in_vain(*op); });
    });
    ThrowIfAborted();
    for (const PeerOp* op : working) throw_if_in_vain(*op);
    std::erase_if(working, [](PeerOp* op) { return op->Ready() && op->Work(); });
  }
  for (const auto& op : ops) {
    wake_up.Wait([&] { return aborted() || op->CanLeave() || in_vain(*op); });
    if (!op->CanLeave()) ThrowIfAborted();
    throw_if_in_vain(*op);
    op->Leave();
  }
}

int PeerWorld::FinishedWithout(const PeerOp& op) const {
  for (int rank = 0; rank < size(); ++rank) {
    // What it has not posted by now, it never will.
    if (finished(rank) && op.Misses(rank)) return rank;
  }
  return -1;
}

void PeerWorld::Abort(const std::string& reason) {
  if (!NoteAbort(reason)) return;
  for (const Rank& rank : ranks_) {
    const std::lock_guard lock(rank.mutex);
    if (rank.ring) rank.ring->SetAborted(true);
  }
  WakeAll();
}

void PeerWorld::Restart() {
  for (const auto& [shape, comms] : comms_) {
    for (const auto& comm : comms) {
      if (comm) comm->Reset();
    }
  }
  for (Rank& rank : ranks_) {
    rank.depth = 0;
    rank.grouped.clear();
    rank.failure = nullptr;
    if (rank.ring) rank.ring->SetAborted(false);
    for (PeerSide& side : rank.sides) {
      side.collectives = 0;
      std::fill(side.sends.begin(), side.sends.end(), 0);
      std::fill(side.recvs.begin(), side.recvs.end(), 0);
    }
  }
  CommWorld::Restart();
}

}  // namespace cppool::kernels::cuda
