#include "daemon/rank_runner.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "daemon/ask_all.h"

namespace cppool::daemon {
namespace {

constexpr std::chrono::milliseconds kSnapshotsLimit{400};  // a little more than each runner takes

// What is known of ranks that could not be read.
std::vector<RankReport> Unknown(int first, int ranks) {
  std::vector<RankReport> reports(static_cast<std::size_t>(ranks));
  for (RankReport& report : reports) report.rank = first++;
  return reports;
}

}  // namespace

RankReports::RankReports(int ranks) : reports_(Unknown(0, ranks)) {}

void RankReports::Take(RankReport report) {
  const std::lock_guard lock(mutex_);
  const FailureOrigin origin = report.failure.origin;
  interrupted_ = interrupted_ || (origin != FailureOrigin::kNone && origin != FailureOrigin::kMismatch);
  RankReport& latest = reports_.at(static_cast<std::size_t>(report.rank));
  latest = std::move(report);
  changed_.notify_all();
}

bool RankReports::AllDone() const { return std::ranges::all_of(reports_, IsDone); }

bool RankReports::WaitForEnd(Clock::time_point limit) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return AllDone() || interrupted_; };
  if (limit == Clock::time_point::max())
    changed_.wait(lock, over);
  else
    changed_.wait_until(lock, limit, over);
  return AllDone();
}

bool RankReports::interrupted() const {
  const std::lock_guard lock(mutex_);
  return interrupted_;
}

void RankReports::Interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  changed_.notify_all();
}

bool RankReports::WaitUntil(Clock::time_point limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, limit, [&] { return AllDone(); });
}

void RankReports::WaitForFailed(Clock::time_point limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, limit, [&] {
    return std::ranges::all_of(reports_, [](const RankReport& report) {
      return report.failure.origin == FailureOrigin::kNone || IsDone(report);
    });
  });
}

std::vector<RankReport> RankReports::Get() const {
  const std::lock_guard lock(mutex_);
  return reports_;
}

int RanksOf(const RankRunners& runners) {
  int ranks = 0;
  for (const auto& runner : runners) ranks += runner->place().ranks;
  return ranks;
}

std::vector<RankReport> SnapshotsOf(const RankRunners& runners, bool stacks) {
  if (runners.size() == 1) return runners.front()->Snapshots(stacks);  // it keeps its own limit
  const auto parts = AskAll<std::vector<RankReport>>(
      runners.size(), [runners, stacks](std::size_t i) { return runners[i]->Snapshots(stacks); },
      RankReports::Clock::now() + kSnapshotsLimit);
  std::vector<RankReport> all;
  for (std::size_t i = 0; i < runners.size(); ++i) {
    const kernels::Place& place = runners[i]->place();
    for (const RankReport& report : parts[i] ? *parts[i] : Unknown(place.first, place.ranks))
      all.push_back(report);
  }
  return all;
}

}  // namespace cppool::daemon
