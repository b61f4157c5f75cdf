// Tests of the transport `nccl` between processes, which are objects here: what they exchange at the start,
// and how their ranks meet for a group. NCCL is simulated; the real one is tested on GPUs.
#include "kernels/runtime/cuda/nccl_world.h"

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"

namespace cppool::kernels::cuda {
namespace {

using namespace std::chrono_literals;

// A world whose ranks are shared out to so many processes, connected as a head does it.
class Processes {
 public:
  Processes(int size, int processes) : texts_(static_cast<std::size_t>(processes)) {
    dlopen(CPPOOL_SIMULATED_NCCL, RTLD_NOW);  // NcclWorld then finds it by its name
    for (int process = 0; process < processes; ++process) {
      const Place place(size, size / processes * process, size / processes);
      const auto exchange = [this, process](const std::string& own) { return Exchange(process, own); };
      const auto tell = [this, process](const RankNews& news) {
        for (int other = 0; other < static_cast<int>(worlds_.size()); ++other)
          if (other != process) worlds_[static_cast<std::size_t>(other)]->Take(news);
      };
      worlds_.push_back(std::make_shared<NcclWorld>(place, WorldLink{exchange, tell}));
    }
  }

  NcclWorld& Of(int rank) const {
    return *worlds_[static_cast<std::size_t>(rank / worlds_.front()->place().ranks)];
  }
  int size() const { return worlds_.front()->size(); }
  void LoseExchange() { lost_ = true; }

  // The error of each rank's thread; "" if there is none.
  std::vector<std::string> OnAllRanks(const std::function<void(NcclWorld&, int rank)>& body) {
    std::vector<std::string> errors(static_cast<std::size_t>(size()));
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(Of(rank), rank);
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    threads.clear();
    return errors;
  }

  void Begin() {  // all ranks begin before any communicates
    OnAllRanks([](NcclWorld& world, int rank) { world.BeginCase(rank); });
  }

 private:
  std::vector<std::string> Exchange(int process, const std::string& own) {
    std::unique_lock lock(mutex_);
    if (lost_) throw std::runtime_error("the head has gone");
    texts_[static_cast<std::size_t>(process)] = own;
    ++given_;
    changed_.notify_all();
    if (!changed_.wait_for(lock, 20s, [&] { return given_ == texts_.size(); }))
      throw std::runtime_error("not all processes have come");
    return texts_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
  std::size_t given_ = 0;
  bool lost_ = false;
  std::vector<std::shared_ptr<NcclWorld>> worlds_;
};

void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("does not hold: " + what);
}

std::vector<std::string> Start(Processes& processes) {
  return processes.OnAllRanks([](NcclWorld& world, int rank) {
    world.Arrive();
    world.JoinWorld(rank);
  });
}

const std::vector<std::string> kNoErrors(8);

TEST_CASE("nccl: processes join one world, with a device for each of their ranks and no copies") {
  const int count = GENERATE(2, 4, 8);
  Processes processes(8, count);
  REQUIRE(Start(processes) == kNoErrors);
  CHECK(processes.OnAllRanks([&](NcclWorld& world, int rank) {
    Expect(world.device(rank) == rank % (8 / count), "its device is by its place in the process");
    const CommGroup all = world.group(rank, GroupShape{8, 1});
    Expect(all.comm && all.rank == rank && all.size == 8, "the world's communicator");
    Expect(!world.copies(), "no copies between processes");
    world.JoinGroup(rank, {2, 4});
    Expect(world.group(rank, GroupShape{2, 4}).rank == rank / 4, "a group across processes");
  }) == kNoErrors);
}

TEST_CASE("nccl: an exchange that fails is the error of every rank") {
  Processes processes(8, 4);
  processes.LoseExchange();
  CHECK(Start(processes) == std::vector<std::string>(8, "the head has gone"));
}

TEST_CASE("nccl: the ranks of all processes meet for a group") {
  Processes processes(8, 4);
  REQUIRE(Start(processes) == kNoErrors);
  for (const GroupShape shape : {GroupShape{4, 1}, GroupShape{2, 4}, GroupShape{4, 1}}) {
    processes.Begin();
    CHECK(processes.OnAllRanks([&](NcclWorld& world, int rank) {
      std::this_thread::sleep_for(rank * 5ms);
      const CommGroup made = world.MakeGroup(rank, shape);
      Expect(made.comm && made.size == shape.size && made.rank == shape.Member(rank), "the group");
      world.Finished(rank);
    }) == kNoErrors);
  }
}

TEST_CASE("nccl: a wait for a rank of another process names it") {
  Processes processes(8, 4);
  REQUIRE(Start(processes) == kNoErrors);
  processes.Begin();
  std::jthread waits([&] {
    try {
      processes.Of(0).MakeGroup(0, {4, 1});
    } catch (const std::exception&) {
    }
  });
  for (int i = 0; i < 2000 && !processes.Of(0).WaitingForGroup(0); ++i) std::this_thread::sleep_for(5ms);
  std::jthread comes([&] {
    try {
      processes.Of(7).MakeGroup(7, {4, 1});
    } catch (const std::exception&) {
    }
  });
  std::vector<int> awaits;
  for (int i = 0; i < 2000 && awaits != std::vector<int>{1, 2, 3, 4, 5, 6}; ++i) {
    if (const auto wait = processes.Of(0).WaitingForGroup(0)) awaits = wait->awaits;
    std::this_thread::sleep_for(5ms);
  }
  CHECK(awaits == std::vector<int>{1, 2, 3, 4, 5, 6});
  for (const int rank : {0, 7}) processes.Of(rank).Abort("over");
}

TEST_CASE(
    "nccl: who waits for a rank of another process that has finished, or asks for another shape, hears of "
    "it") {
  const bool before = GENERATE(true, false);  // it has finished before they ask, or later
  Processes processes(8, 4);
  REQUIRE(Start(processes) == kNoErrors);
  processes.Begin();
  const std::vector<std::string> errors = processes.OnAllRanks([&](NcclWorld& world, int rank) {
    if (rank != 3) std::this_thread::sleep_for(before ? 100ms : 0ms);
    if (rank == 3) {
      std::this_thread::sleep_for(before ? 0ms : 100ms);
      return world.Finished(rank);
    }
    try {
      world.MakeGroup(rank, {4, 1});
    } catch (const RuntimeError& error) {
      Expect(error.culprit() == 3, "the culprit");
      throw;
    }
  });
  for (int rank = 0; rank < 8; ++rank) {
    const std::string wanted = rank == 3 ? ""
                                         : "rank 3 has finished the case, and rank " + std::to_string(rank) +
                                               " is still waiting for it in group_of(4, 1)";
    CHECK(errors[static_cast<std::size_t>(rank)] == wanted);
  }
  for (const int rank : {0, 2, 4, 6}) processes.Of(rank).Restart();
  processes.Begin();
  for (const std::string& error : processes.OnAllRanks([](NcclWorld&world, int rank) {
         world.MakeGroup(rank, {rank < 4 ? 4 : 2, rank < 4 ? 1 : 4});
       }))
    CHECK(error.find("group_of(2, 4)") != std::string::npos);
}

}  // namespace
}  // namespace cppool::kernels::cuda
