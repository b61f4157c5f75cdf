// Tests a pool for wrong answers and leaks over a long time: runs thousands of mixed cases, a share of them
// with faults, checks every answer, and reads memory, threads and descriptors of daemons and client at
// intervals.
//
//     soak --backend host --cases 20000       # or --minutes 10; --fault-share 0.05 --seed 7 --max-seqlen 32
//     soak --backend cuda --in-order --max-seqlen 0      # the matrix once; memory after 10 and all cells
//
// Each world size has two pools. `steady` runs healthy cases and invalid requests in one daemon process,
// whose memory, threads and descriptors must not grow. `tried` runs the faults, of every kind and on every
// schedule, each followed by healthy cases. The exit code is 0 when every answer was right and nothing grew.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <cppool/pool.h>

#include "client/suite/cell.h"
#include "client/suite/repeat.h"
#include "client/suite/suite.h"
#include "daemon/process.h"
#include "tests/end_to_end/fault_grid.h"
#include "tests/measure/samples.h"

namespace {

using cppool::Json;
using cppool::Pool;
using cppool::Result;
using cppool::daemon::Usage;
using cppool::measure::Median;
using cppool::suite::Cell;
using Clock = std::chrono::steady_clock;

struct Options {
  cppool::PoolOptions pool;
  std::vector<int> world_sizes = {2, 4};
  std::int64_t cases = 0;
  double minutes = 0;
  double fault_share = 0.05;
  std::uint64_t seed = 1;
  std::int64_t max_seqlen = 32;  // 0: the lengths of the suite
  std::size_t cells = 0;         // 0: all
  std::vector<std::string> filters;
  std::string readings;  // file; empty: none
  bool in_order = false;
};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// ---- memory, threads and descriptors

// The resources of one process at one time: of the client, or of a daemon from `stats`, after it has freed
// the memory of the previous case.
struct Reading {
  Usage usage;
  double device_bytes = 0;       // held by the daemon's ranks
  double device_free_bytes = 0;  // on the device with the least; other processes may use the device too
};

Reading Read(Pool& pool) {
  const Json stats = pool.Stats();
  Reading reading;
  reading.usage = {stats.at("resident_bytes"), stats.at("threads"), stats.at("fds")};
  for (const Json& rank : stats.at("memory")) {
    const double free_bytes = rank.at("free_bytes");
    reading.device_bytes += rank.at("held_bytes").get<double>();
    reading.device_free_bytes =
        reading.device_free_bytes == 0 ? free_bytes : std::min(free_bytes, reading.device_free_bytes);
  }
  return reading;
}

// Allowed growth between two readings: 1 % plus a constant. In a long run a leak of one page per hundred
// cases exceeds it.
constexpr double kShare = 0.01, kSlackBytes = 2 << 20;

bool Grew(double before, double after, double slack) { return after > before * (1 + kShare) + slack; }

struct Quantity {
  const char* name;
  double (*of)(const Reading&);
  double unit;   // divisor for printing
  double slack;  // allowed growth besides 1 %
};
const std::vector<Quantity> kQuantities = {
    {"resident MiB", [](const Reading& r) { return static_cast<double>(r.usage.resident_bytes); }, 1 << 20,
     kSlackBytes},
    {"device MiB", [](const Reading& r) { return r.device_bytes; }, 1 << 20, 0},
    {"threads", [](const Reading& r) { return static_cast<double>(r.usage.threads); }, 1, 0},
    {"fds", [](const Reading& r) { return static_cast<double>(r.usage.fds); }, 1, 0},
};

// Prints one row per quantity: median of the second quarter of the readings and of the last. The first one
// warms up: a thread keeps what the largest of its first cases took. True: `judged`, and a quantity grew.
bool PrintGrowth(const std::string& who, const std::vector<Reading>& readings, bool judged = true) {
  if (readings.empty()) return false;
  const std::size_t quarter = std::max<std::size_t>(1, readings.size() / 4);
  bool any = false;
  for (const Quantity& quantity : kQuantities) {
    std::vector<double> values;
    for (const Reading& reading : readings) values.push_back(quantity.of(reading));
    const auto count = static_cast<std::ptrdiff_t>(quarter);
    const auto warm = values.begin() + std::min(count, std::ssize(values) - count);
    const double first = Median({warm, warm + count});
    const double last = Median({values.end() - count, values.end()});
    const bool grew = judged && Grew(first, last, quantity.slack);
    any = any || grew;
    std::printf("| %-22s | %-12s | %10.2f | %10.2f | %+9.2f %% | %10.2f | %s |\n", who.c_str(), quantity.name,
                first / quantity.unit, last / quantity.unit, first == 0 ? 0 : (last / first - 1) * 100,
                *std::max_element(values.begin(), values.end()) / quantity.unit,
                judged ? grew ? "GREW" : "flat" : "");
  }
  return any;
}

// ---- the cases

std::vector<Cell> CellsFor(const Options& options) {
  std::vector<cppool::suite::Filter> filters;
  for (const std::string& text : options.filters) filters.push_back(cppool::suite::FilterFromText(text));
  std::vector<Cell> cells;
  for (Cell& cell : cppool::suite::Select(cppool::suite::LoadSuite("matrix"), filters)) {
    const auto& sizes = options.world_sizes;
    if (std::find(sizes.begin(), sizes.end(), cell.world_size) == sizes.end()) continue;
    if (options.max_seqlen > 0) cppool::suite::Shrink(&cell.params, options.max_seqlen, cell.world_size);
    cells.push_back(std::move(cell));
  }
  if (cells.empty()) throw std::runtime_error("the suite has no such cell for these world sizes");
  return cells;
}

// Draws the cells in random order, each once before any is repeated.
class Deck {
 public:
  Deck(std::vector<Cell> cells, std::uint64_t seed, std::size_t keep)
      : cells_(std::move(cells)), random_(seed) {
    std::shuffle(cells_.begin(), cells_.end(), random_);
    if (keep > 0 && keep < cells_.size()) cells_.resize(keep);
  }
  const Cell& Draw() {
    if (next_ == cells_.size()) {
      std::shuffle(cells_.begin(), cells_.end(), random_);
      next_ = 0;
    }
    return cells_[next_++];
  }
  std::mt19937_64& random() { return random_; }

 private:
  std::vector<Cell> cells_;
  std::mt19937_64 random_;
  std::size_t next_ = 0;
};

// The outcome of a request: the answer, or the error when there is no answer.
struct Outcome {
  std::optional<Result> result;
  std::optional<cppool::PoolError> error;

  std::string Text() const {
    if (error) return "no answer (" + std::string(ToString(error->kind())) + "): " + error->what();
    return std::string(ToString(result->status)) + " " + result->json.dump();
  }
  // For the table: "passed", "error timeout, fatal", "no answer: died".
  std::string Kind() const {
    if (error) return "no answer: " + std::string(ToString(error->kind()));
    std::string kind(ToString(result->status));
    if (result->failure) kind += " " + result->failure->kind;
    return kind + (result->fatal ? ", fatal" : "");
  }
};

Outcome Ask(Pool& pool, const Json& params, const cppool::RunOptions& run) {
  try {
    return {pool.Run(params, run), std::nullopt};
  } catch (const cppool::PoolError& error) {
    return {std::nullopt, error};
  }
}

// Whether the case passed at the first attempt, and the answer belongs to this request and has checks of
// every rank.
bool IsRightFor(const Cell& cell, std::uint64_t seed, const Outcome& outcome) {
  if (!outcome.result) return false;
  const Result& result = *outcome.result;
  return result.ok() && result.attempts == 1 && result.seed == seed && !result.checks.empty() &&
         result.ranks.size() == static_cast<std::size_t>(cell.world_size) &&
         std::all_of(result.checks.begin(), result.checks.end(), [](const auto& check) { return check.ok; });
}

class Soak {
 public:
  explicit Soak(const Options& options)
      : options_(options),
        deck_(CellsFor(options), options.seed, options.cells),
        end_(Clock::now() + Limit(options)) {
    cppool::PoolOptions pool = options.pool;
    pool.retries = 0;  // the first answer is checked
    cppool::PoolOptions tried = pool;
    tried.arguments = {"--allow-faults"};
    tried.log_level = "error";
    for (const int size : options.world_sizes) {
      pool.world_size = tried.world_size = size;
      worlds_[size].steady = std::make_unique<Pool>(pool);
      worlds_[size].tried = std::make_unique<Pool>(tried);
      faults_[size] = cppool::test::FaultGrid(cppool::test::FaultKinds(), {size});
    }
    if (options.readings.empty()) return;
    readings_file_.open(options.readings);
    readings_file_ << "seconds,cases,process,resident_bytes,device_bytes,threads,fds\n";
    if (!readings_file_) throw std::runtime_error("cannot write " + options.readings);
  }

  bool Run() {
    std::int64_t until_reading = kCasesPerReading;
    while (!Over()) {
      const Cell& cell = deck_.Draw();
      World& world = worlds_.at(cell.world_size);
      if (std::uniform_real_distribution<>()(deck_.random()) >= options_.fault_share) {
        Healthy(*world.steady, cell, "healthy");
      } else if (deck_.random()() % 4 == 0) {
        Refused(world, cell);
      } else {
        Fault(world, cell);
      }
      if (--until_reading == 0) {
        until_reading = kCasesPerReading;
        TakeReadings();
      }
      Progress();
    }
    TakeReadings();
    return Report();
  }

 private:
  static constexpr std::int64_t kCasesPerReading = 20;

  struct World {
    std::unique_ptr<Pool> steady, tried;
    std::optional<int> steady_pid;  // `steady` has one daemon
    std::vector<Reading> steady_readings, tried_readings;
  };

  static Clock::duration Limit(const Options& options) {
    if (options.minutes == 0) return std::chrono::hours(24 * 365);
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double, std::ratio<60>>(options.minutes));
  }
  bool Over() const { return (options_.cases > 0 && asked_ >= options_.cases) || Clock::now() >= end_; }

  void Count(const std::string& what, const std::string& ended, bool right, const std::string& request,
             const std::string& text) {
    ++asked_;
    ++outcomes_[{what, ended}];
    if (right) return;
    ++wrong_;
    std::printf("WRONG %s: %s\n  %s\n", what.c_str(), request.c_str(), text.c_str());
    std::fflush(stdout);
  }

  void Healthy(Pool& pool, const Cell& cell, const char* what) {
    Json params = cell.params;
    const std::uint64_t seed = deck_.random()() >> 1;  // new inputs and lengths each time
    params["seed"] = seed;
    const Outcome outcome = Ask(pool, params, {});
    Count(what, outcome.Kind(), IsRightFor(cell, seed, outcome), Describe(cell, params), outcome.Text());
  }

  void Refused(World& world, const Cell& cell) {
    Json params = cell.params;
    params["max_seqlen_q"] = 2 * cell.world_size + 1;
    const Outcome outcome = Ask(*world.steady, params, {});
    const bool right = outcome.result && outcome.result->failure &&
                       outcome.result->failure->kind == "invalid_request" && !outcome.result->fatal;
    Count("refused", outcome.Kind(), right, Describe(cell, params), outcome.Text());
  }

  // Injects a fault into the small case for which the right outcome of every fault is known. Then runs that
  // case without the fault, and a cell of the suite.
  void Fault(World& world, const Cell& cell) {
    const auto& grid = faults_.at(cell.world_size);
    const cppool::test::FaultCell& fault = grid[deck_.random()() % grid.size()];
    const cppool::test::FaultOutcome outcome = cppool::test::Inject(*world.tried, fault);
    const std::string request =
        fault.kind + " on " + fault.schedule + ", world size " + std::to_string(fault.world_size);
    Count("fault " + fault.kind, outcome.ended, outcome.wrong.empty(), request, outcome.wrong);
    Count("after a fault", outcome.next, outcome.next == "passed", request, outcome.next);
    Healthy(*world.tried, cell, "after a fault");
  }

  std::string Describe(const Cell& cell, const Json& params) const {
    Cell asked = cell;
    asked.params = params;
    return cppool::suite::RepeatCommand("cppool", asked, {"--backend", options_.pool.backend});
  }

  void TakeReadings() {
    for (auto& [size, world] : worlds_) {
      const int pid = world.steady->Hello().at("pid");
      if (world.steady_pid && *world.steady_pid != pid) {
        ++wrong_;
        std::printf("WRONG the steady daemon of world size %d was replaced: process %d, then %d\n", size,
                    *world.steady_pid, pid);
      }
      world.steady_pid = pid;
      const std::string name = "W=" + std::to_string(size);
      Keep(name + " steady", Read(*world.steady), &world.steady_readings);
      Keep(name + " tried", Read(*world.tried), &world.tried_readings);
    }
    Keep("client", {cppool::daemon::OwnUsage()}, &client_readings_);
  }

  void Keep(const std::string& process, const Reading& reading, std::vector<Reading>* readings) {
    readings->push_back(reading);
    if (!readings_file_.is_open()) return;
    readings_file_ << SecondsSince(start_) << "," << asked_ << "," << process << ","
                   << reading.usage.resident_bytes << "," << reading.device_bytes << ","
                   << reading.usage.threads << "," << reading.usage.fds << std::endl;
  }

  void Progress() {
    if (SecondsSince(last_progress_) < 10) return;
    last_progress_ = Clock::now();
    std::fprintf(stderr, "%lld cases in %.0f s, %lld wrong\n", static_cast<long long>(asked_),
                 SecondsSince(start_), static_cast<long long>(wrong_));
  }

  bool Report() {
    std::printf("%lld cases in %.1f s, seed %llu\n\n| request | outcome | count |\n| --- | --- | --- |\n",
                static_cast<long long>(asked_), SecondsSince(start_),
                static_cast<unsigned long long>(options_.seed));
    for (const auto& [what, count] : outcomes_)
      std::printf("| %s | %s | %lld |\n", what.first.c_str(), what.second.c_str(),
                  static_cast<long long>(count));
    std::printf(
        "\n| process | what | second quarter | last quarter | growth | largest | |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n");
    bool grew = false;
    for (const auto& [size, world] : worlds_) {
      const std::string name = "W=" + std::to_string(size);
      grew = PrintGrowth(name + " steady daemon", world.steady_readings) || grew;
      // Not judged, because the readings are of several processes of different ages.
      PrintGrowth(name + " tried daemons", world.tried_readings, false);
    }
    grew = PrintGrowth("client", client_readings_) || grew;
    std::printf("\n%lld wrong, %s\n", static_cast<long long>(wrong_), grew ? "grew" : "flat");
    return wrong_ == 0 && !grew;
  }

  const Options& options_;
  Deck deck_;
  std::map<int, World> worlds_;
  std::map<int, std::vector<cppool::test::FaultCell>> faults_;  // by world size
  std::ofstream readings_file_;
  std::map<std::pair<std::string, std::string>, std::int64_t> outcomes_;
  std::vector<Reading> client_readings_;
  std::int64_t asked_ = 0, wrong_ = 0;
  const Clock::time_point start_ = Clock::now();
  const Clock::time_point end_;
  Clock::time_point last_progress_ = start_;
};

// Runs the whole matrix once, one world size after another as `cppool run` does, and compares the resources
// of each daemon after ten cells and after all.
bool RunInOrder(const Options& options) {
  bool right = true;
  std::vector<Cell> cells = CellsFor(options);
  std::printf("| W | cells | what | after 10 cells | after all | |\n| --- | --- | --- | --- | --- | --- |\n");
  for (const int size : options.world_sizes) {
    cppool::PoolOptions pool_options = options.pool;
    pool_options.world_size = size;
    pool_options.retries = 0;
    Pool pool(pool_options);
    std::optional<Reading> early;
    int count = 0;
    for (const Cell& cell : cells) {
      if (cell.world_size != size) continue;
      const Outcome outcome = Ask(pool, cell.params, {});
      if (!outcome.result || !outcome.result->ok()) {
        right = false;
        std::printf("WRONG %s\n  %s\n", cell.name.c_str(), outcome.Text().c_str());
      }
      if (++count == 10) early = Read(pool);
    }
    if (!early) continue;
    const Reading late = Read(pool);
    for (const Quantity& quantity : kQuantities) {
      const double before = quantity.of(*early), after = quantity.of(late);
      const bool grew = Grew(before, after, quantity.slack);
      right = right && !grew;
      std::printf("| %d | %d | %s | %.2f | %.2f | %s |\n", size, count, quantity.name, before / quantity.unit,
                  after / quantity.unit, grew ? "GREW" : "flat");
    }
    std::printf("| %d | %d | device free MiB | %.2f | %.2f | not judged |\n", size, count,
                early->device_free_bytes / (1 << 20), late.device_free_bytes / (1 << 20));
    std::fflush(stdout);
  }
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Runs mixed cases, some with faults, and checks answers, memory, threads and descriptors");
  app.add_option("--cases", options.cases, "Ends after this number of cases")->check(CLI::PositiveNumber);
  app.add_option("--minutes", options.minutes, "Ends after this time")->check(CLI::PositiveNumber);
  app.add_option("--backend", options.pool.backend, "auto, cuda or host")->capture_default_str();
  app.add_option("--transport", options.pool.transport, "auto, nccl or peer")->capture_default_str();
  app.add_option("--daemon", options.pool.daemon, "Path of cppoold");
  app.add_option("--world-sizes", options.world_sizes, "Some of 2, 4, 6 and 8, the world sizes of the suite")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--fault-share", options.fault_share, "Share of the cases that have a fault")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of the order, the inputs and the faults")
      ->capture_default_str();
  app.add_option("--max-seqlen", options.max_seqlen, "Shrinks lengths to at most this; 0: no limit")
      ->capture_default_str();
  app.add_option("--cells", options.cells,
                 "Uses only this number of cells, so that a short run repeats each often");
  app.add_option("--filter", options.filters, "Only cells with key=value, as in `cppool run`");
  app.add_option("--readings", options.readings, "Writes every reading to this file, as CSV");
  app.add_flag("--in-order", options.in_order, "Runs the whole matrix once, without faults");
  CLI11_PARSE(app, argc, argv);
  if (options.cases == 0 && options.minutes == 0) options.cases = 1000;

  try {
    if (options.in_order) return RunInOrder(options) ? 0 : 1;
    return Soak(options).Run() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "soak: %s\n", error.what());
    return 2;
  }
}
