// A warm pool for a test harness or a benchmark: one daemon per world size, spawned when it is first needed.
//
//     #include <cppool/pool.h>
//     #include <iostream>
//
//     int main() {
//       cppool::Pools pools;  // finds cppoold beside the program or in PATH
//       try {
//         cppool::Result result = pools.At(2).Run({{"cp_comm_type", "a2a"}, {"num_heads", 8}});
//         for (const cppool::Check& check : result.checks)
//           if (!check.ok) std::cout << check.tensor << " is off by " << check.max_abs_err << "\n";
//         std::cout << result.status << " in " << result.wall_ms << " ms " << result.error << "\n";
//         return result.ok() ? 0 : 1;
//       } catch (const cppool::PoolError& error) {  // it could not start, died, hung or talked nonsense
//         std::cerr << error.what() << "\n";        // ends with the last lines of the daemon's stderr
//         return 2;
//       }
//     }
//
// No CUDA is loaded or called in the caller's process: its forks and its own use of the GPUs are not touched.
// A daemon leads a process group of its own and inherits no descriptor, signal mask or disposition. It ends
// with its Pool, and with the process that spawned it, however that ends.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/result.h>

namespace cppool {

struct PoolOptions {
  int world_size = 2;
  // Path. Empty: $CPPOOL_DAEMON, else `cppoold` beside the program, in its prefix, in PATH, or in the prefix that the
  // library was configured for; the first that is there.
  std::string daemon;
  std::string backend = "auto";    // or "cuda", "host"
  std::string transport = "auto";  // or "nccl", "peer", with which ranks can share a GPU
  // Indices or UUIDs, the daemon's CUDA_VISIBLE_DEVICES. Empty: the caller's.
  std::vector<std::string> devices;
  std::vector<std::string> case_files;  // shared libraries with further cases (cppool/case.h)
  std::string sentinel = "[CP_POOL_RESP] ";
  std::string log_level;                                         // empty: the daemon's own default
  std::vector<std::string> arguments;                            // further arguments of the daemon
  std::vector<std::pair<std::string, std::string>> environment;  // set for the daemon, beside the caller's

  // Each from 0 to 24 h.
  std::chrono::milliseconds start_limit{60000};  // from the spawn to the answer to `hello`
  std::chrono::milliseconds grace{2000};         // past a case's deadline, for its answer; for an orderly end
  std::chrono::milliseconds kill_grace{5000};    // from SIGTERM to SIGKILL, and from there to giving up
  // After so long without a call the daemon ends and gives its GPUs back; the next call spawns another, which
  // is no attempt and no failure. 0: never.
  std::chrono::milliseconds idle_exit{0};
  int retries = 1;  // when the daemon died or broke the protocol

  // Called without the newline; must not call the Pool; what they throw is dropped. They must return: calls wait for
  // them, and on_stderr, on its thread, must take no lock that a caller of the Pool holds. A slow one does not extend a
  // call: it gets less, of stderr what it takes within half a second of the daemon's end.
  std::function<void(std::string_view)> on_stderr;  // each line of stderr, at once, on the Pool's own thread
  std::function<void(std::string_view)> log;  // other lines of stdout, stale answers, respawns; in the call
};

// What one rank is made to do wrong: only for a daemon started with `--allow-faults` (PoolOptions::arguments).
struct Fault {
  std::string kind;  // "throw", "stall", ...: the README lists them
  int rank = 0;
  std::string stage{};     // the name of a mark or how it begins; empty: any mark of the case's iterations
  std::int64_t count = 1;  // at which one of those marks
};

struct RunOptions {
  std::string case_name = "attention";
  std::chrono::milliseconds deadline{90000};  // of the case; 1 ms to 24 h
  std::int64_t warmup = 0;                    // iterations before those that are timed
  std::int64_t repeat = 1;                    // timed iterations; times are their median
  bool checks = true;
  std::optional<std::uint64_t> perturb;  // seed of random delays at every mark; below 2^63
  std::string dump;                      // folder for the case's tensors as .npy; empty: none
  std::string inputs;                    // folder with q.npy, k.npy, ... to run on; empty: generated
  std::optional<Fault> fault;
};

struct Failure {
  std::string kind;  // "mismatch", "timeout", "out_of_memory", ...: the README lists them
  std::optional<int> rank;
  std::string stage;
  std::string detail;
};

struct Result {
  Status status = Status::kError;
  std::string error;               // for people; empty when passed
  std::optional<Failure> failure;  // present when not passed
  bool fatal = false;              // the daemon has gone with this answer; the next call spawns another
  std::vector<Rank> ranks;
  std::vector<Check> checks;
  std::vector<std::pair<std::string, double>> tflops;  // per GPU, by stage
  double wall_ms = 0;
  std::optional<std::uint64_t> seed;
  int attempts = 1;  // daemons that were asked, this one included
  Json json;         // the whole answer

  bool ok() const { return status == Status::kPassed; }
};

// Why a daemon could not start, as it says for programs. Texts are empty, numbers absent, where it does not say.
struct StartFailure {
  std::string error;   // for people
  std::string kind;    // as Failure has it
  std::string detail;  // what happened, without advice
  std::string stage;   // "arguments", "process", "backend", "cases", "ranks"
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<int> devices;  // that CUDA sees; fewer than world_size with kind "unsupported": too many ranks
  std::string backend, transport;
};

// The daemon gave no answer. what() ends with the tail of its stderr.
class PoolError : public std::runtime_error {
 public:
  enum class Kind {
    kStart,     // it could not be spawned, or did not answer `hello` properly in time
    kDied,      // it ended before it answered
    kTimeout,   // no answer within the deadline and the grace; it was killed
    kProtocol,  // it answered what is no answer, or closed a pipe and lives; it was killed
  };
  PoolError(Kind kind, const std::string& message, std::string stderr_tail, int attempts = 1,
            std::optional<StartFailure> start_failure = std::nullopt);

  Kind kind() const { return kind_; }
  int attempts() const { return attempts_; }  // daemons that were asked; the last may not have started
  const std::string& stderr_tail() const { return stderr_tail_; }  // at most 4000 characters
  // With kStart, when the daemon said why: an older one does not, nor one that was killed.
  const std::optional<StartFailure>& start_failure() const { return start_failure_; }

 private:
  Kind kind_;
  std::string stderr_tail_;
  int attempts_;
  std::optional<StartFailure> start_failure_;
};
std::string_view ToString(PoolError::Kind kind);  // "start", "died", "timeout", "protocol"

// One daemon, spawned by the first call and again by the first call after it has gone. Calls from several
// threads take turns. In a forked child a Pool leaves its parent's daemon alone and spawns one of its own.
class Pool {
 public:
  // Throws std::invalid_argument for limits out of range, and for texts with a zero byte, or a newline in the sentinel.
  explicit Pool(PoolOptions options = {});
  ~Pool();  // as Stop
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs one case. Returns whatever the daemon answered; throws PoolError when it gave no answer, and
  // std::invalid_argument for options out of range and for what JSON cannot say: NaN, infinities, text that is not
  // UTF-8. An attempt lasts at most start_limit, deadline, twice grace (the second after a fatal answer, for the
  // daemon to go), twice kill_grace, and a second where on_stderr is slow to take last words; so does meeting a daemon
  // that goes idle, once in a call, which is no attempt. A daemon that died or broke the protocol is replaced and asked
  // again `retries` times; one that could not start, or did not answer in time, is not. After a failed start the next
  // call pauses before it starts another: 0.1, 0.2, 0.4, 0.8 s. After five in a row calls throw at once, without a
  // start, for 1.6 s, after six for 3.2 s, ..., at most for a minute. A start that succeeds, and Stop, reset this.
  Result Run(const Json& params = Json::object(), const RunOptions& options = {});

  // Whether Run would run it: `passed`, else `skipped` or `error` with the reason. Throws as Run; a minute at most.
  Result Validate(const Json& params = Json::object(), const RunOptions& options = {});

  // The answers to the other operations, under the same rules; a minute at most.
  Json Hello();
  Json List();
  Json Stats();

  // What the daemon can do beyond the first protocol 1: `features` of Hello(), such as "validate", which protocol/README.md lists.
  // Empty: a daemon from before there were any.
  std::vector<std::string> Features();

  // Ends the daemon: closes its input, waits for `grace`, kills its group. The next call spawns another.
  void Stop();

  // The tail of the stderr of the latest daemon: of its last 200 lines at most 4000 characters. Takes its turn.
  std::string StderrTail() const;

  const PoolOptions& options() const { return options_; }

 private:
  class State;
  State& Mine() const;

  PoolOptions options_;
  mutable std::atomic<State*> state_;  // of the process that used it last: a forked child makes its own
};

// One Pool per world size, made when it is first asked for. Safe for several threads.
class Pools {
 public:
  explicit Pools(PoolOptions options = {});  // for all of them, but for the world size; throws as Pool
  ~Pools();
  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;

  Pool& At(int world_size);  // lives as long as the Pools
  void Stop();

 private:
  struct Node;
  PoolOptions options_;
  std::atomic<Node*> head_{nullptr};  // a list that only grows: no lock that a fork could find held
};

// The program that a Pool with these options spawns; empty when none was found.
std::string FindDaemon(const PoolOptions& options);

}  // namespace cppool
