#include "client/command/bench_measure.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace cppool::command {
namespace {

constexpr std::int64_t kMostSamplesOfRound = 500;
constexpr std::int64_t kExposedRepeat = 5;  // iterations in which waits are stages

bool IsWaitOf(const std::string& stage, const std::string& parent) {
  constexpr std::string_view kWaiting = "/waiting";
  return stage.size() >= parent.size() + kWaiting.size() && stage.compare(0, parent.size(), parent) == 0 &&
         stage[parent.size()] == '/' && stage.ends_with(kWaiting);
}

void AddSamples(const Result& result, Measurement* to) {
  for (auto& [name, samples] : SlowestSamples(result)) {
    if (samples.empty()) continue;
    Stage& stage = to->stages[name];
    stage.rounds.push_back(base::Median(samples));
    stage.samples.insert(stage.samples.end(), samples.begin(), samples.end());
  }
  // The daemon's rate is for the median of the slowest rank.
  for (const auto& [name, tflops] : result.tflops) {
    const auto stage = to->stages.find(name);
    if (stage == to->stages.end()) continue;
    double slowest = 0;
    for (const Rank& rank : result.ranks)
      for (const auto& [timed, ms] : rank.gpu_ms)
        if (timed == name) slowest = std::max(slowest, ms);
    stage->second.work = tflops * slowest / 1000;
  }
}

}  // namespace

std::vector<std::pair<std::string, std::vector<double>>> SlowestSamples(const Result& result) {
  std::vector<std::pair<std::string, std::vector<double>>> slowest;
  for (const Rank& rank : result.ranks)
    for (const auto& [stage, samples] : rank.samples) {
      const auto known =
          std::ranges::find_if(slowest, [&name = stage](const auto& entry) { return entry.first == name; });
      if (known == slowest.end()) {
        slowest.emplace_back(stage, samples);
        continue;
      }
      auto& times = known->second;
      times.resize(std::min(times.size(), samples.size()));
      for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], samples[i]);
    }
  return slowest;
}

std::map<std::string, double> ExposedCommunication(const Result& result) {
  std::map<std::string, std::pair<double, double>> longest;  // step and work
  for (const Rank& rank : result.ranks)
    for (const auto& [stage, ms] : rank.gpu_ms) {
      if (stage.find('/') != std::string::npos) continue;
      double waiting = 0;
      for (const auto& [part, part_ms] : rank.gpu_ms)
        if (IsWaitOf(part, stage)) waiting += part_ms;
      auto& [step, work] = longest[stage];
      step = std::max(step, ms);
      work = std::max(work, ms - waiting);
    }
  std::map<std::string, double> exposed;
  for (const auto& [stage, times] : longest)
    exposed[stage] = times.first > 0 ? (times.first - times.second) / times.first : 0;
  return exposed;
}

PointMeasurer::PointMeasurer(CellRunner& runner, BenchPlan plan, std::function<void(double)> progress)
    : runner_(runner), plan_(std::move(plan)), progress_(std::move(progress)) {}

std::vector<Measurement> PointMeasurer::Measure(const suite::Cell& cell,
                                                const std::vector<Libraries>& libraries) {
  const bool exposes = cell.world_size > 1;
  asked_ = 0;
  to_ask_ = static_cast<double>(libraries.size()) * (1 + exposes + plan_.rounds);
  std::vector<Measurement> measurements(libraries.size());
  for (std::size_t i = 0; i < libraries.size(); ++i) {
    Measurement& measurement = measurements[i];
    RunOptions verify;
    const auto verified = Ask(cell, verify, libraries[i], &measurement);
    if (!verified) continue;
    measurement.kernels = verified->json.value("kernels", Json());
    for (const Check& check : verified->checks) {
      if (check.against != "oracle" || !check.ratio) continue;
      double& worst = measurement.errors[check.tensor];
      // NaN: the plain computation has no error.
      worst =
          std::isnan(*check.ratio) ? std::numeric_limits<double>::infinity() : std::max(worst, *check.ratio);
    }
    if (!exposes) continue;
    RunOptions waits;
    waits.checks = false;
    waits.warmup = plan_.warmup;
    waits.repeat = kExposedRepeat;
    waits.waits = true;
    if (const auto answer = Ask(cell, waits, libraries[i], &measurement))
      for (const auto& [stage, share] : ExposedCommunication(*answer))
        measurement.stages[stage].exposed = share;
  }
  return Rounds(cell, libraries, std::move(measurements));
}

std::vector<Measurement> PointMeasurer::MeasureAlone(const suite::Cell& cell,
                                                     const std::vector<Libraries>& libraries) {
  asked_ = 0;
  to_ask_ = static_cast<double>(libraries.size()) * plan_.rounds;
  return Rounds(cell, libraries, std::vector<Measurement>(libraries.size()));
}

std::vector<Measurement> PointMeasurer::Rounds(const suite::Cell& cell,
                                               const std::vector<Libraries>& libraries,
                                               std::vector<Measurement> measurements) {
  for (int round = 0; round < plan_.rounds; ++round)
    for (std::size_t i = 0; i < libraries.size(); ++i) {
      const std::size_t at = (i + static_cast<std::size_t>(round)) % libraries.size();
      if (const auto answer = Ask(cell, Round(round), libraries[at], &measurements[at]))
        AddSamples(*answer, &measurements[at]);
    }
  for (Measurement& measurement : measurements) {
    // Stages outside of iterations were met by their waits alone.
    std::erase_if(measurement.stages, [](const auto& entry) { return entry.second.samples.empty(); });
    if (measurement.error.empty() && measurement.stages.empty())
      measurement.error = "the case has no stages: mark what it does in its iterations";
    if (!measurement.error.empty()) measurement.stages.clear();
    measurement.precise = std::ranges::all_of(measurement.stages, [&](const auto& entry) {
      return base::MedianPrecision(entry.second.samples).value_or(1) <= plan_.precision;
    });
  }
  return measurements;
}

RunOptions PointMeasurer::Round(int round) const {
  RunOptions options;
  options.checks = false;
  options.warmup = plan_.warmup;
  options.profile = plan_.profile;
  if (plan_.repeat) {
    options.repeat = *plan_.repeat / plan_.rounds + (round < *plan_.repeat % plan_.rounds);
    // A single iteration has no samples of its own.
    if (options.repeat > 1) return options;
    options.sampling = Sampling{1, std::chrono::milliseconds(1), 1};
    return options;
  }
  // The rounds' samples together are then about as precise as asked for.
  options.sampling = Sampling{
      std::min(1.0, plan_.precision * std::sqrt(plan_.rounds)),
      std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(plan_.seconds * 1000 / plan_.rounds))),
      kMostSamplesOfRound};
  return options;
}

std::optional<Result> PointMeasurer::Ask(const suite::Cell& cell, RunOptions options,
                                         const Libraries& libraries, Measurement* to) {
  progress_(asked_++ / to_ask_);
  if (!to->error.empty()) return std::nullopt;
  options.deadline = plan_.deadline;
  options.load = libraries.load;
  options.kernels = libraries.kernels;
  Outcome outcome = runner_.Run(cell, options);
  if (outcome.kind == Status::kPassed) return std::move(outcome.result);
  to->error = (outcome.result ? std::string(ToString(outcome.kind)) + ": " : "") + outcome.error;
  to->skipped = outcome.kind == Status::kSkipped;
  return std::nullopt;
}

}  // namespace cppool::command
