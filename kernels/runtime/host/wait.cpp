#include "kernels/runtime/host/wait.h"

#include <algorithm>
#include <string>

#include "kernels/runtime/host/comm.h"

namespace cppool::kernels::host {
void WaitNote::Set(const std::vector<std::unique_ptr<CommOp>>& ops) {
  const std::size_t count = std::min(ops.size(), kCalls);
  for (std::size_t i = 0; i < count; ++i) {
    const CallNote note = ops[i]->Note();
    Slot& slot = slots_[i];
    slot.comm.store(note.comm, std::memory_order_relaxed);
    slot.what.store(note.what, std::memory_order_relaxed);
    slot.peer.store(note.peer, std::memory_order_relaxed);
    slot.position.store(note.position, std::memory_order_relaxed);
    slot.bytes.store(note.bytes, std::memory_order_relaxed);
  }
  count_.store(count, std::memory_order_relaxed);
}

void WaitNote::Describe(StreamProgress& progress) const {
  const std::size_t count = std::min(count_.load(std::memory_order_relaxed), kCalls);
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < count; ++i) {
    const Slot& slot = slots_[i];
    const HostComm* comm = slot.comm.load(std::memory_order_relaxed);
    if (!comm) continue;
    const std::string what = slot.what.load(std::memory_order_relaxed);
    const int peer = slot.peer.load(std::memory_order_relaxed);
    std::vector<int> missing;
    std::string text;
    if (peer != CallNote::kNoPeer) {
      missing = {comm->WorldRank(peer)};
      text = "waiting for " + what + " rank " + std::to_string(missing[0]);
    } else {
      missing = comm->Missing(slot.position.load(std::memory_order_relaxed));
      text = "in " + what + " of " + std::to_string(slot.bytes.load(std::memory_order_relaxed)) +
             " bytes with " + std::to_string(comm->size()) + " ranks";
      for (std::size_t m = 0; m < missing.size(); ++m) {
        text += (m == 0                    ? ", waiting for rank "
                 : m + 1 == missing.size() ? " and "
                                           : ", ") +
                std::to_string(missing[m]);
      }
    }
    if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(text);
    for (const int rank : missing) {
      if (std::find(progress.awaits.begin(), progress.awaits.end(), rank) == progress.awaits.end())
        progress.awaits.push_back(rank);
    }
  }
  for (const std::string& text : texts) progress.doing += (progress.doing.empty() ? "" : " and ") + text;
}

}  // namespace cppool::kernels::host
