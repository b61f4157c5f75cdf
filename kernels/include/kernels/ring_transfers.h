// Copies to the other ranks of a ring under a kernel that is to work with what arrives: piece by piece, each
// with a flag of its receiver behind it in stream order. All copies of a pass are enqueued after one meeting
// of the ranks and before the kernel, which waits for a piece where it needs it; no event orders the two.
//
// Flags count passes: a piece is there when its flag has the number of the pass. Nothing is reset.
#pragma once

#include <cppool/runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace cppool::kernels {

// What of this rank's memory goes to one other rank with one flag.
struct RingPiece {
  // `rows` rows of `width` bytes, `pitch` apart, at `offset` of the receiver's RingTransfers::into[buffer].
  struct Rows {
    const std::byte* from = nullptr;
    std::size_t buffer = 0, offset = 0;
    std::size_t pitch = 0, width = 0, rows = 0;
  };
  int to = 0;            // a member of the communicator
  std::size_t flag = 0;  // of the receiver's RingTransfers::arriving
  std::array<Rows, 2> parts;
  std::string stage;  // marked while it moves

  std::size_t bytes() const { return parts[0].width * parts[0].rows + parts[1].width * parts[1].rows; }
};

// One rank's side of a pass. The ranks agree on who sends which piece.
struct RingTransfers {
  struct Arriving {
    int from = 0;      // a member of the communicator
    std::string what;  // "heads 0 to 3 of keys and values": what a rank that waits for it waits for
  };
  std::array<std::byte*, 2> into = {};  // this rank's memory that others write to
  std::vector<RingPiece> leaving;       // in the order in which they are needed
  std::vector<Arriving> arriving;       // by flag
};

inline constexpr std::size_t kMostRingPieces = 1024;  // that arrive in one pass

// Words in memory of the host that a device's kernel reads and writes while it waits.
struct RingControl {
  std::uint32_t aborted;  // not 0: it must not wait any longer
  std::uint32_t awaited;  // 1 + the piece that it has waited for for a while; 0: none
  std::uint32_t late;     // 1 + a piece that did not come within kRingWaitSeconds; 0: none
};
inline constexpr int kRingWaitSeconds = 60;

// How the kernel sees that a piece is there. After an abort, or when a piece does not come, a device's kernel
// goes on without it, and the rank's case fails.
struct Arrivals {
  // On a device: piece i is there when flags[i] is `pass`.
  const std::uint32_t* flags = nullptr;
  std::uint32_t pass = 0;
  RingControl* control = nullptr;
  // On the host: returns when the piece is there. On the thread of the kernel's stream. Throws RuntimeError.
  std::function<void(std::size_t piece)> await;
};

// Why the ranks of the runtime's world cannot do this; nothing when they can. The same on all ranks.
std::optional<std::string> WhyNoRing(cppool_runtime* rt);

// Begins a pass: all members of `comm` (GetCopyGroup's; on the host any) call it. `into` may be written to,
// and what leaves is ready, once `stream` has come here; the pieces leave on it, and what they are read from
// stays until it has. For a kernel on the main stream, which waits for every piece that arrives: its end is
// then the end of all transfers to this rank. Throws RuntimeError.
Arrivals StartRing(cppool_runtime* rt, RingTransfers transfers, cppool_comm comm, cppool_stream stream);

}  // namespace cppool::kernels
