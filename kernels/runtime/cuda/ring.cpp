#include "kernels/runtime/cuda/ring.h"

#include <atomic>
#include <utility>

#include "kernels/error.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/stream_write.h"

namespace cppool::kernels::cuda {
namespace {

class RingOp final : public PeerOp {
 public:
  RingOp(PeerSide& side, RingTransfers transfers, const RingState& state, RingHooks hooks,
         cudaStream_t stream)
      : PeerOp(stream),
        side_(side),
        transfers_(std::move(transfers)),
        flags_(state.flags()),
        pass_(state.pass()),
        hooks_(std::move(hooks)) {}

  void Start(const PeerCaller&, const EventRef& ready) override {
    position_ = side_.collectives++;
    meeting_ = side_.comm->Meeting(position_);
    PeerMeeting::Part& mine = meeting_->parts[static_cast<std::size_t>(side_.member)];
    mine.call.what = Collective::kRing;
    mine.ready = ready;
    mine.into = transfers_.into;
    mine.flags = flags_;
    mine.pass = pass_;
    mine.posted.store(true, std::memory_order_release);
    if (meeting_->posted.fetch_add(1, std::memory_order_acq_rel) + 1 == meeting_->parts.size())
      side_.comm->WakeAll();
  }
  bool Ready() const override {
    return meeting_->posted.load(std::memory_order_acquire) == meeting_->parts.size();
  }
  bool Work() override {
    meeting_->CheckSameCall(side_, position_);
    std::vector<bool> awaited(meeting_->parts.size(), false);
    for (const RingPiece& piece : transfers_.leaving) {
      const auto to = static_cast<std::size_t>(piece.to);
      const PeerMeeting::Part& target = meeting_->parts[to];
      if (!awaited[to]) WaitFor(stream(), target.ready);
      awaited[to] = true;
      hooks_.before(piece);
      for (const RingPiece::Rows& part : piece.parts) {
        CheckCuda(cudaMemcpy2DAsync(target.into[part.buffer] + part.offset, part.pitch, part.from, part.pitch,
                                    part.width, part.rows, cudaMemcpyDeviceToDevice, stream()),
                  "copying a piece to a peer");
      }
      WriteWord(stream(), target.flags + piece.flag, target.pass);
      hooks_.after();
    }
    return true;
  }
  bool CanLeave() const override { return true; }
  void Leave() override {}
  bool Misses(int rank) const override {
    for (std::size_t member = 0; member < meeting_->parts.size(); ++member) {
      if (side_.comm->WorldRank(static_cast<int>(member)) == rank)
        return !meeting_->parts[member].posted.load(std::memory_order_acquire);
    }
    return false;
  }
  std::string ToString() const override {
    return std::string(NameOf(Collective::kRing)) + " on " + side_.comm->name();
  }

 private:
  PeerSide& side_;
  const RingTransfers transfers_;
  std::uint32_t* const flags_;
  const std::uint32_t pass_;
  const RingHooks hooks_;
  std::uint64_t position_ = 0;
  std::shared_ptr<PeerMeeting> meeting_;
};

std::uint32_t Load(std::uint32_t& word) { return std::atomic_ref(word).load(std::memory_order_relaxed); }
void Store(std::uint32_t& word, std::uint32_t value) {
  std::atomic_ref(word).store(value, std::memory_order_relaxed);
}

}  // namespace

RingState::RingState() {
  LoadWriteWord();
  void* flags = nullptr;
  CheckCuda(cudaMalloc(&flags, kMostRingPieces * sizeof(std::uint32_t)),
            "allocating the flags of ring transfers");
  flags_ = static_cast<std::uint32_t*>(flags);
  CheckCuda(cudaMemset(flags, 0, kMostRingPieces * sizeof(std::uint32_t)),
            "clearing the flags of ring transfers");
  void* control = nullptr;
  CheckCuda(cudaHostAlloc(&control, sizeof(RingControl), cudaHostAllocPortable | cudaHostAllocMapped),
            "allocating what kernels share with the host");
  control_ = new (control) RingControl{};
}

RingState::~RingState() {
  if (Load(control_->aborted)) return;  // freeing waits for the device, where something may be stuck
  cudaFree(flags_);
  cudaFreeHost(control_);
}

Arrivals RingState::Begin(const PeerComm& comm, const RingTransfers& transfers, cudaStream_t kernel) {
  if (transfers.arriving.size() > kMostRingPieces)
    throw RuntimeError(CPPOOL_INTERNAL, "ring transfers of too many pieces");
  {
    const std::lock_guard lock(mutex_);
    kernel_ = kernel;
    arriving_.clear();
    for (const RingTransfers::Arriving& piece : transfers.arriving)
      arriving_.push_back({comm.WorldRank(piece.from), piece.what});
  }
  Arrivals arrivals;
  arrivals.flags = flags_;
  arrivals.pass = ++pass_;
  arrivals.control = control_;
  return arrivals;
}

std::string RingState::NameOf(std::uint32_t piece, int* from) const {
  const std::lock_guard lock(mutex_);
  if (piece == 0 || piece > arriving_.size()) return "";
  const Piece& known = arriving_[piece - 1];
  if (from) *from = known.from;
  return known.what + " from rank " + std::to_string(known.from);
}

void RingState::Check() const {
  int from = RuntimeError::kOwn;
  const std::string late = NameOf(Load(control_->late), &from);
  if (late.empty()) return;
  throw RuntimeError(CPPOOL_TIMEOUT,
                     "a kernel has waited " + std::to_string(kRingWaitSeconds) + " s for " + late, from);
}

void RingState::BeginCase() {
  Store(control_->awaited, 0);
  Store(control_->late, 0);
}

void RingState::SetAborted(bool aborted) { Store(control_->aborted, aborted); }

std::optional<WaitingCall> RingState::Waiting() const {
  int from = 0;
  const std::string what = NameOf(Load(control_->awaited), &from);
  if (what.empty()) return std::nullopt;
  return WaitingCall{kernel_, "waiting for " + what, {from}};
}

std::unique_ptr<PeerOp> MakeRing(PeerSide& side, RingTransfers transfers, const RingState& state,
                                 RingHooks hooks, cudaStream_t stream) {
  return std::make_unique<RingOp>(side, std::move(transfers), state, std::move(hooks), stream);
}

}  // namespace cppool::kernels::cuda
