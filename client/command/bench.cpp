// `cppool bench`: every point of a sweep is verified once, then timed; against the same problem on one GPU.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "client/command/cell.h"
#include "client/command/command.h"
#include "protocol/start.h"
#include "client/command/text.h"

namespace cppool::command {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

struct Arguments {
  DaemonArguments daemon;
  std::string case_name = "attention";
  std::vector<int> world_sizes = {2};
  std::vector<std::string> params;
  std::int64_t warmup = 3, repeat = 10;
  double deadline = 300;
  bool json = false;
};

struct Axis {
  std::string key;
  std::vector<Json> values;
};

// A stage's time on the slowest rank, and its rate per GPU.
struct Timing {
  double ms = kNone;
  double tflops = kNone;
};

struct Measurement {
  std::string error;  // empty: the stages are there
  std::map<std::string, Timing> stages;

  // The rate over several stages together.
  Timing Together(const std::vector<std::string>& names) const {
    double ms = 0, work = 0;
    for (const std::string& name : names) {
      auto found = stages.find(name);
      if (found == stages.end()) return {};
      ms += found->second.ms;
      work += found->second.ms * found->second.tflops;
    }
    return {ms, work / ms};
  }
};

struct Point {
  Cell cell;
  std::vector<Json> swept;  // the values of the axes with more than one
  Measurement measured, one_gpu;
};

std::vector<Axis> AxesOf(const std::vector<std::string>& params) {
  std::vector<Axis> axes;
  for (const std::string& text : params) {
    auto [key, values] = SplitAssignment(text, "--param");
    Axis axis{key, {}};
    for (const std::string& value : SplitList(values)) axis.values.push_back(ValueFromText(value));
    auto same = std::find_if(axes.begin(), axes.end(),
                             [&, &key = key](const Axis& other) { return other.key == key; });
    if (same != axes.end())
      throw UsageError("--param " + key + " is given twice: give its values in one list, " + key + "=A,B");
    axes.push_back(std::move(axis));
  }
  return axes;
}

std::vector<Point> PointsOf(const Arguments& arguments, const std::vector<Axis>& axes) {
  std::vector<Point> points;
  for (int world_size : arguments.world_sizes) {
    Point first;
    first.cell.world_size = world_size;
    first.cell.case_name = arguments.case_name;
    std::vector<Point> product = {first};
    for (const Axis& axis : axes) {
      std::vector<Point> longer;
      for (const Point& point : product)
        for (const Json& value : axis.values) {
          longer.push_back(point);
          longer.back().cell.params[axis.key] = value;
          if (axis.values.size() > 1) longer.back().swept.push_back(value);
        }
      product = std::move(longer);
    }
    points.insert(points.end(), product.begin(), product.end());
  }
  for (Point& point : points) {  // a sweep over the queries' length means self-attention
    Json& params = point.cell.params;
    if (params.contains("max_seqlen_q") && !params.contains("max_seqlen_kv"))
      params["max_seqlen_kv"] = params["max_seqlen_q"];
  }
  return points;
}

class Bench {
 public:
  Bench(const Arguments& arguments, const Streams& streams)
      : arguments_(arguments),
        streams_(streams),
        axes_(AxesOf(arguments.params)),
        points_(PointsOf(arguments, axes_)),
        pools_(ToPoolOptions(arguments.daemon)) {}

  int Run() {
    for (std::size_t i = 0; i < points_.size(); ++i) {
      if (streams_.terminal)
        streams_.err << "\r\033[K[" << i + 1 << "/" << points_.size() << "] W=" << points_[i].cell.world_size
                     << " " << points_[i].cell.params.dump() << std::flush;
      Measure(&points_[i]);
    }
    if (streams_.terminal) streams_.err << "\r\033[K" << std::flush;
    arguments_.json ? PrintJson() : PrintTable();
    bool good = std::all_of(points_.begin(), points_.end(),
                            [](const Point& point) { return point.measured.error.empty(); });
    return good ? kSuccess : kFailure;
  }

 private:
  void Measure(Point* point) {
    point->measured = Ask(point->cell, /*verify=*/true);
    if (!point->measured.error.empty()) return;
    point->measured = Ask(point->cell, /*verify=*/false);
    if (!point->measured.error.empty()) return;
    if (point->cell.world_size == 1) {
      point->one_gpu = point->measured;
      return;
    }
    Cell alone = point->cell;
    alone.world_size = 1;
    if (alone.params.contains("cp_comm_type"))
      alone.params["cp_comm_type"] = "p2p";  // with one rank they are all the same
    auto [known, fresh] = one_gpu_.try_emplace(alone.params.dump());
    if (fresh) known->second = Ask(alone, /*verify=*/false);
    point->one_gpu = known->second;
  }

  Measurement Ask(const Cell& cell, bool verify) {
    Measurement measurement;
    RunOptions options;
    options.case_name = cell.case_name;
    options.deadline = std::chrono::milliseconds(std::llround(arguments_.deadline * 1000));
    options.checks = verify;
    options.warmup = verify ? 0 : arguments_.warmup;
    options.repeat = verify ? 1 : arguments_.repeat;
    try {
      Pool& pool = pools_.At(cell.world_size);
      if (dead_.count(cell.world_size) != 0) {
        measurement.error = dead_[cell.world_size];
        return measurement;
      }
      Result result = pool.Run(cell.params, options);
      if (!result.ok()) {
        measurement.error = std::string(ToString(result.status)) + ": " + result.error;
        return measurement;
      }
      for (const Rank& rank : result.ranks)
        for (const auto& [stage, ms] : rank.gpu_ms) {
          if (stage.find('/') != std::string::npos) continue;  // a part of another
          Timing& timing = measurement.stages[stage];
          if (!(timing.ms >= ms)) timing.ms = ms;
        }
      for (const auto& [stage, tflops] : result.tflops)
        if (auto found = measurement.stages.find(stage); found != measurement.stages.end())
          found->second.tflops = tflops;
      if (worlds_.count(cell.world_size) == 0) worlds_[cell.world_size] = pool.Hello();
    } catch (const PoolError& error) {
      measurement.error = error.what();
      if (error.kind() == PoolError::Kind::kStart) dead_[cell.world_size] = measurement.error;
    }
    return measurement;
  }

  // The stages that are shown: those of attention where they are, else all that have a rate, else all.
  std::vector<std::string> Stages() const {
    std::vector<std::string> all, rated;
    for (const Point& point : points_)
      for (const auto& [stage, timing] : point.measured.stages) {
        auto add = [&, &stage = stage](std::vector<std::string>* list) {
          if (std::find(list->begin(), list->end(), stage) == list->end()) list->push_back(stage);
        };
        add(&all);
        if (std::isfinite(timing.tflops)) add(&rated);
      }
    auto has = [&](const char* stage) { return std::find(all.begin(), all.end(), stage) != all.end(); };
    if (has("forward") && has("backward")) return {"forward", "backward"};
    if (has("forward")) return {"forward"};
    return rated.empty() ? all : rated;
  }

  static double Efficiency(const Timing& many, const Timing& one) { return many.tflops / one.tflops; }

  std::string Repeat(const Cell& cell) const {
    std::vector<std::string> words = ToWords(arguments_.daemon);
    for (std::string& word : DeadlineWords(arguments_.deadline)) words.push_back(std::move(word));
    return RepeatCommand(streams_.program, cell, words);
  }

  void PrintJson() {
    const std::vector<std::string> stages = Stages();
    auto number = [](double value) { return std::isfinite(value) ? Json(value) : Json(); };
    auto describe = [&](const Measurement& measured) {
      Json json = Json::object();
      if (!measured.error.empty()) json["error"] = measured.error;
      for (const auto& [stage, timing] : measured.stages)
        json["stages"][stage] = {{"ms", number(timing.ms)}, {"tflops", number(timing.tflops)}};
      Timing together = measured.Together(stages);
      json["together"] = {{"ms", number(together.ms)}, {"tflops", number(together.tflops)}};
      return json;
    };
    for (const Point& point : points_) {
      Json json = {{"case", point.cell.case_name},       {"world_size", point.cell.world_size},
                   {"params", point.cell.params},        {"warmup", arguments_.warmup},
                   {"repeat", arguments_.repeat},        {"measured", describe(point.measured)},
                   {"one_gpu", describe(point.one_gpu)}, {"command", Repeat(point.cell)}};
      for (const std::string& stage : stages)
        json["efficiency"][stage] =
            number(Efficiency(point.measured.Together({stage}), point.one_gpu.Together({stage})));
      json["efficiency"]["together"] =
          number(Efficiency(point.measured.Together(stages), point.one_gpu.Together(stages)));
      streams_.out << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
    }
    Json worlds = Json::array();
    for (const auto& [size, hello] : worlds_) worlds.push_back(hello);
    streams_.out << Json({{"summary", {{"points", points_.size()}, {"worlds", worlds}}}}).dump() << "\n"
                 << std::flush;
  }

  void PrintTable() {
    const std::vector<std::string> stages = Stages();
    std::vector<std::string> header;
    for (const Axis& axis : axes_)
      if (axis.values.size() > 1) header.push_back(axis.key);
    header.push_back("W");
    for (const std::string& stage : stages) header.insert(header.end(), {stage + " ms", stage + " TFLOP/s"});
    if (stages.size() > 1) header.push_back("both TFLOP/s");
    for (const std::string& stage : stages) header.push_back(stage + " efficiency");
    if (stages.size() > 1) header.push_back("both efficiency");

    std::vector<std::vector<std::string>> rows;
    std::vector<std::string> notes;
    for (const Point& point : points_) {
      std::vector<std::string> row;
      for (const Json& value : point.swept) row.push_back(TextFromValue(value));
      row.push_back(std::to_string(point.cell.world_size));
      for (const std::string& stage : stages) {
        Timing timing = point.measured.Together({stage});
        row.insert(row.end(), {Fixed(timing.ms, 3), Fixed(timing.tflops, timing.tflops < 10 ? 4 : 1)});
      }
      Timing both = point.measured.Together(stages);
      if (stages.size() > 1) row.push_back(Fixed(both.tflops, both.tflops < 10 ? 4 : 1));
      auto percent = [](double value) {
        return std::isfinite(value) ? Fixed(100 * value, 1) + " %" : std::string("-");
      };
      for (const std::string& stage : stages)
        row.push_back(percent(Efficiency(point.measured.Together({stage}), point.one_gpu.Together({stage}))));
      if (stages.size() > 1) row.push_back(percent(Efficiency(both, point.one_gpu.Together(stages))));
      rows.push_back(row);
      if (!point.measured.error.empty())
        notes.push_back("not measured: " + point.measured.error + "\n  repeat: " + Repeat(point.cell));
      else if (!point.one_gpu.error.empty())
        notes.push_back("no efficiency, because one GPU alone: " + point.one_gpu.error);
    }

    PrintRow(header);
    PrintRow(std::vector<std::string>(header.size(), "---"));
    for (const auto& row : rows) PrintRow(row);
    streams_.out << "\n";
    std::string fixed;
    for (const Axis& axis : axes_)
      if (axis.values.size() == 1) fixed += " " + axis.key + "=" + TextFromValue(axis.values[0]);
    const bool any = std::any_of(points_.begin(), points_.end(),
                                 [](const Point& point) { return point.measured.error.empty(); });
    if (any)
      streams_.out << "Verified, then the median of " << arguments_.repeat << " after " << arguments_.warmup
                   << " to warm up, on the slowest rank; rates are per GPU; efficiency is the rate against "
                      "that of the same problem on one GPU."
                   << (fixed.empty() ? "" : " With" + fixed + ".") << "\n";
    for (const auto& [size, hello] : worlds_)
      streams_.out << "world size " << size << ": " << DescribeWorld(hello) << "\n";
    std::sort(notes.begin(), notes.end());
    notes.erase(std::unique(notes.begin(), notes.end()), notes.end());
    for (const std::string& note : notes) streams_.out << note << "\n";
    streams_.out << std::flush;
  }

  void PrintRow(const std::vector<std::string>& cells) {
    for (const std::string& cell : cells) streams_.out << "| " << cell << " ";
    streams_.out << "|\n";
  }

  const Arguments& arguments_;
  Streams streams_;
  std::vector<Axis> axes_;
  std::vector<Point> points_;
  Pools pools_;
  std::map<std::string, Measurement> one_gpu_;  // by parameters
  std::map<int, Json> worlds_;
  std::map<int, std::string> dead_;  // world sizes whose daemon did not start, and why
};

}  // namespace

void AddBench(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* bench = app.add_subcommand("bench", "Times a case over a sweep of its parameters");
  AddRepeatable(*bench, "--param", &arguments->params,
                "A parameter and its values, key=A,B,...; the product of all is timed. max_seqlen_kv follows "
                "max_seqlen_q if not given")
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
