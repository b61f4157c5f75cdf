#include "daemon/soundness.h"

#include <atomic>
#include <exception>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "daemon/log.h"
#include "kernels/error.h"
#include "kernels/group_probe.h"

namespace cppool::daemon {
namespace {

using Clock = World::Clock;

// Shared with ranks that may not come back.
struct Look {
  explicit Look(int ranks) : begun(ranks), back(static_cast<std::size_t>(ranks)) {}

  void Note(int rank, const std::string& what, bool own) {
    const std::lock_guard lock(mutex);
    if (unsound && (unsound_itself || !own)) return;
    unsound = "rank " + std::to_string(rank) + ": " + what;
    unsound_itself = own;
  }

  std::latch begun;
  std::atomic<bool> cannot_begin{false};
  std::mutex mutex;
  std::vector<bool> back;
  std::optional<std::string> unsound;
  bool unsound_itself = false;  // and no consequence of another rank's
};

// True when nothing was thrown.
template <typename Part>
bool Attempt(Look& look, int rank, Part part) {
  try {
    part();
    return true;
  } catch (const kernels::RuntimeError& error) {
    look.Note(rank, error.what(), error.culprit() == kernels::RuntimeError::kOwn);
  } catch (const std::exception& error) {
    look.Note(rank, error.what(), true);
  }
  return false;
}

void LookAtRank(Look& look, kernels::RankRuntime& runtime, int rank, std::uint64_t round) {
  const LogTags tags(rank, "");
  if (!Attempt(look, rank, [&] { runtime.BeginCase(); })) look.cannot_begin = true;
  look.begun.arrive_and_wait();  // whoever looks has the limit
  if (!look.cannot_begin) {
    Attempt(look, rank, [&] { kernels::ProbeGroups(runtime, round); });
    Attempt(look, rank, [&] { runtime.EndCase(); });
  }
  const std::lock_guard lock(look.mutex);
  look.back[static_cast<std::size_t>(rank)] = true;
}

}  // namespace

std::string FindUnsound(World& world, std::chrono::milliseconds limit) {
  const auto start = Clock::now();
  try {
    world.backend().Recover(limit);
  } catch (const std::exception& error) {
    return error.what();
  }
  const auto look = std::make_shared<Look>(world.size());
  const std::uint64_t round = world.CountLook();
  world.threads().Start(
      [look, &world, round](int rank) { LookAtRank(*look, world.rank(rank), rank, round); });
  const bool all_back = world.threads().WaitUntil(start + limit);
  const std::lock_guard lock(look->mutex);
  if (look->unsound) return *look->unsound;
  if (all_back) {
    spdlog::debug("the world is sound, as a look of {:.2f} ms says",
                  std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    return "";
  }
  std::string missing;
  for (std::size_t rank = 0; rank < look->back.size(); ++rank) {
    if (!look->back[rank]) missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  return missing + " did not come back from small collectives within " + std::to_string(limit.count()) +
         " ms";
}

}  // namespace cppool::daemon
