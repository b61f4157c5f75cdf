// Where the ranks of a world meet before they make the communicators of a new shape together.
//
// A transport may block for good when one rank does not take part (ncclCommSplit), so all ranks come here
// first: the wait ends with an error when a rank asks for another shape, has finished its case, or the world
// is aborted, and the diagnosis of a deadline can name who is missing.
//
// A rank waits at most once for a shape in the life of a world. Like a wake-up, a meeting orders no memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/group_shape.h"
#include "kernels/runtime/common/wake_up.h"

namespace cppool::kernels {

class GroupMeeting {
 public:
  // `wake_ups`: one per rank; all of them are notified after a change of what `aborted` or `finished(rank)`
  // return. Both are called often and must not block. A rank is finished when it will make no more calls in
  // this case.
  GroupMeeting(std::vector<WakeUp>& wake_ups, std::function<bool()> aborted,
               std::function<bool(int)> finished);

  // On the rank's thread. Returns true once all ranks have asked for `shape`, false when the world was
  // aborted first. Throws RuntimeError when they ask for different shapes, or when one has finished without
  // asking.
  [[nodiscard]] bool Meet(int rank, GroupShape shape);

  struct Wait {
    std::string doing;        // "waiting for ranks 1 and 2 in group_of(4, 1)"
    std::vector<int> awaits;  // the ranks that have not come
  };
  // Any thread. None: the rank does not wait here.
  std::optional<Wait> WaitOf(int rank) const;

  // With ranks of other processes: `tell` is called for every rank that comes to Meet, on its thread; Take
  // says that one of another process has come there. Any thread; who waits is woken.
  void TellOthers(std::function<void(int rank, std::uint32_t round, GroupShape shape)> tell) {
    tell_ = std::move(tell);
  }
  void Take(int rank, std::uint32_t round, GroupShape shape);

  // Forgets which ranks have come. No rank may be in Meet.
  void Restart();

 private:
  // The shapes that a rank has asked for in its last two rounds: those who meet read one while the fastest
  // writes the other. Round and shape are one word, so that no reader sees half of a change.
  struct Place {
    std::uint32_t rounds = 0;             // of the rank's thread
    std::atomic<std::uint32_t> waits{0};  // the round that the rank waits for; 0: it does not
    std::atomic<std::uint64_t> asked[2] = {};
  };
  std::uint64_t Asked(int rank, std::uint32_t round) const;
  bool HasCome(int rank, std::uint32_t round) const;
  std::vector<int> Missing(std::uint32_t round) const;
  int FinishedWithout(std::uint32_t round) const;  // a rank, or -1
  void CheckSameShape(int rank, std::uint32_t round) const;

  std::vector<WakeUp>& wake_ups_;
  const std::function<bool()> aborted_;
  const std::function<bool(int)> finished_;
  std::function<void(int, std::uint32_t, GroupShape)> tell_;
  std::vector<Place> places_;
};

}  // namespace cppool::kernels
