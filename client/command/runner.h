// Runs cells, each in the pool of its world size. A daemon that could not start is not started again. The
// next pool starts while the last one works on its last cells, and the last one ends while the next one
// works.
#pragma once

#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <cppool/pool.h>

#include "client/command/case_output.h"
#include "client/command/diagnose.h"
#include "client/command/libraries.h"
#include "client/suite/cell.h"

namespace cppool::command {

// What came of a failed cell that --failures ran once more.
struct Again {
  std::string folder;            // with its dump, trace.json and log.txt; empty: it was not run
  Status kind = Status::kError;  // how it ended
  std::string error;             // as Outcome has it
  std::string note;              // what is missing and why; empty: nothing
};

// Holds an answer, or why there is none.
struct Outcome {
  using Kind = Status;
  Kind kind = Kind::kError;
  std::optional<Result> result;
  std::string error;  // one line or more; empty when passed
  // After an answered failure. Without an answer, `error` ends with it.
  std::string stderr_tail;
  std::optional<Crash> crash;     // where the daemon was when the case ended it, if it could say
  std::vector<LostAttempt> lost;  // how the daemons before it ended, in order
  // The lines that its daemon wrote on stderr meanwhile: after a failure or a flaky run, and with
  // `all_output` always.
  std::vector<std::string> output;
  double seconds = 0;
  double daemon_seconds = 0;  // between requests and their answers alone
  bool asked = true;          // false: there was no daemon
  bool timed_out = false;     // its deadline passed
  int attempts = 1;  // daemons that were sent it; in each run all but the last died or broke the protocol
  int failures = 0;  // how many of these attempts failed
  // "flaky (passed at attempt 2)", "flaky (timeout at attempt 2)", "flaky (failed 1 of 4)"; empty: it ended
  // in the same way each time.
  std::string flaky;
  std::optional<Verdict> verdict;  // present after a diagnosis
  std::optional<Again> again;      // of the first failure, with --failures

  bool failed() const { return kind == Kind::kFailed || kind == Kind::kError; }
  bool refused() const {  // the request is wrong
    return result && result->failure && result->failure->kind == "invalid_request";
  }
  // Returns whether it makes a run fail: `flaky_passes` allows a flaky one of which every run passed in the
  // end.
  bool Fails(bool flaky_passes) const {
    return failed() || (!flaky.empty() && !(flaky_passes && kind == Kind::kPassed));
  }
  // Adds a further run of the same cell. It keeps the first run that failed, else the first that was flaky,
  // else the last.
  void Add(Outcome next);
};

std::string Summary(Status kind, const std::string& error);  // "failed: out of rank 0 ..."

class CellRunner {
 public:
  struct Rules {
    bool skip_large_worlds =
        false;                 // a cell with more ranks than the machine can run is skipped; else an error
    bool keep_worlds = false;  // daemons of several world sizes are up at a time; else one
    bool all_output = false;   // not that of failures alone
    bool leaks_are_errors = false;  // a case that passed and left something behind has failed
  };
  // `output` may be null, else it outlives this.
  CellRunner(PoolOptions pool_options, Rules rules, CaseOutput* output = nullptr)
      : options_(std::move(pool_options)), rules_(rules), output_(output) {}
  ~CellRunner();

  // Names the world sizes of the cells to come, in their order. Without it no pool starts before its first
  // cell.
  void Expect(std::deque<int> world_sizes) { upcoming_ = std::move(world_sizes); }

  // Throws UsageError for options that no request can have, such as too many libraries.
  static void Check(const RunOptions& options);
  // The case's name is the cell's. Another daemon is asked as often as the options of the pools say
  // (retries).
  Outcome Run(const suite::Cell& cell, const RunOptions& options);
  // Returns the answer to `hello` of a daemon of this world size, which is started if there is none. Throws
  // PoolError.
  const Json& Hello(int world_size);
  // Returns the answer to `list` of such a daemon, with the cases of these libraries. Throws PoolError.
  Json List(int world_size, const std::vector<std::string>& load) {
    const Json& hello = Hello(world_size);
    Json answer = PoolOf(world_size).List(load);
    KeepDigests(hello, answer);
    return answer;
  }
  // Outcomes name these sources in place of the libraries that they became.
  void NameSources(const Sources& sources) { sources_.insert(sources.begin(), sources.end()); }
  // Returns the content of the libraries that `options` name: that of the first answer. All further requests
  // are sent with it, so that a library that is built again meanwhile does not change what runs.
  std::map<std::string, std::string> Digests(const RunOptions& options) const;
  // Libraries are read again, and daemons that could not start are started again when they are needed.
  void StartOver() {
    digests_.clear();
    not_started_.clear();
  }

  // Other clients of a server wait until it is called with false; nothing without one.
  void KeepTurn(int world_size, bool keep);

  // kPassed: it would run.
  Outcome Validate(const suite::Cell& cell, const RunOptions& options) {
    return Ask(cell, options, &Pool::Validate);
  }

  // Any thread, while a cell runs: where its ranks are, for people; empty: none runs, or its daemon cannot
  // say.
  std::string Where();
  // Any thread, likewise: ends the run of the cell, whose outcome is then of no use. Returns when the daemon
  // has heard of it.
  void GiveUp();

  // Ends the daemon of the cell that was run last, and returns what that daemon had run before it, in order.
  // The next cell is run by another.
  std::vector<suite::Cell> Retire();

  const std::map<int, Json>& worlds() const { return worlds_; }  // the answers to `hello`, by world size

 private:
  using Question = Result (Pool::*)(const Json&, const RunOptions&);
  Outcome Ask(const suite::Cell& cell, RunOptions options, Question question);
  template <typename Use>
  void WithAsked(Use use);  // the pool that is asked, if there is one
  Pool& At(int world_size);
  Pool& PoolOf(int world_size);  // ends the daemons of others, unless they are kept
  void NameSources(Outcome& outcome) const;
  void KeepDigests(const Json& hello, const Json& answer);
  Outcome NotStarted(const suite::Cell& cell, const PoolError& error);
  void Stop(int world_size);
  Result AskPool(Pool& pool, const suite::Cell& cell, const RunOptions& options, Question question);
  void StartNext(double seconds);
  void StopOthers();

  const PoolOptions options_;  // Every pool has them, but for its world size and on_stderr.
  const Rules rules_;
  CaseOutput* const output_;
  std::map<int, Pool> pools_;                          // by world size
  int world_size_ = 0;                                 // the latest cell's; 0: none
  std::map<int, std::vector<suite::Cell>> histories_;  // by world size: what its daemon has run
  std::vector<suite::Cell> before_;     // what a daemon had run before the cell that it ended with
  std::map<int, Outcome> not_started_;  // by world size: the outcome of its further cells
  std::map<int, Json> worlds_;
  Sources sources_;
  std::map<std::string, std::string> digests_;  // by library: of the first answer that names it
  std::mutex asked_mutex_;                      // held while another thread uses the pool that is asked
  Pool* asked_ = nullptr;                       // null: none

  std::deque<int> upcoming_;   // the world sizes of the cells to come
  double seconds_ = 0;         // what the cells of this world size took so far
  int cells_ = 0;              // how many of them have run
  int next_ = 0;               // the world size whose pool is started ahead; 0: none
  bool beside_ = false;        // another pool is up meanwhile
  std::future<Json> started_;  // its answer to `hello`
  std::future<void> ended_;    // when the pool before this one has ended
};

}  // namespace cppool::command
