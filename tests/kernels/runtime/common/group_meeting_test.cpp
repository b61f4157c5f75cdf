// Tests of GroupMeeting, in which ranks wait for each other before they make communicators, and of every way
// in which the wait ends.
#include "kernels/runtime/common/group_meeting.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/error.h"
#include "tests/catch.h"

namespace cppool::kernels::test {
namespace {

constexpr int kRanks = 4;

struct Ranks {
  std::vector<WakeUp> wake_ups = std::vector<WakeUp>(kRanks);
  std::atomic<bool> aborted{false};
  std::vector<std::atomic<bool>> finished = std::vector<std::atomic<bool>>(kRanks);
  GroupMeeting meeting{wake_ups, [this] { return aborted.load(); },
                       [this](int rank) { return finished[static_cast<std::size_t>(rank)].load(); }};

  void Finish(int rank) {
    finished[static_cast<std::size_t>(rank)] = true;
    for (WakeUp& wake_up : wake_ups) wake_up.Notify();
  }
  void Abort() {
    aborted = true;
    for (WakeUp& wake_up : wake_ups) wake_up.Notify();
  }

  // The result of each rank's thread: "met", "aborted", or the error with its culprit.
  std::vector<std::string> OnAll(const std::function<std::string(int)>& body) {
    std::vector<std::string> results(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank)
      threads.emplace_back([&, rank] { results[static_cast<std::size_t>(rank)] = body(rank); });
    for (std::thread& thread : threads) thread.join();
    return results;
  }
  std::string Meet(int rank, GroupShape shape) {
    try {
      return meeting.Meet(rank, shape) ? "met" : "aborted";
    } catch (const RuntimeError& error) {
      return std::string(error.what()) + " (culprit " + std::to_string(error.culprit()) + ")";
    }
  }
  // Returns when `rank` waits for exactly this number of other ranks.
  GroupMeeting::Wait OnceWaiting(int rank, std::size_t others) {
    for (int i = 0; i < 10000; ++i) {
      const auto wait = meeting.WaitOf(rank);
      if (wait && wait->awaits.size() == others) return *wait;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return {};
  }
};

const std::vector<std::string> kAllMet(kRanks, "met");

}  // namespace

TEST_CASE("group meeting: all ranks meet in each of many rounds at different speeds") {
  Ranks ranks;
  const auto results = ranks.OnAll([&](int rank) -> std::string {
    for (int round = 0; round < 2000; ++round) {
      const std::string met = ranks.Meet(rank, {1 + round % 7, 1 + round % 3});
      if (met != "met") return met;
    }
    return "met";
  });
  CHECK(results == kAllMet);
  for (int rank = 0; rank < kRanks; ++rank) CHECK_FALSE(ranks.meeting.WaitOf(rank));
}

TEST_CASE("group meeting: the wait of a rank names the missing ranks") {
  Ranks ranks;
  GroupMeeting::Wait two, one;
  const auto results = ranks.OnAll([&](int rank) {
    if (rank == 3) two = ranks.OnceWaiting(0, 2), ranks.OnceWaiting(2, 2);
    if (rank == 1) one = ranks.OnceWaiting(2, 1);
    return ranks.Meet(rank, {2, 2});
  });
  CHECK(results == kAllMet);
  CHECK(two.doing == "waiting for ranks 1 and 3 in group_of(2, 2)");
  CHECK(two.awaits == std::vector<int>{1, 3});
  CHECK(one.doing == "waiting for rank 1 in group_of(2, 2)");
  CHECK(one.awaits == std::vector<int>{1});
}

TEST_CASE(
    "group meeting: if ranks request different shapes, all fail and a single deviating rank is the culprit") {
  Ranks ranks;
  const std::string text =
      "the ranks ask for different groups: rank 0 called group_of(4, 1), rank 2 group_of(2, 2)";
  auto results = ranks.OnAll([&](int rank) {
    return ranks.Meet(rank, rank == 2 ? GroupShape{2, 2} : GroupShape{4, 1});
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    CHECK(results[static_cast<std::size_t>(rank)] == text + (rank == 2 ? " (culprit -1)" : " (culprit 2)"));
  }
  // With two ranks against two, there is no culprit.
  results = ranks.OnAll([&](int rank) {
    return ranks.Meet(rank, rank >= 2 ? GroupShape{2, 2} : GroupShape{4, 1});
  });
  CHECK(results == std::vector<std::string>(kRanks, text + " (culprit -1)"));
  CHECK(ranks.OnAll([&](int rank) { return ranks.Meet(rank, {2, 1}); }) == kAllMet);
}

TEST_CASE("group meeting: a finished rank or an abort ends the wait, and Restart resets both") {
  Ranks ranks;
  auto results = ranks.OnAll([&](int rank) -> std::string {
    if (rank != 1) return ranks.Meet(rank, {2, 1});
    ranks.OnceWaiting(0, 1);
    ranks.Finish(1);
    return "";
  });
  for (const int rank : {0, 2, 3}) {
    CHECK(results[static_cast<std::size_t>(rank)] ==
          "rank 1 has finished the case, and rank " + std::to_string(rank) +
              " is still waiting for it in group_of(2, 1) (culprit 1)");
  }
  ranks.finished[1] = false;
  ranks.meeting.Restart();
  // A rank that finishes after the meeting causes no failure.
  results = ranks.OnAll([&](int rank) {
    const std::string met = ranks.Meet(rank, {2, 1});
    if (rank == 0) ranks.Finish(0);
    return met;
  });
  CHECK(results == kAllMet);
  ranks.finished[0] = false;

  results = ranks.OnAll([&](int rank) -> std::string {
    if (rank != 3) return ranks.Meet(rank, {4, 1});
    ranks.OnceWaiting(0, 1);
    ranks.Abort();
    return "aborted";
  });
  CHECK(results == std::vector<std::string>(kRanks, "aborted"));
  CHECK(ranks.Meet(0, {4, 1}) == "aborted");
  ranks.aborted = false;
  ranks.meeting.Restart();
  CHECK(ranks.OnAll([&](int rank) { return ranks.Meet(rank, {4, 1}); }) == kAllMet);
}

}  // namespace cppool::kernels::test
