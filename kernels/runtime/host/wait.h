// What a stream of the host runtime waits for, readable by any thread: relaxed atomics, which order nothing.
// A reader may see half of a change; a stream that hangs does not change.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"

namespace cppool::kernels::host {

class CommOp;
class HostComm;

// One call of a rank on a communicator.
struct CallNote {
  const HostComm* comm = nullptr;
  const char* what = "";  // "send to", "recv from", "all_gather"; a string literal
  int peer = kNoPeer;     // of send and recv: the number in the communicator
  std::uint64_t position = 0;
  std::size_t bytes = 0;
  static constexpr int kNoPeer = -1;
};

class WaitNote {
 public:
  // On the stream's thread, before and after it waits for some of these calls.
  void Set(const std::vector<std::unique_ptr<CommOp>>& ops);
  void Clear() { count_.store(0, std::memory_order_relaxed); }
  // The same around the wait for an event that was recorded on the stream with this index.
  void SetStream(int index) { stream_.store(index, std::memory_order_relaxed); }
  void ClearStream() { stream_.store(kNone, std::memory_order_relaxed); }

  // May be called on any thread.
  int stream() const { return stream_.load(std::memory_order_relaxed); }  // kNone: it waits for none
  void Describe(StreamProgress& progress) const;                          // sets `doing` and `awaits`
  static constexpr int kNone = -1;

 private:
  static constexpr std::size_t kCalls = 32;  // of the calls under way together, these are described
  struct Slot {
    std::atomic<const HostComm*> comm{nullptr};
    std::atomic<const char*> what{""};
    std::atomic<int> peer{CallNote::kNoPeer};
    std::atomic<std::uint64_t> position{0};
    std::atomic<std::size_t> bytes{0};
  };

  std::atomic<std::size_t> count_{0};
  std::atomic<int> stream_{kNone};
  std::array<Slot, kCalls> slots_;
};

}  // namespace cppool::kernels::host
