// A warm pool for a test harness or a benchmark: one daemon per world size, spawned when it is first needed.
//
//     #include <cppool/pool.h>
//     #include <iostream>
//
//     int main() {
//       cppool::Pools pools;  // finds cppoold beside the program or in PATH
//       try {
//         cppool::Result result = pools.At(2).Run({{"cp_comm_type", "a2a"}, {"num_heads", 8}});
//         std::cout << result << "\n";  // result.Describe(): what failed, where, and how to run it again
//         return result.ok() ? 0 : 1;
//       } catch (const cppool::PoolError& error) {  // the daemon gave no answer
//         std::cerr << error.what() << "\n";        // ends with the last lines of the daemon's stderr
//         return 2;
//       }
//     }
//
// The library neither loads nor calls CUDA in the caller's process, which may fork and use GPUs itself. A
// daemon has a process group of its own and inherits no descriptor, signal mask or disposition. It ends with
// its Pool, and with the process that spawned it.
//
// | what is limited                   | limit                      | what happens then |
// | --------------------------------- | -------------------------- | --- |
// | start: from the spawn to `hello`  | start_limit                | killed; PoolError kStart, no retry |
// | a call that is interrupted        | 1.5 s                      | killed |
// | a case or its checks              | deadline                   | a fatal Result of kind "timeout" |
// | the answer of Run, Validate       | deadline + grace           | killed; PoolError kTimeout, no retry |
// | the answer of other calls         | 60 s                       | the same |
// | end: Stop, a fatal answer         | grace                      | SIGTERM to the group |
// | after SIGTERM, then SIGKILL       | kill_grace each            | SIGKILL; what stays is reported |
// | on_stderr, after the daemon's end | 0.5 s                      | the lines left are dropped |
// | attempts of one call              | 1 + retries                | PoolError kDied or kProtocol |
// | pause after n failed starts       | 0.1 s * 2^(n-1), <= 60 s   | n < 5: the call waits; else it throws |
// | time without a call               | idle_exit                  | the daemon ends |
// | with `attach`: the wait for others | queue_limit               | PoolError kQueue |
// | an answer                         | 16 MiB                     | broken protocol |
// | the tail of stderr                | 200 lines, 4000 characters | the beginning is dropped |
//
// One attempt takes at most start_limit + deadline + 2 grace + 2 kill_grace + 1 s.
//
// A successful start and Stop reset the count of failed starts. When a daemon exits because it is idle just
// as a call begins, the call spawns another one, once, without counting an attempt.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/pool_error.h>
#include <cppool/run_options.h>
#include <cppool/run_result.h>

namespace cppool {

struct Cell;  // cppool/suite.h

namespace client {
struct PoolAccess;
}

struct PoolOptions {
  int world_size = 2;
  // Path. Empty: $CPPOOL_DAEMON, else the first `cppoold` found in the prefix of the shared library that this
  // code is in, if it is in one, beside the program, in its prefix, where CMake's cppool::client has found
  // it, in PATH, or in the prefix that the library was configured for.
  std::string daemon;
  std::string backend = "auto";    // or "cuda", "host"
  std::string transport = "auto";  // or "nccl", "peer"; with peer, ranks can share a GPU
  // Indices or UUIDs: the daemon's CUDA_VISIBLE_DEVICES, and backend "auto" is then "cuda". Empty: the
  // caller's value. {""}: no GPU.
  std::vector<std::string> devices;
  std::vector<std::string> case_files;  // shared libraries with further cases, loaded at the daemon's start
  std::string sentinel = "[CP_POOL_RESP] ";
  std::string log_level;  // empty: the daemon's own default
  // Ranks that are processes of this Python, and run RunOptions::python: a path or a name on PATH; "": what
  // the daemon finds, $CPPOOL_PYTHON, the Python of $VIRTUAL_ENV, or python3. None: ranks are threads.
  std::optional<std::string> python;
  std::vector<std::string> preload;  // modules that it has imported before it forks the ranks
  // Ranks are those of agents that this launcher starts, on several machines: "srun -N 2
  // --ntasks-per-node=1", "mpirun -N 1 --hostfile hosts -x CPPOOL_SECRET". Words as in a shell, without
  // expansion. None: this machine.
  std::optional<std::string> launch;
  std::vector<std::string> arguments;                            // further arguments of the daemon
  std::vector<std::pair<std::string, std::string>> environment;  // added to the caller's

  // A server (`cppool serve`) whose daemon answers in place of one of this Pool's own: "default", or the path
  // of its socket. Pools with the same daemon, the options above, and CUDA_*, NCCL_*, CPPOOL_*,
  // LD_LIBRARY_PATH, PYTHONPATH and VIRTUAL_ENV of the environment share one. Empty: none.
  std::string attach;

  // The limits of the table above, each from 0 to 24 h.
  std::chrono::milliseconds start_limit{60000};
  std::chrono::milliseconds grace{2000};
  std::chrono::milliseconds kill_grace{5000};
  std::chrono::milliseconds idle_exit{
      0};  // 0: the daemon never ends because it is idle; the server's is its own
  std::chrono::milliseconds queue_limit{600000};  // with `attach`
  int retries = 0;  // further daemons that are asked after one that died or broke the protocol

  // Both get a line without its newline. They must return, since calls wait for them. They may use another
  // Pool; every call of their own one throws std::logic_error. Their exceptions are dropped. on_stderr must
  // not take a lock that a caller of the Pool holds. A slow one does not extend a call but misses lines.
  // on_stderr: every line of stderr, as it comes, on a thread of the Pool.
  std::function<void(std::string_view)> on_stderr;
  // log: other lines of stdout, stale answers, respawns, a daemon that crashed when it was stopped; on the
  // caller's thread.
  std::function<void(std::string_view)> log;

  // Asked about ten times a second, and when a signal handler has run, while a call waits for an answer or
  // for its turn; on the caller's thread. True ends the call: PoolError kInterrupted, whose diagnosis says
  // where the ranks were. Run and Validate are cancelled in the daemon, which is killed if it does not answer
  // within 1.5 s, or cannot cancel; in other calls a daemon that was asked is killed. Every call of its own
  // Pool throws std::logic_error.
  std::function<bool()> interrupted;
};

// One daemon, spawned by the first call, and by the first call after it has ended. Calls of several threads
// take turns. In a forked child a Pool does not touch the parent's daemon and spawns its own.
class Pool {
 public:
  // Throws std::invalid_argument for limits out of range, and for texts with a zero byte, or a newline in the
  // sentinel.
  explicit Pool(PoolOptions options = {});
  ~Pool();  // as Stop
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs one case, within the limits of the table above. Returns the daemon's answer, whatever it is. Throws
  // PoolError when there is none, and std::invalid_argument for options out of range and for values that JSON
  // cannot express: NaN, infinities, text that is not UTF-8.
  Result Run(const Json& params = Json::object(), const RunOptions& options = {});

  // Returns whether Run would run it: kPassed, else kSkipped or kError with the reason. Throws as Run does.
  Result Validate(const Json& params = Json::object(), const RunOptions& options = {});

  // The answers to the other operations. Throw as Run does.
  Json Hello();
  Json List(const std::vector<std::string>& load = {});  // with the cases of these libraries
  Json Stats();

  // What the daemon can do beyond the first protocol 1: `features` of Hello(), such as "validate", which
  // protocol/README.md lists. Empty: a daemon from before there were any.
  std::vector<std::string> Features();

  // For another thread, while a call of Run or Validate goes on. They wait for the daemon's answer, which
  // comes at once, and throw PoolError kProtocol when it has not the feature "cancel" or "status". Cancel
  // ends that call soon: it returns the daemon's answer, kError with a failure of kind "cancelled". The
  // daemon stays warm if its ranks stop in time (daemon/failures.md). False: no such call goes on, or it has
  // just ended.
  bool Cancel();
  // Where every rank is now: the members of the protocol's `status`, such as "text", for people.
  Json Status();

  // Ends the daemon: closes its stdin, waits for `grace`, kills its group. The next call spawns another.
  // Waits for a call of another thread, and throws PoolError kInterrupted there when `interrupted` says so.
  void Stop();

  // Returns the tail of the stderr of the latest daemon, with all that it wrote before this call, whose lines
  // on_stderr has then been given; waits at most 0.5 s for them, and for a call in progress as Stop does.
  std::string StderrTail() const;

  const PoolOptions& options() const { return *options_; }

 private:
  friend struct client::PoolAccess;
  class State;
  State& OfThisProcess() const;

  std::shared_ptr<const PoolOptions> options_;  // shared with Results
  mutable std::atomic<State*>
      state_;  // belongs to the process that used it last; a forked child makes its own
};

// One Pool per world size, made by the first At. Thread-safe.
class Pools {
 public:
  explicit Pools(PoolOptions options = {});  // for every Pool, except world_size; throws as Pool
  ~Pools();
  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;

  Pool& At(int world_size);  // lives as long as the Pools
  // As At(cell.world_size).Run, with the cell's case and parameters.
  Result Run(const Cell& cell, RunOptions options = {});
  void Stop();

 private:
  struct Node;
  PoolOptions options_;
  std::atomic<Node*> head_{nullptr};  // a list that only grows, so that no lock can be held during a fork
};

// Pools of this process with the default options, and the server at $CPPOOL_ATTACH where that is set. Their
// daemons, but for a server's, end with the process.
Pools& SharedPools();

// Returns the program that a Pool with these options spawns; empty: not found.
std::string FindDaemon(const PoolOptions& options);

#ifdef CPPOOL_OWN_DAEMON
// CMake's cppool::client says where the `cppoold` of the same prefix, or of the same build, is. The library,
// which was compiled before that was known, has a weak reference to this.
extern "C" [[gnu::used]] inline constexpr char cppool_own_daemon[] = CPPOOL_OWN_DAEMON;
#endif

}  // namespace cppool
