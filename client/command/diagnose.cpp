#include "client/command/diagnose.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "client/command/command.h"
#include "client/src/daemon.h"
#include "client/src/describe.h"
#include "client/src/request.h"
#include "client/suite/repeat.h"

namespace cppool::command {
namespace {

constexpr int kTimes = 3;  // trials of the cell alone, after all earlier cells, and after the culprits
// Trials without the failure before a set counts as harmless, for a failure that does not occur every time.
// One that occurs every third time is then missed in 4 of 100 sets.
constexpr int kTimesUnsteady = 8;
constexpr std::size_t kNamed = 5;  // culprits in a text

struct Count {
  int failed = 0, ran = 0;
};

PoolOptions WithoutRetries(PoolOptions options) {
  options.retries = 0;  // a retry would pass in a fresh daemon and hide that the first one died
  return options;
}

// A trial must not replace the files of the failure.
RunOptions WithoutFiles(RunOptions options) {
  options.dump.clear();
  options.trace.clear();
  return options;
}

std::vector<suite::Cell> Pick(const std::vector<suite::Cell>& cells,
                              const std::vector<std::size_t>& indices) {
  std::vector<suite::Cell> picked;
  for (std::size_t index : indices) picked.push_back(cells[index]);
  return picked;
}

RunOptions OptionsOf(const suite::Cell& cell, RunOptions options) {
  options.case_name = cell.case_name;
  return options;
}

}  // namespace

// Makes the trials for one failure.
class Diagnoser::Trials {
 public:
  struct Exhausted {
    std::string reason;
  };

  Trials(Pool& pool, const Diagnoser& diagnoser, const suite::Cell& cell)
      : pool_(pool), diagnoser_(diagnoser), cell_(cell) {}

  // Returns whether the cell fails in a fresh pool that has run the cells of `before`. Throws Exhausted.
  bool Fails(const std::vector<suite::Cell>& before) {
    const Limits& limits = diagnoser_.limits_;
    if (pools_ >= limits.pools)
      throw Exhausted{std::to_string(limits.pools) + " fresh pools did not settle it"};
    if (diagnoser_.spent_ + spent() >= limits.time)
      throw Exhausted{"the " + std::to_string(limits.time.count()) + " s for diagnoses are used up"};
    ++pools_;
    diagnoser_.progress_("fresh pool " + std::to_string(pools_) + ", after " + std::to_string(before.size()) +
                         (before.size() == 1 ? " cell" : " cells"));
    pool_.Stop();
    for (const suite::Cell& cell : before) Ask(cell);  // if one ends the daemon, the pool starts another
    const std::optional<Result> result = Ask(cell_);
    return !result || result->status == Status::kFailed || result->status == Status::kError;
  }

  Count Repeat(int times, const std::vector<suite::Cell>& before) {
    Count count;
    for (; count.ran < times; ++count.ran) count.failed += Fails(before);
    return count;
  }

  int pools() const { return pools_; }
  std::chrono::steady_clock::duration spent() const { return std::chrono::steady_clock::now() - start_; }

 private:
  // Returns nothing where there was no answer.
  std::optional<Result> Ask(const suite::Cell& cell) {
    try {
      return pool_.Run(cell.params, OptionsOf(cell, diagnoser_.run_options_));
    } catch (const PoolError& error) {
      if (error.kind() == PoolError::Kind::kStart)
        throw Exhausted{"no fresh pool could be started: " + FirstLine(error.what())};
      return std::nullopt;
    }
  }

  Pool& pool_;
  const Diagnoser& diagnoser_;
  const suite::Cell& cell_;
  int pools_ = 0;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

Diagnoser::Diagnoser(PoolOptions pool_options, RunOptions run_options, Limits limits,
                     std::function<void(const std::string&)> progress)
    : pools_(WithoutRetries(std::move(pool_options))),
      run_options_(WithoutFiles(std::move(run_options))),
      limits_(limits),
      progress_(std::move(progress)) {}

Verdict Diagnoser::Diagnose(const suite::Cell& cell, const std::vector<suite::Cell>& before,
                            std::map<std::string, std::string> digests) {
  run_options_.digests = std::move(digests);
  Pool& pool = pools_.At(cell.world_size);
  Trials trials(pool, *this, cell);
  Verdict verdict;
  Count alone, after;
  auto add = [](Count* sum, Count more) {
    sum->failed += more.failed;
    sum->ran += more.ran;
    return more;
  };
  auto flaky = [&] {
    verdict.kind = Verdict::Kind::kFlaky;
    verdict.failed = 1 + alone.failed + after.failed;
    verdict.ran = 1 + alone.ran + after.ran;
    verdict.culprits.clear();
  };
  auto polluted = [&](std::vector<suite::Cell> culprits, Count count) {
    verdict.kind = Verdict::Kind::kPolluted;
    verdict.culprits = std::move(culprits);
    verdict.failed = count.failed;
    verdict.ran = count.ran;
  };
  try {
    add(&alone, trials.Repeat(kTimes, {}));
    if (alone.failed == alone.ran) {
      verdict.kind = Verdict::Kind::kBug;
      verdict.failed = verdict.ran = 1 + alone.ran;
    } else if (alone.failed > 0 || before.empty() || add(&after, trials.Repeat(kTimes, before)).failed == 0) {
      flaky();
    } else {
      polluted(before, after);
      verdict.minimal = before.size() == 1;
      const bool steady = after.failed == after.ran;
      const int times = steady ? 1 : kTimesUnsteady;
      if (!steady) add(&alone, trials.Repeat(kTimesUnsteady, {}));
      if (alone.failed == 0 && before.size() > 1) {
        std::optional<Trials::Exhausted> exhausted;
        const Minimised smallest =
            Minimise(before.size(), [&](const std::vector<std::size_t>& set) -> std::optional<bool> {
              const std::vector<suite::Cell> some = Pick(before, set);
              try {
                for (int i = 0; i < times; ++i)
                  if (trials.Fails(some)) return true;
                return false;
              } catch (Trials::Exhausted& limit) {
                exhausted = std::move(limit);
                return std::nullopt;
              }
            });
        polluted(Pick(before, smallest.set), {1, 1});
        verdict.minimal = smallest.minimal;
        if (exhausted) throw *exhausted;
        // The trials may have misled by chance: compare the culprits with the cell alone once more.
        const Count again = trials.Repeat(times == 1 ? kTimes : times, verdict.culprits);
        add(&after, again);
        add(&alone, trials.Repeat(kTimes, {}));
        polluted(std::move(verdict.culprits), again);
      }
      if (alone.failed > 0 || verdict.failed == 0) flaky();
    }
  } catch (const Trials::Exhausted& limit) {
    if (verdict.kind != Verdict::Kind::kPolluted) verdict.reason = limit.reason;
  }
  verdict.pools = trials.pools();
  pool.Stop();
  spent_ += trials.spent();
  return verdict;
}

std::string_view ToString(Verdict::Kind kind) {
  static constexpr auto kWords = std::to_array<std::string_view>({"bug", "polluted", "flaky", "undecided"});
  static_assert(kWords.size() == static_cast<std::size_t>(Verdict::Kind::kUndecided) + 1);
  return kWords.at(static_cast<std::size_t>(kind));
}

std::string Describe(const Verdict& verdict) {
  std::string text(ToString(verdict.kind));
  if (verdict.kind == Verdict::Kind::kBug) return text;
  if (verdict.kind == Verdict::Kind::kFlaky) return client::FlakyOf(verdict.failed, verdict.ran);
  if (verdict.kind == Verdict::Kind::kUndecided) return text + ": " + verdict.reason;
  for (std::size_t i = 0; i < std::min(kNamed, verdict.culprits.size()); ++i)
    text += (i == 0 ? " by \"" : ", \"") + verdict.culprits[i].name + "\"";
  if (verdict.culprits.size() > kNamed)
    text += " and " + std::to_string(verdict.culprits.size() - kNamed) + " more";
  return text + (verdict.minimal ? "" : " or some of them");
}

Minimised Minimise(std::size_t count,
                   const std::function<std::optional<bool>(const std::vector<std::size_t>&)>& causes) {
  using Set = std::vector<std::size_t>;
  Minimised result;
  Set& set = result.set;
  set.resize(count);
  std::iota(set.begin(), set.end(), std::size_t{0});
  std::set<Set> harmless;
  // Continues with the smaller set if it causes the failure.
  auto take = [&](Set smaller) {
    if (harmless.count(smaller) != 0) return false;
    const std::optional<bool> answer = causes(smaller);
    if (!answer) {
      result.minimal = false;
      return false;
    }
    if (*answer) {
      set = std::move(smaller);
    } else {
      harmless.insert(std::move(smaller));
    }
    return *answer;
  };
  for (std::size_t parts = 2; set.size() > 1 && result.minimal;) {
    const std::size_t size = set.size();
    auto bound = [&](std::size_t part) { return static_cast<std::ptrdiff_t>(part * size / parts); };
    std::size_t next = 0;  // the number of parts to go on with; 0: no smaller set causes the failure
    for (std::size_t part = 0; part < parts && next == 0 && result.minimal; ++part)
      if (take(Set(set.begin() + bound(part), set.begin() + bound(part + 1)))) next = 2;
    // With two parts the complements have been tried as parts.
    for (std::size_t part = 0; parts > 2 && part < parts && next == 0 && result.minimal; ++part) {
      Set rest(set.begin(), set.begin() + bound(part));
      rest.insert(rest.end(), set.begin() + bound(part + 1), set.end());
      if (take(std::move(rest))) next = parts - 1;
    }
    if (next == 0 && parts == size) break;
    parts = next != 0 ? next : std::min(2 * parts, size);
  }
  return result;
}

std::string SequenceCommand(const std::vector<suite::Cell>& cells, const PoolOptions& pool_options,
                            const RunOptions& run_options) {
  std::vector<protocol::Request> requests;
  for (const suite::Cell& cell : cells)
    requests.push_back({cell.name, client::ToRequest(cell.params, OptionsOf(cell, run_options))});
  PoolOptions options = pool_options;
  options.world_size = cells.front().world_size;
  return suite::PipeCommand(std::move(options), requests);
}

}  // namespace cppool::command
