#include "kernels/runtime/common/group_meeting.h"

#include <algorithm>
#include <utility>

#include "kernels/error.h"

namespace cppool::kernels {
namespace {

std::uint64_t Pack(std::uint32_t round, GroupShape shape) {
  return std::uint64_t{round} << 32 | static_cast<std::uint64_t>(shape.size) << 16 |
         static_cast<std::uint64_t>(shape.stride);
}

std::string Call(std::uint64_t asked) {
  return "group_of(" + std::to_string(asked >> 16 & 0xffff) + ", " + std::to_string(asked & 0xffff) + ")";
}

}  // namespace

GroupMeeting::GroupMeeting(std::vector<WakeUp>& wake_ups, std::function<bool()> aborted,
                           std::function<bool(int)> finished)
    : wake_ups_(wake_ups),
      aborted_(std::move(aborted)),
      finished_(std::move(finished)),
      places_(wake_ups.size()) {}

bool GroupMeeting::Meet(int rank, GroupShape shape) {
  Place& mine = places_[static_cast<std::size_t>(rank)];
  const std::uint32_t round = ++mine.rounds;
  mine.asked[round % 2].store(Pack(round, shape), std::memory_order_relaxed);
  mine.waits.store(round, std::memory_order_relaxed);
  for (WakeUp& wake_up : wake_ups_) wake_up.Notify();
  if (tell_) tell_(rank, round, shape);
  // The deadline is the watchdog's: it aborts the world.
  wake_ups_[static_cast<std::size_t>(rank)].Wait(
      [&] { return aborted_() || Missing(round).empty() || FinishedWithout(round) >= 0; });
  mine.waits.store(0, std::memory_order_relaxed);
  if (Missing(round).empty()) {
    CheckSameShape(rank, round);
    return true;
  }
  if (aborted_()) return false;
  const int gone = FinishedWithout(round);
  throw RuntimeError(CPPOOL_INTERNAL,
                     "rank " + std::to_string(gone) + " has finished the case, and rank " +
                         std::to_string(rank) + " is still waiting for it in " + Call(Asked(rank, round)),
                     gone);
}

void GroupMeeting::Take(int rank, std::uint32_t round, GroupShape shape) {
  places_[static_cast<std::size_t>(rank)].asked[round % 2].store(Pack(round, shape),
                                                                 std::memory_order_relaxed);
  for (WakeUp& wake_up : wake_ups_) wake_up.Notify();
}

std::uint64_t GroupMeeting::Asked(int rank, std::uint32_t round) const {
  return places_[static_cast<std::size_t>(rank)].asked[round % 2].load(std::memory_order_relaxed);
}

bool GroupMeeting::HasCome(int rank, std::uint32_t round) const { return Asked(rank, round) >> 32 == round; }

std::vector<int> GroupMeeting::Missing(std::uint32_t round) const {
  std::vector<int> missing;
  for (int rank = 0; rank < static_cast<int>(places_.size()); ++rank) {
    if (!HasCome(rank, round)) missing.push_back(rank);
  }
  return missing;
}

int GroupMeeting::FinishedWithout(std::uint32_t round) const {
  for (int rank = 0; rank < static_cast<int>(places_.size()); ++rank) {
    if (!finished_(rank)) continue;
    ProcessorFence();  // if it has not come by now, it never will
    if (!HasCome(rank, round)) return rank;
  }
  return -1;
}

// Every rank compares the same words, so that all of them fail or none.
void GroupMeeting::CheckSameShape(int rank, std::uint32_t round) const {
  std::vector<std::uint64_t> asked;
  for (int other = 0; other < static_cast<int>(places_.size()); ++other) asked.push_back(Asked(other, round));
  const auto alike = [&](std::uint64_t word) { return std::count(asked.begin(), asked.end(), word); };
  const auto most = std::max_element(asked.begin(), asked.end(),
                                     [&](std::uint64_t a, std::uint64_t b) { return alike(a) < alike(b); });
  const auto other =
      std::find_if(asked.begin(), asked.end(), [&](std::uint64_t word) { return word != *most; });
  if (other == asked.end()) return;
  const auto rank_of = [&](auto at) { return static_cast<int>(at - asked.begin()); };
  const bool clear = 2 * alike(*most) > static_cast<std::ptrdiff_t>(asked.size());
  const bool is_mine = asked[static_cast<std::size_t>(rank)] != *most;
  throw RuntimeError(CPPOOL_INTERNAL,
                     "the ranks ask for different groups: rank " + std::to_string(rank_of(most)) +
                         " called " + Call(*most) + ", rank " + std::to_string(rank_of(other)) + " " +
                         Call(*other),
                     clear && !is_mine ? rank_of(other) : RuntimeError::kOwn);
}

std::optional<GroupMeeting::Wait> GroupMeeting::WaitOf(int rank) const {
  const std::uint32_t round = places_[static_cast<std::size_t>(rank)].waits.load(std::memory_order_relaxed);
  if (round == 0) return std::nullopt;
  std::vector<int> missing = Missing(round);
  if (missing.empty()) return std::nullopt;
  return Wait{"waiting for " + RankList(missing) + " in " + Call(Asked(rank, round)), std::move(missing)};
}

void GroupMeeting::Restart() {
  for (Place& place : places_) {
    place.rounds = 0;
    for (auto& asked : place.asked) asked.store(0, std::memory_order_relaxed);
  }
}

}  // namespace cppool::kernels
