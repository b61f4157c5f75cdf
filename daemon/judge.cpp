#include "daemon/judge.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <utility>

#include "daemon/failure_kind.h"
#include "daemon/timeout_report.h"

namespace cppool::daemon {
namespace {

using protocol::Check;
using protocol::FailureKind;
using protocol::RunResult;
using protocol::Status;

std::string NameOf(const Check& check) { return check.tensor + " against " + check.against; }

const Check* FailedCheck(const std::vector<Check>& checks) {
  const auto failed = std::ranges::find_if(checks, [](const Check& check) { return !check.ok; });
  return failed == checks.end() ? nullptr : &*failed;
}

protocol::Rank EntryOf(const RankReport& report) {
  protocol::Rank entry;
  entry.rank = report.rank;
  entry.error = report.failure.text;
  entry.traceback = report.traceback;
  entry.output = report.output;
  if (!IsDone(report)) {
    if (!entry.error.empty())
      entry.error += " (and did not return)";
    else
      entry.error =
          "did not return after another rank's failure: " +
          (report.phase == RankPhase::kUnknown ? std::string(kNoPlace) : DescribeProgress(report.streams));
    return entry;
  }
  entry.gpu_ms = report.times;
  entry.samples = report.samples;
  entry.extra = report.extra;
  if (!report.stacks.empty()) entry.extra["stack"] = StackLines(report.stacks);
  if (const Check* failed = FailedCheck(report.checks); failed && entry.error.empty())
    entry.error = "the check of " + NameOf(*failed) + " does not hold";
  entry.ok = entry.error.empty();
  return entry;
}

// The verdict on `result`, which has the checks of all ranks that are done.
void AddVerdict(const std::vector<RankReport>& reports, RunResult& result) {
  const RankReport* cause = Cause(reports);
  const Check* check = FailedCheck(result.checks);
  // A failed check explains more than the status that its rank returned; another rank's own error more than a
  // check, and a skip does not hide it.
  if (check && (!cause || cause->failure.status == CPPOOL_MISMATCH ||
                cause->failure.origin == FailureOrigin::kSkip || FailedCheck(cause->checks))) {
    // Rather the words of the rank whose check it is.
    std::string reason;
    for (const RankReport* rank : {cause, &reports.at(static_cast<std::size_t>(check->rank))}) {
      if (rank && rank->failure.status == CPPOOL_MISMATCH && rank->failure.gave_reason)
        reason = rank->failure.text;
    }
    char numbers[160];
    std::snprintf(numbers, sizeof(numbers), "max_abs_err %.4g, rel_err %.4g, tolerance %.4g",
                  check->max_abs_err, check->rel_err, check->tolerance);
    const auto failed = std::ranges::count_if(result.checks, [](const Check& each) { return !each.ok; });
    // A reason that is about another tensor does not explain these numbers.
    const bool explained = !reason.empty() && std::ranges::none_of(result.checks, [&](const Check& each) {
      return NameOf(each) != NameOf(*check) && reason.starts_with(NameOf(each) + ": ");
    });
    const std::string worst = DescribeWorst(*check);
    result.status = Status::kFailed;
    result.error = "rank " + std::to_string(check->rank) + ": " + NameOf(*check) + ": " + numbers +
                   (check->max_abs_err <= check->tolerance && !explained ? " (holds: see rel_err)" : "") +
                   " (" + std::to_string(failed) + " of " + std::to_string(result.checks.size()) +
                   " checks do not hold)" + (reason.empty() ? "" : ": " + reason) +
                   (worst.empty() ? "" : "; " + worst);
    result.failure = protocol::Failure{FailureKind::kMismatch, check->rank, "", result.error};
  } else if (cause) {
    const RankFailure& failure = cause->failure;
    const FailureKind kind = ToFailureKind(failure.status);
    result.status = kind == FailureKind::kMismatch ? Status::kFailed
                    : IsSkip(kind)                 ? Status::kSkipped
                                                   : Status::kError;
    const bool names_another = failure.culprit >= 0;  // then its text names that rank
    result.error = (names_another ? "" : "rank " + std::to_string(cause->rank) + ": ") + failure.text;
    result.failure =
        protocol::Failure{kind, names_another ? failure.culprit : cause->rank, failure.stage, failure.text};
  } else {
    result.status = Status::kPassed;
  }
}

void AddTflops(const std::vector<RankReport>& reports, RunResult& result) {
  if (result.status != Status::kPassed && result.status != Status::kFailed) return;
  std::vector<std::pair<std::string, double>> total;  // floating-point operations of all ranks
  for (const RankReport& report : reports) {
    for (const auto& [stage, flops] : report.work) {
      const auto known =
          std::ranges::find_if(total, [&name = stage](const auto& t) { return t.first == name; });
      if (known == total.end()) {
        total.emplace_back(stage, flops);
      } else {
        known->second += flops;
      }
    }
  }
  for (const auto& [stage, flops] : total) {
    double slowest_ms = 0;
    for (const RankReport& report : reports) {
      for (const auto& [name, ms] : report.times) {
        if (name == stage) slowest_ms = std::max(slowest_ms, ms);
      }
    }
    if (slowest_ms > 0)
      result.tflops.emplace_back(stage,
                                 flops / static_cast<double>(reports.size()) / (slowest_ms * 1e-3) * 1e-12);
  }
}

}  // namespace

const RankReport* Cause(const std::vector<RankReport>& reports) {
  const auto weight = [](const RankReport& report) {
    return std::pair(report.failure.origin, report.failure.order);
  };
  auto best =
      std::ranges::min_element(reports, [&](const auto& a, const auto& b) { return weight(a) < weight(b); });
  // A skip explains what communicators report, and hides no mismatch.
  if (best != reports.end() && best->failure.origin == FailureOrigin::kSkip) {
    const auto mismatch = std::ranges::min_element(reports, {}, [](const RankReport& report) {
      return std::pair(report.failure.origin != FailureOrigin::kMismatch, report.failure.order);
    });
    if (mismatch->failure.origin == FailureOrigin::kMismatch) best = mismatch;
  }
  if (best == reports.end() || best->failure.origin == FailureOrigin::kNone) return nullptr;
  // A failure of the culprit that it names explains it better.
  const auto named = static_cast<std::size_t>(best->failure.culprit);
  if (best->failure.culprit >= 0 && named < reports.size()) {
    const RankReport& culprit = reports[named];
    if (culprit.failure.origin <= FailureOrigin::kMismatch && culprit.failure.culprit < 0) return &culprit;
  }
  return &*best;
}

bool NeedsProbe(const std::vector<RankReport>& reports, bool aborted) {
  return aborted || std::ranges::any_of(reports, [](const RankReport& report) {
           const cppool_status status = report.failure.status;
           return report.needs_probe || (status != CPPOOL_OK && status != CPPOOL_MISMATCH &&
                                         status != CPPOOL_CANCELLED && !IsSkip(ToFailureKind(status)));
         });
}

RunResult Judge(const PreparedRun& run, const std::vector<RankReport>& reports, const std::string& stopped,
                const std::string& unsound) {
  RunResult result;
  std::string stuck;
  for (const RankReport& report : reports) {
    result.ranks.push_back(EntryOf(report));
    if (!IsDone(report)) {
      stuck += (stuck.empty() ? "rank " : ", rank ") + std::to_string(report.rank);
      continue;
    }
    result.leaks.allocations += report.leaks.allocations;
    result.leaks.device_bytes += report.leaks.device_bytes;
    result.leaks.host_bytes += report.leaks.host_bytes;
    result.checks.insert(result.checks.end(), report.checks.begin(), report.checks.end());
  }
  AddVerdict(reports, result);
  if (stuck.empty()) AddTflops(reports, result);
  if (result.failure && result.failure->rank)
    result.failure->node = reports[static_cast<std::size_t>(*result.failure->rank)].node;
  result.seed = run.seed;
  result.kernels = run.kernels;
  result.warnings = run.warnings;
  for (const RankReport& report : reports)
    for (const std::string& warning : report.warnings)
      result.warnings.push_back("rank " + std::to_string(report.rank) + ": " + warning);
  result.stopped = stopped;
  if (result.status == Status::kPassed && run.options.checks && run.python.is_null() && result.checks.empty())
    result.warnings.push_back("no check was reported, so nothing was compared (\"checks\" is true)");
  result.fatal = !stuck.empty() || !unsound.empty();
  if (result.fatal)
    result.error += "; not sound afterwards: " + (stuck.empty() ? unsound : stuck + " did not return");
  return result;
}

}  // namespace cppool::daemon
