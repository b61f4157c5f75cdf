// `cppool bench`: every point of a sweep is verified once and then timed, and compared with the same problem on one GPU. Its
// output is in bench_report.h.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "client/command/bench_report.h"
#include "client/command/command.h"
#include "client/command/interruption.h"
#include "client/command/progress.h"
#include "client/command/runner.h"
#include "client/command/sweep.h"
#include "client/command/text.h"
#include "protocol/start.h"

namespace cppool::command {
namespace {

struct Arguments {
  DaemonArguments daemon;
  std::string case_name = "attention";
  std::vector<int> world_sizes = {2};
  std::vector<std::string> params;
  std::int64_t warmup = 3, repeat = 10;
  double deadline = 300;
  bool json = false;
};

class Bench {
 public:
  Bench(const Arguments& arguments, const Streams& streams)
      : arguments_(arguments),
        streams_(streams),
        axes_(SweepAxesOf(arguments.params)),
        points_(PointsOf(arguments.case_name, arguments.world_sizes, axes_)),
        progress_(streams_.err, streams_.terminal, points_.size()),
        // Each point runs in its own world and in that of one GPU: both stay warm.
        runner_(ToPoolOptions(arguments.daemon), {.keep_worlds = true}) {
    results_.axes = axes_;
    results_.warmup = arguments.warmup;
    results_.repeat = arguments.repeat;
  }

  int Run() {
    int failed = 0;
    bool measured_any = false;
    {
      const Interruption interruption([this](int signal) { Interrupted(signal); });
      for (const SweepPoint& point : points_) {
        progress_.Show(static_cast<int>(results_.points.size()), failed, point.cell.name);
        BenchPoint measured = Measure(point);
        const Measurement& measurement = measured.measured;
        failed += !measurement.error.empty() && !measurement.skipped;
        measured_any = measured_any || measurement.error.empty();
        const std::lock_guard lock(mutex_);
        results_.points.push_back(std::move(measured));
        results_.worlds = runner_.worlds();
      }
    }
    Print();
    return failed == 0 && measured_any ? kSuccess : kFailure;
  }

 private:
  BenchPoint Measure(const SweepPoint& point) {
    BenchPoint measured{point, {}, {}, Repeat(point.cell, "run"), Repeat(point.cell, "bench")};
    measured.measured = Ask(point.cell, /*verify=*/true);
    if (!measured.measured.error.empty()) return measured;
    measured.measured = Ask(point.cell, /*verify=*/false);
    if (!measured.measured.error.empty()) return measured;
    measured.one_gpu = point.cell.world_size == 1 ? measured.measured : OneGpu(point.cell);
    return measured;
  }

  const Measurement& OneGpu(const Cell& cell) {
    Cell alone = cell;
    alone.world_size = 1;
    if (alone.params.contains("cp_comm_type"))
      alone.params["cp_comm_type"] = "p2p";  // with one rank all schedules are the same
    const auto [known, fresh] = one_gpu_.try_emplace(alone.params.dump());
    if (fresh) known->second = Ask(alone, /*verify=*/false);
    return known->second;
  }

  Measurement Ask(const Cell& cell, bool verify) {
    RunOptions options;
    options.deadline = ToMilliseconds(arguments_.deadline);
    options.checks = verify;
    options.warmup = verify ? 0 : arguments_.warmup;
    options.repeat = verify ? 1 : arguments_.repeat;
    const Outcome outcome = runner_.Run(cell, options);
    if (outcome.kind == Status::kPassed) return MeasurementOf(*outcome.result);
    const std::string status = outcome.result ? std::string(ToString(outcome.kind)) + ": " : "";
    return {status + outcome.error, {}, outcome.kind == Status::kSkipped};
  }

  std::string Repeat(const Cell& cell, const std::string& subcommand) const {
    std::vector<std::string> words = ToWords(arguments_.daemon);
    for (std::string& word : DeadlineWords(arguments_.deadline)) words.push_back(std::move(word));
    if (subcommand == "bench") {
      words.insert(words.end(), {"--warmup", std::to_string(arguments_.warmup), "--repeat",
                                 std::to_string(arguments_.repeat)});
    }
    return RepeatCommand(streams_.program, cell, words, subcommand);
  }

  // Called on another thread, while a point may run: prints the points that are done.
  void Interrupted(int signal) {
    mutex_.lock();  // never unlocked: no further point is added
    results_.interrupted =
        DescribeInterruption(signal, static_cast<int>(results_.points.size()), points_.size(), "points");
    Print();
  }

  void Print() {
    progress_.Clear();
    (arguments_.json ? PrintBenchJson : PrintBenchTable)(streams_.out, results_);
  }

  const Arguments& arguments_;
  const Streams streams_;
  const std::vector<SweepAxis> axes_;
  const std::vector<SweepPoint> points_;
  Progress progress_;
  CellRunner runner_;
  std::map<std::string, Measurement> one_gpu_;  // by parameters
  std::mutex mutex_;                            // guards the results
  BenchResults results_;
};

}  // namespace

void AddBench(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* bench = app.add_subcommand("bench", "Times a case over a sweep of its parameters");
  AddRepeatable(
      *bench, "--param", &arguments->params,
      "A parameter and its values, key=A,B,... (8k is 8192; a list as a value goes in brackets); all "
      "combinations are timed. max_seqlen_kv follows max_seqlen_q if not given")
      ->check(IsUtf8);
  bench->add_option("--world-size", arguments->world_sizes, "Numbers of ranks, N,M,...")
      ->delimiter(',')
      ->check(CLI::Range(1, protocol::kMaxWorldSize))
      ->capture_default_str();
  bench->add_option("--case", arguments->case_name, "The case to time")->check(IsUtf8)->capture_default_str();
  bench->add_option("--warmup", arguments->warmup, "Iterations before those that are timed")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  bench->add_option("--repeat", arguments->repeat, "Timed iterations: the median is shown")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  AddDeadline(*bench, &arguments->deadline, "Seconds for each point");
  AddDaemonOptions(*bench, &arguments->daemon);
  bench->add_flag("--json", arguments->json, "One JSON object per point, then a summary object");
  bench->callback([arguments, streams, exit_code] { *exit_code = Bench(*arguments, streams).Run(); });
}

}  // namespace cppool::command
