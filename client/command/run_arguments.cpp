#include "client/command/run_arguments.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>

#include "client/command/libraries.h"
#include "client/command/sweep.h"
#include "client/suite/repeat.h"
#include "client/suite/suite.h"
#include "client/suite/value_text.h"
#include "protocol/json_text.h"
#include "protocol/start.h"

namespace cppool::command {
namespace {

// "throw", "stall:1", "flip_bit:1:forward/p2p step 1 of 2: keys and values": a stage may contain colons.
Fault ToFault(const std::string& text) {
  Fault fault;
  const auto first = text.find(':'), second = first == std::string::npos ? first : text.find(':', first + 1);
  fault.kind = text.substr(0, first);
  if (fault.kind.empty())
    throw suite::UsageError("--fault takes KIND[:RANK[:STAGE]]: '" + text + "' has no kind");
  if (second != std::string::npos) fault.stage = text.substr(second + 1);
  if (first == std::string::npos) return fault;
  const std::string rank = text.substr(first + 1, second == std::string::npos ? second : second - first - 1);
  if (rank.empty() || rank.size() > 6 || rank.find_first_not_of("0123456789") != std::string::npos)
    throw suite::UsageError("--fault takes KIND[:RANK[:STAGE]]: '" + rank + "' is not a rank");
  fault.rank = std::stoi(rank);
  return fault;
}

struct Shard {
  std::size_t index = 1, count = 1;  // from 1
};

// Throws UsageError unless it is "i/n" with 1 <= i <= n.
Shard ToShard(const std::string& text) {
  const auto number = [](std::string_view digits) -> std::size_t {
    std::size_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return error == std::errc() && end == digits.data() + digits.size() ? value : 0;
  };
  const std::size_t slash = std::min(text.find('/'), text.size());
  const std::string_view view = text;
  const Shard shard{number(view.substr(0, slash)), number(view.substr(std::min(slash + 1, view.size())))};
  if (shard.index < 1 || shard.index > shard.count)
    throw suite::UsageError("must be I/N, with I from 1 to N, not '" + text + "'");
  return shard;
}

// Every `count`th cell in the order in which they run, so that the shards share the work of each world size.
// The cells keep their order.
std::vector<suite::Cell> CellsOfShard(const std::vector<suite::Cell>& cells, const Shard& shard) {
  std::vector<std::size_t> chosen;
  const std::vector<std::size_t> order = suite::RunOrder(cells);
  for (std::size_t i = shard.index - 1; i < order.size(); i += shard.count) chosen.push_back(order[i]);
  std::ranges::sort(chosen);
  std::vector<suite::Cell> result;
  for (const std::size_t index : chosen) result.push_back(cells[index]);
  return result;
}

// " dtype=bf16 num_heads=8": the values that tell the cells of a product apart.
std::string SweptText(const std::vector<SweepAxis>& axes, const SweepPoint& point) {
  std::string text;
  auto value = point.swept.begin();
  for (const SweepAxis& axis : axes)
    if (axis.values.size() > 1) text += " " + axis.key + "=" + suite::TextFromValue(*value++);
  return text;
}

}  // namespace

void AddRunOptions(CLI::App& run, RunArguments* arguments) {
  CLI::Option* suite = run.add_option("--suite", arguments->suite,
                                      "smoke, essential, matrix, or a file; without it one case is run")
                           ->check(IsPath);
  AddCase(run, &arguments->case_name, "The case to run")->excludes(suite);
  run.add_option(
         "--world-size", arguments->world_sizes,
         "Numbers of ranks, N,M,... (default: that of each cell; 2 for a single case). Cells of a suite that "
         "are impossible with one are skipped")
      ->delimiter(',')
      ->check(CLI::Range(1, protocol::kMaxWorldSize));
  AddRepeatable(
      run, "--param", &arguments->params,
      "A parameter, key=value; the value as JSON, as text, or as digits and k (8k is 8192). Overrides a "
      "suite's. With key=A,B each value makes a case of its own; a list as a value goes in brackets")
      ->check(IsUtf8);
  AddRepeatable(
      run, "--filter", &arguments->filters,
      "Selects cells of the suite: key=value those with the value, key!=value those without it; * and ? in a "
      "value stand for any text and any character. Keys: a parameter, world_size, suite (matrix, fp8, own), "
      "row, model, kernel_backend, essential, name, or an axis of the closing table (schedule, mask, ...). "
      "Values of one key are alternatives; different keys must all match")
      ->needs(suite);
  run.add_option(
         "--max-seqlen", arguments->max_seqlen,
         "Shrinks a suite's lengths to at most this, in multiples of 2 x ranks, and windows with them")
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
      ->needs(suite);
  AddDeadline(run, &arguments->deadline, "Seconds for each case");
  run.add_option("--perturb", arguments->options.perturb, "A seed of random delays at every mark")
      ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()));
  run.add_option("--dump", arguments->options.dump,
                 "Writes the tensors to this folder, as .npy; of several cells, each to a folder in it")
      ->check(IsPath)
      ->check(IsUtf8);
  run.add_option("--inputs", arguments->options.inputs,
                 "Reads q, k, v, dout, bias and softmax_offset from this folder, as .npy")
      ->check(IsPath)
      ->check(IsUtf8)
      ->excludes(suite);
  run.add_option(
         "--trace", arguments->options.trace,
         "Writes a timeline to this file, as Chrome's JSON: open it in ui.perfetto.dev; of several cells, "
         "each to a file in this folder")
      ->check(IsPath)
      ->check(IsUtf8);
  run.add_option_function<std::string>(
         "--kernels", [arguments](const std::string& words) { arguments->kernels = ToKernels(words); },
         "Whose attention kernels: cppool (default), cudnn, a library or source with kernels of "
         "cppool/attention.h, or FILE.so,NAME for one of several")
      ->check(IsUtf8);
  run.add_option_function<std::string>(
         "--fault", [arguments](const std::string& text) { arguments->options.fault = ToFault(text); },
         "KIND[:RANK[:STAGE]]: injects a fault into a rank at a mark, to test how failures are handled")
      ->check(IsUtf8)
      ->excludes(suite);
  AddDaemonOptions(run, &arguments->daemon);
  CLI::Option* junit =
      run.add_option("--junit", arguments->junit, "Writes the outcomes to this file as JUnit XML")
          ->check(IsPath);
  CLI::Option* html = AddHtml(run, &arguments->html);
  run.add_flag("--json", arguments->json, "One JSON object per case, then a summary object");
  CLI::Option* verbose = run.add_flag(
      "--verbose", arguments->verbose,
      "Also prints each case that passes, what it wrote to stdout and stderr, and compilers' commands");
  run.add_flag("--quiet", arguments->quiet, "Prints failures and the counts only")->excludes(verbose);
  CLI::Option* log =
      run.add_option(
             "--log", arguments->log,
             "Writes what the daemons write on stderr, cases' output among it, to this file as it comes")
          ->check(IsPath);
  AddLeaks(run, &arguments->leaks_are_errors);
  CLI::Option* fail_fast = run.add_flag("--fail-fast", arguments->fail_fast, "Stops after the first failure");
  CLI::Option* retries =
      run.add_option(
             "--retries", arguments->retries,
             "Asks again, up to so often, when the daemon of a case died; one that then passes is flaky and "
             "does not fail the run. Without it a case is asked once more, and flaky ones fail the run")
          ->check(CLI::Range(0, 1000));
  CLI::Option* times =
      run.add_option("--times", arguments->times,
                     "Runs each case so often; with --until-fail all of them, at most so often")
          ->check(CLI::Range(1, 1'000'000));
  CLI::Option* until_fail =
      run.add_flag("--until-fail", arguments->until_fail,
                   "Runs all again and again until one fails, or until --times or --limit");
  CLI::Option* limit = AddSeconds(
      run, "--limit", &arguments->limit,
      "Seconds for the whole run: no case begins after them, and one that runs then ends with an error");
  run.add_option("--shard", arguments->shard, "I/N: runs the Ith of N parts of the cells, I from 1 to N")
      ->check([](const std::string& text) {
        try {
          ToShard(text);
          return std::string();
        } catch (const suite::UsageError& error) {
          return std::string(error.what());
        }
      });
  CLI::Option* list =
      run.add_flag("--list", arguments->list,
                   "Prints the cells, the command for each, and which would be skipped and why; runs nothing")
          ->excludes(junit)
          ->excludes(html);
  CLI::Option* failures =
      run.add_option("--failures", arguments->failures,
                     "Runs each failed cell once more in the same pool and writes its tensors, timeline and "
                     "log to a folder in this one: at most 20 cells and 2 GiB")
          ->check(IsPath)
          ->check(IsUtf8)
          ->excludes(list);
  run.add_flag(
         "--diagnose", arguments->diagnose,
         "Runs a failed case again in fresh pools, alone and after the cases before it, to tell a bug from a "
         "polluted pool and a flaky case")
      ->excludes(list)
      ->excludes(retries)
      ->excludes(failures);
  run.add_flag(
         "--watch", arguments->watch,
         "Runs the same again each time that a file of --load or --kernels is saved, until it is interrupted")
      ->excludes(list)
      ->excludes(until_fail);
  for (CLI::Option* option : {times, until_fail, limit, fail_fast, log}) option->excludes(list);
}

std::vector<suite::Cell> CellsOf(const RunArguments& arguments, const Streams& streams) {
  std::vector<suite::Cell> cells;
  if (arguments.suite.empty()) {
    suite::Cell cell;
    if (!arguments.case_name.empty()) cell.case_name = arguments.case_name;
    cells.push_back(cell);
  } else {
    std::vector<suite::Filter> filters;
    for (const std::string& text : arguments.filters) filters.push_back(suite::FilterFromText(text));
    const std::vector<suite::Cell> suite = suite::LoadSuite(arguments.suite);
    cells = suite::Select(suite, filters);
    if (cells.empty()) {
      streams.err << "cppool: no cell of the suite matches the filters: "
                  << suite::DescribeNoMatch(suite, filters) << "\n";
    }
  }
  const std::vector<SweepAxis> axes = SweepAxesOf(arguments.params);
  std::vector<suite::Cell> product;
  for (const suite::Cell& cell : cells)
    for (const int world_size :
         arguments.world_sizes.empty() ? std::vector<int>{cell.world_size} : arguments.world_sizes) {
      suite::Cell sized = cell;
      sized.world_size = world_size;
      if (!arguments.world_sizes.empty() || cell.name.empty()) sized.name = suite::NameOf(sized);
      if (arguments.max_seqlen > 0) suite::Shrink(&sized.params, arguments.max_seqlen, world_size);
      for (SweepPoint& point : Over(sized, axes)) {
        point.cell.name += SweptText(axes, point);
        product.push_back(std::move(point.cell));
      }
      if (product.size() > suite::kMaxCells)
        throw suite::UsageError("more than " + std::to_string(suite::kMaxCells) +
                                " cells: give --param fewer values");
    }
  suite::MakeNamesUnique(&product);
  if (arguments.shard.empty() || product.empty()) return product;
  const std::size_t all = product.size();
  product = CellsOfShard(product, ToShard(arguments.shard));
  if (product.empty())
    streams.err << "cppool: shard " << arguments.shard << " has none of the " << all << " cells\n";
  return product;
}

PoolOptions ToPoolOptions(const RunArguments& arguments) {
  PoolOptions options = arguments.daemon.pool;
  // A retry in a fresh daemon would hide from a diagnosis what earlier cells have polluted.
  options.retries = arguments.diagnose ? 0 : arguments.retries.value_or(1);
  if (arguments.options.fault) options.arguments.emplace_back("--allow-faults");
  return options;
}

RunOptions ToRunOptions(const RunArguments& arguments) {
  RunOptions options = arguments.options;
  options.deadline = ToMilliseconds(arguments.deadline);
  options.kernels = arguments.kernels.Words();
  return options;
}

}  // namespace cppool::command
