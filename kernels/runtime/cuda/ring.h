// Ring transfers between the GPUs of one process (ring_transfers.h): a rank pushes its pieces on its own
// stream to the others' memory, which measured faster than pulling, and each piece's flag behind it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/ring_transfers.h"
#include "kernels/runtime/cuda/comm_world.h"
#include "kernels/runtime/cuda/peer_comm.h"

namespace cppool::kernels::cuda {

// What is done on the sender's thread before and after a piece of ring transfers is enqueued.
struct RingHooks {
  std::function<void(const RingPiece&)> before;
  std::function<void()> after;
};

// One rank's flags, on its device, and the words that its kernels share with the host. The flags' passes
// count on as long as it lives.
class RingState {
 public:
  RingState();  // on the current device; throws RuntimeError
  ~RingState();
  RingState(const RingState&) = delete;
  RingState& operator=(const RingState&) = delete;

  // The rank's thread. Begins a pass whose kernel runs on `kernel`.
  Arrivals Begin(const PeerComm& comm, const RingTransfers& transfers, cudaStream_t kernel);
  std::uint32_t* flags() const { return flags_; }
  std::uint32_t pass() const { return pass_; }
  // Throws RuntimeError when a piece did not come in time.
  void Check() const;
  void BeginCase();

  // Any thread.
  void SetAborted(bool aborted);
  // The piece that a kernel has waited for for a while; nothing: none does.
  std::optional<WaitingCall> Waiting() const;

 private:
  std::string NameOf(std::uint32_t piece, int* from) const;

  std::uint32_t* flags_ = nullptr;
  RingControl* control_ = nullptr;  // page-locked
  std::uint32_t pass_ = 0;
  mutable std::mutex mutex_;  // guards what follows
  struct Piece {
    int from;  // rank of the world
    std::string what;
  };
  std::vector<Piece> arriving_;
  cudaStream_t kernel_ = nullptr;
};

// `state`: the rank's, after Begin.
std::unique_ptr<PeerOp> MakeRing(PeerSide& side, RingTransfers transfers, const RingState& state,
                                 RingHooks hooks, cudaStream_t stream);

}  // namespace cppool::kernels::cuda
