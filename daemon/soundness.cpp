#include "daemon/soundness.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/judge.h"
#include "daemon/log.h"
#include "kernels/backend.h"
#include "kernels/error.h"

namespace cppool::daemon {
namespace {

using Clock = RankReports::Clock;

// Calls `part`; what it throws is reported, where what the rank itself has caused counts more. True: nothing
// was thrown.
template <typename Part>
bool Attempt(RankReport& report, Meeting& meeting, const RankRunner::Sink& sink, Part part) {
  const auto note = [&](CaseFailure failure) {
    const int order = meeting.Failed().order;
    const FailureOrigin origin =
        failure.culprit == kernels::RuntimeError::kOwn ? FailureOrigin::kOwn : FailureOrigin::kPropagated;
    failure.culprit = kernels::RuntimeError::kOwn;  // the answer names the rank that has found it
    if (origin >= report.failure.origin) return;
    report.failure = {std::move(failure), "", origin, order};
    sink(report);
  };
  try {
    part();
    return true;
  } catch (const kernels::RuntimeError& error) {
    note({error.status(), error.what(), error.culprit()});
  } catch (const std::exception& error) {
    note({CPPOOL_INTERNAL, error.what()});
  }
  return false;
}

}  // namespace

void ProbeRank(kernels::RankRuntime& runtime, int rank, Meeting& meeting, std::uint64_t round,
               const RankRunner::Sink& sink) {
  RankReport report;
  report.rank = rank;
  const bool clean = Attempt(report, meeting, sink, [&] { runtime.BeginCase(); });
  if (meeting.Begin(rank, clean)) {  // FindUnsound has the limit
    Attempt(report, meeting, sink, [&] { kernels::ProbeGroups(runtime, round); });
    Attempt(report, meeting, sink, [&] { runtime.EndCase(); });
  }
  report.phase = RankPhase::kDone;
  sink(std::move(report));
}

std::string FindUnsound(const RankRunners& runners, std::chrono::milliseconds limit) {
  static std::atomic<std::uint64_t> rounds{0};
  const auto start = Clock::now();
  try {
    for (const auto& runner : runners) runner->Recover(limit);
  } catch (const std::exception& error) {
    return error.what();
  }
  const int ranks = RanksOf(runners);
  // Shared with the ranks, of which some may never return.
  const auto meeting = std::make_shared<MemoryMeeting>(ranks, std::nullopt, nullptr);
  const auto reports = std::make_shared<RankReports>(ranks);
  const std::uint64_t round = ++rounds;
  for (const auto& runner : runners)
    runner->StartProbe(meeting, round, [reports](RankReport report) { reports->Take(std::move(report)); });
  const bool all_done = reports->WaitUntil(start + limit);
  const std::vector<RankReport> found = reports->Get();
  if (all_done) {
    for (const auto& runner : runners) runner->Wait();
  }
  if (const RankReport* wrong = Cause(found))
    return "rank " + std::to_string(wrong->rank) + ": " + wrong->failure.text;
  if (all_done) {
    const std::chrono::duration<double, std::milli> took = Clock::now() - start;
    Log(LogLevel::kDebug, "the world is sound; the probe took " + Rounded(took.count(), 2) + " ms");
    return "";
  }
  std::string missing;
  for (const RankReport& report : found) {
    if (!IsDone(report)) missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(report.rank);
  }
  return missing + " did not return from small collectives within " + std::to_string(limit.count()) + " ms";
}

}  // namespace cppool::daemon
