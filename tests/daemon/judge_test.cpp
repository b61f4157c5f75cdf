// Reports of all ranks and the answers to them, and reports as text: no thread, no device.
#include "daemon/judge.h"

#include <cmath>
#include <limits>

#include "protocol/json_text.h"
#include "tests/catch.h"

namespace cppool::test {
namespace {

using daemon::CaseFailure;
using daemon::FailureOrigin;
using daemon::Judge;
using daemon::PreparedRun;
using daemon::RankFailure;
using daemon::RankPhase;
using daemon::RankReport;
using protocol::FailureKind;
using protocol::Status;

constexpr int kOwn = kernels::RuntimeError::kOwn;
constexpr int kElsewhere = kernels::RuntimeError::kElsewhere;

RankReport Done(int rank) {
  RankReport report;
  report.rank = rank;
  report.phase = RankPhase::kDone;
  report.checks = {{"out", "no_cp", rank, 0.001, 0.002, 0.01, true, {}}};
  return report;
}

std::vector<RankReport> AllDone(int ranks = 3) {
  std::vector<RankReport> reports;
  for (int rank = 0; rank < ranks; ++rank) reports.push_back(Done(rank));
  return reports;
}

RankFailure Failure(int order, const CaseFailure& failure, bool after_abort = false) {
  return {failure, "forward/step", OriginOf(failure, after_abort), order};
}

protocol::RunResult Judged(const std::vector<RankReport>& reports, const std::string& unsound = "") {
  return Judge(PreparedRun{}, reports, "", unsound);
}

}  // namespace

TEST_CASE("judge: the failure that explains the others is the answer's") {
  struct Row {
    std::string what;
    std::vector<std::pair<int, RankFailure>> failures;  // by rank
    Status status;
    FailureKind kind;
    int rank;
    std::string error;
    bool probe;
  };
  const RankFailure own = Failure(3, {CPPOOL_CUDA, "an illegal address"});
  const RankFailure skip = Failure(2, {CPPOOL_UNSUPPORTED, "no kernel"});
  const RankFailure comm = Failure(1, {CPPOOL_NCCL, "a communicator failed"});
  const RankFailure mismatch = Failure(1, {CPPOOL_MISMATCH, "7 is not 8"});
  const RankFailure released = Failure(4, {CPPOOL_INTERNAL, "released"}, true);
  const RankFailure names_1 = Failure(1, {CPPOOL_INTERNAL, "rank 1 has left", 1});
  const std::vector<Row> rows = {
      {"a skip does not need a probe",
       {{2, skip}},
       Status::kSkipped,
       FailureKind::kUnsupported,
       2,
       "rank 2: no kernel",
       false},
      {"an own failure comes before an earlier skip",
       {{0, skip}, {2, own}},
       Status::kError,
       FailureKind::kCuda,
       2,
       "rank 2: an illegal address",
       true},
      {"a skip comes before an earlier error of a communicator",
       {{0, comm}, {1, skip}},
       Status::kSkipped,
       FailureKind::kUnsupported,
       1,
       "rank 1: no kernel",
       true},
      {"a skip hides no mismatch, whatever a communicator reports",
       {{0, comm}, {1, skip}, {2, mismatch}},
       Status::kFailed,
       FailureKind::kMismatch,
       2,
       "rank 2: 7 is not 8",
       true},
      {"an error of a communicator comes before an earlier mismatch",
       {{0, comm}, {1, mismatch}},
       Status::kError,
       FailureKind::kNccl,
       0,
       "rank 0: a communicator failed",
       true},
      {"a mismatch comes before what an abort has released",
       {{0, released}, {1, mismatch}},
       Status::kFailed,
       FailureKind::kMismatch,
       1,
       "rank 1: 7 is not 8",
       true},
      {"of equals the first counts",
       {{0, Failure(2, {CPPOOL_CUDA, "late"})}, {1, Failure(1, {CPPOOL_CUDA, "early"})}},
       Status::kError,
       FailureKind::kCuda,
       1,
       "rank 1: early",
       true},
      {"a rank that a failure names is the answer's",
       {{0, names_1}},
       Status::kError,
       FailureKind::kInternal,
       1,
       "rank 1 has left",
       true},
      {"the named rank's own words are better, be they a mismatch",
       {{0, names_1}, {1, mismatch}},
       Status::kFailed,
       FailureKind::kMismatch,
       1,
       "rank 1: 7 is not 8",
       true},
      {"and not better when they name another rank",
       {{0, names_1}, {1, Failure(2, {CPPOOL_INTERNAL, "not I", 0})}},
       Status::kError,
       FailureKind::kInternal,
       1,
       "rank 1 has left",
       true},
      {"nor when an abort has caused them",
       {{0, names_1}, {1, released}},
       Status::kError,
       FailureKind::kInternal,
       1,
       "rank 1 has left",
       true},
      {"nobody's failure is its rank's",
       {{2, Failure(1, {CPPOOL_INTERNAL, "elsewhere", kElsewhere})}},
       Status::kError,
       FailureKind::kInternal,
       2,
       "rank 2: elsewhere",
       true},
  };
  for (const Row& row : rows) {
    INFO(row.what);
    auto reports = AllDone();
    for (const auto& [rank, failure] : row.failures) reports[rank].failure = failure;
    const auto result = Judged(reports);
    CHECK(result.status == row.status);
    CHECK(result.failure->kind == row.kind);
    CHECK(result.failure->rank == row.rank);
    CHECK(result.failure->stage == "forward/step");
    CHECK(result.error == row.error);
    CHECK_FALSE(result.fatal);
    CHECK(daemon::NeedsProbe(reports, false) == row.probe);
    for (const auto& [rank, failure] : row.failures) {
      CHECK_FALSE(result.ranks[rank].ok);
      CHECK(result.ranks[rank].error == failure.text);
    }
  }
  const auto passed = Judged(AllDone());
  CHECK(passed.status == Status::kPassed);
  CHECK(passed.checks.size() == 3);
  CHECK_FALSE(daemon::NeedsProbe(AllDone(), false));
  CHECK(daemon::NeedsProbe(AllDone(), true));
  auto open = AllDone();
  open[1].needs_probe = true;
  CHECK(daemon::NeedsProbe(open, false));
}

TEST_CASE("judge: a failed check, and the words of the rank whose check it is") {
  const protocol::Check by_rel{"out", "no_cp", 1, 0.005, 0.3, 0.01, false, {}};
  const protocol::Check by_max{"out", "no_cp", 1, 0.5, 0.3, 0.01, false, {}};
  const std::string of_out =
      "out against no_cp: tokens 0 to 63 of sequence 0, head 1: the error is 3 times the limit";
  const std::string of_dq =
      "dq against oracle: tokens 0 to 63 of sequence 0, head 1: the error is 3 times the limit";
  struct Row {
    protocol::Check check;
    std::string reason, error;
  };
  const std::string numbers = "rank 1: out against no_cp: max_abs_err 0.005, rel_err 0.3, tolerance 0.01";
  const std::vector<Row> rows = {
      {by_rel, "", numbers + " (holds: see rel_err) (1 of 5 checks do not hold)"},
      {by_rel, of_out, numbers + " (1 of 5 checks do not hold): " + of_out},
      {by_rel, of_dq, numbers + " (holds: see rel_err) (1 of 5 checks do not hold): " + of_dq},
      {by_rel, "3 elements differ in bits",
       numbers + " (1 of 5 checks do not hold): 3 elements differ in bits"},
      {by_max, "",
       "rank 1: out against no_cp: max_abs_err 0.5, rel_err 0.3, tolerance 0.01 (1 of 5 checks do not hold)"},
  };
  for (const Row& row : rows) {
    auto reports = AllDone();
    reports[1].checks.push_back(row.check);
    reports[1].checks.push_back({"dq", "oracle", 1, 0.001, 0.002, 0.01, true, {}});
    if (!row.reason.empty()) reports[1].failure = Failure(1, {CPPOOL_MISMATCH, row.reason, kOwn, true});
    const auto result = Judged(reports);
    CHECK(result.error == row.error);
    CHECK(result.status == Status::kFailed);
    CHECK(result.failure->kind == FailureKind::kMismatch);
    CHECK(result.failure->rank == 1);
    CHECK(result.ranks[1].error ==
          (row.reason.empty() ? "the check of out against no_cp does not hold" : row.reason));
    CHECK(result.ranks[0].ok);
  }
  // A check explains the error that its rank returns, and not that of another rank.
  auto reports = AllDone();
  reports[1].checks.push_back(by_max);
  reports[1].failure = Failure(1, {CPPOOL_CUDA, "a consequence"});
  CHECK(Judged(reports).status == Status::kFailed);
  reports[2].failure = Failure(2, {CPPOOL_CUDA, "an illegal address"});
  CHECK(Judged(reports).failure->rank == 1);
  reports[1].failure = {};
  CHECK(Judged(reports).error == "rank 2: an illegal address");
  // Nor is it hidden by another rank's skip.
  reports[2].failure = Failure(2, {CPPOOL_UNSUPPORTED, "no kernel"});
  CHECK(Judged(reports).status == Status::kFailed);
  CHECK(Judged(reports).failure->rank == 1);
}

TEST_CASE("judge: what ends the daemon, and what a rank reports that is not done") {
  auto reports = AllDone();
  reports[1].failure = Failure(1, {CPPOOL_INTERNAL, "it broke"});
  CHECK(Judged(reports, "rank 0: a sum is wrong").error ==
        "rank 1: it broke; not sound afterwards: rank 0: a sum is wrong");
  CHECK(Judged(reports, "rank 0: a sum is wrong").fatal);
  CHECK(Judged(reports).leaks.allocations == 0);
  for (auto& report : reports) {
    report.leaks = {1, 10, 100};
    report.work = {{"forward", 6e9}};
    report.times = {{"forward", report.rank + 1.0}};
  }
  reports[0].phase = RankPhase::kRunning;
  reports[0].streams = {{"main", "p2p step 2 of 4", 1.5, false}};
  reports[2].phase = RankPhase::kUnknown;
  const auto result = Judged(reports);
  CHECK(result.fatal);
  CHECK(result.error == "rank 1: it broke; not sound afterwards: rank 0, rank 2 did not return");
  CHECK(result.ranks[0].error == "did not return after another rank's failure: p2p step 2 of 4, 1.50 s");
  CHECK(result.ranks[2].error ==
        "did not return after another rank's failure: the runtime does not say where");
  CHECK(result.ranks[0].gpu_ms.empty());
  CHECK(result.checks.size() == 1);
  CHECK(result.leaks.device_bytes == 10);
  CHECK(result.tflops.empty());
  reports[1].phase = RankPhase::kEnding;
  CHECK(Judged(reports).ranks[1].error == "it broke (and did not return)");
  for (auto& report : reports) report.phase = RankPhase::kDone, report.failure = {};
  const auto passed = Judged(reports);
  CHECK(passed.leaks.host_bytes == 300);
  REQUIRE(passed.tflops.size() == 1);
  CHECK(passed.tflops[0].second == Catch::Approx(2.0));  // 6 GFLOP of each rank in the slowest one's 3 ms
}

TEST_CASE("judge: a run that compared nothing says so where checks are wanted") {
  PreparedRun run;
  run.seed = 7;
  run.warnings = {"about the request"};
  auto reports = AllDone(1);
  CHECK(Judge(run, reports, "precision", "").warnings.size() == 1);
  reports[0].checks.clear();
  const auto result = Judge(run, reports, "precision", "");
  CHECK(result.warnings.size() == 2);
  CHECK(result.seed == 7);
  CHECK(result.stopped == "precision");
  run.options.checks = false;
  CHECK(Judge(run, reports, "", "").warnings.size() == 1);
}

TEST_CASE("a rank's report is the same after it was text") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  RankReport report = Done(3);
  report.phase = RankPhase::kReady;
  report.failure = Failure(2, {CPPOOL_NCCL, "\"it\" broke\n", kElsewhere, true});
  report.needs_probe = true;
  report.checks.push_back({"dq", "oracle", 3, nan, inf, -inf, false, 0.1});
  report.times = {{"z", 0.1}, {"a", 5e-324}};  // in their order
  report.samples = {{"forward", {1.0 / 3, nan, -0.0}}};
  report.work = {{"", 1e18}};
  report.extra = {{"bandwidth", {{"GB/s", 3.5}}}};
  report.leaks = {1, 2, std::size_t{1} << 60};
  report.streams = {{"main", "step", 0.1, false, "waiting for recv from rank 0", {0}, "stream 1", 42}};
  report.awaits = {0, 2};
  report.stacks = {{"poll [libc.so.6]", "Load"}, {}};
  const auto text = [](const RankReport& any) { return protocol::JsonText(ToJson(any)); };
  const RankReport back = daemon::RankReportFrom(protocol::ParseJson(text(report)), 4);
  CHECK(text(back) == text(report));
  CHECK(back.phase == RankPhase::kReady);
  CHECK(back.failure.origin == FailureOrigin::kPropagated);
  CHECK(back.failure.text == report.failure.text);
  CHECK(back.failure.gave_reason);
  REQUIRE(back.checks.size() == 2);
  CHECK(std::isnan(back.checks[1].max_abs_err));
  CHECK(back.checks[1].rel_err == inf);
  CHECK(back.checks[1].tolerance == -inf);
  CHECK(back.checks[1].ratio == 0.1);
  CHECK(back.times == report.times);
  CHECK(back.samples[0].second[0] == 1.0 / 3);
  CHECK(std::isnan(back.samples[0].second[1]));
  CHECK(std::signbit(back.samples[0].second[2]));
  CHECK(back.work == report.work);
  CHECK(back.extra == report.extra);
  CHECK(back.leaks.host_bytes == report.leaks.host_bytes);
  REQUIRE(back.streams.size() == 1);
  CHECK(back.streams[0].awaits == std::vector<int>{0});
  CHECK(back.streams[0].thread == 42);
  CHECK(back.awaits == report.awaits);
  CHECK(back.stacks == report.stacks);

  const protocol::Json json = ToJson(report);
  for (const auto& [member, value] : json.items()) {
    INFO(member);
    auto without = json, wrong = json;
    without.erase(member);
    CHECK_THROWS_WITH(daemon::RankReportFrom(without, 4),
                      Catch::Matchers::ContainsSubstring("cannot be read"));
    wrong[member] = value.is_string() ? protocol::Json(true) : protocol::Json("x");
    CHECK_THROWS_AS(daemon::RankReportFrom(wrong, 4), std::runtime_error);
  }
  CHECK(daemon::RankReportFrom(json, kernels::Place(4, 2, 2)).rank == 3);
  for (const kernels::Place& place : {kernels::Place(3), kernels::Place(8, 0, 3), kernels::Place(8, 4, 4)})
    CHECK_THROWS_WITH(daemon::RankReportFrom(json, place),
                      Catch::Matchers::EndsWith("rank 3 is not of the place"));
  auto of_another = json;
  of_another["checks"][1]["rank"] = 7;
  CHECK_THROWS_WITH(daemon::RankReportFrom(of_another, 8),
                    Catch::Matchers::EndsWith("a check is of another rank"));
}

}  // namespace cppool::test
