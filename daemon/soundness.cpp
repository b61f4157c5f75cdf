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

// Shared with the ranks, of which some may never return.
struct Probe {
  explicit Probe(int ranks) : begun(ranks), back(static_cast<std::size_t>(ranks)) {}

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
  bool unsound_itself = false;  // `unsound` was caused by its rank
};

// True when nothing was thrown.
template <typename Part>
bool Attempt(Probe& probe, int rank, Part part) {
  try {
    part();
    return true;
  } catch (const kernels::RuntimeError& error) {
    probe.Note(rank, error.what(), error.culprit() == kernels::RuntimeError::kOwn);
  } catch (const std::exception& error) {
    probe.Note(rank, error.what(), true);
  }
  return false;
}

void ProbeRank(Probe& probe, kernels::RankRuntime& runtime, int rank, std::uint64_t round) {
  const LogTags tags(rank, "");
  if (!Attempt(probe, rank, [&] { runtime.BeginCase(); })) probe.cannot_begin = true;
  probe.begun.arrive_and_wait();  // FindUnsound has the limit
  if (!probe.cannot_begin) {
    Attempt(probe, rank, [&] { kernels::ProbeGroups(runtime, round); });
    Attempt(probe, rank, [&] { runtime.EndCase(); });
  }
  const std::lock_guard lock(probe.mutex);
  probe.back[static_cast<std::size_t>(rank)] = true;
}

}  // namespace

std::string FindUnsound(World& world, std::chrono::milliseconds limit) {
  const auto start = Clock::now();
  try {
    world.backend().Recover(limit);
  } catch (const std::exception& error) {
    return error.what();
  }
  const auto probe = std::make_shared<Probe>(world.size());
  const std::uint64_t round = world.NextProbe();
  world.threads().Start(
      [probe, &world, round](int rank) { ProbeRank(*probe, world.rank(rank), rank, round); });
  const bool all_back = world.threads().WaitUntil(start + limit);
  const std::lock_guard lock(probe->mutex);
  if (probe->unsound) return *probe->unsound;
  if (all_back) {
    const std::chrono::duration<double, std::milli> took = Clock::now() - start;
    Log(LogLevel::kDebug, "the world is sound; the probe took " + Rounded(took.count(), 2) + " ms");
    return "";
  }
  std::string missing;
  for (std::size_t rank = 0; rank < probe->back.size(); ++rank) {
    if (!probe->back[rank]) missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  return missing + " did not return from small collectives within " + std::to_string(limit.count()) + " ms";
}

}  // namespace cppool::daemon
