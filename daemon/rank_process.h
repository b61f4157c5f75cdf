// A rank that is a Python process, here or at an agent, and what starts such ranks. What is said to them is
// described in client/python/cppool/_ranks/README.md.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "protocol/json_text.h"

namespace cppool::daemon {

// One rank, until it has ended. Any thread may call anything; one thread at a time calls Next.
class RankProcess {
 public:
  using Clock = std::chrono::steady_clock;

  explicit RankProcess(int rank) : rank_(rank) {}
  virtual ~RankProcess() = default;
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int rank() const { return rank_; }
  virtual std::string node() const { return ""; }  // where it is, as its head names it; empty: here

  // False: it has ended, or has read nothing for 10 s.
  virtual bool Send(const protocol::Json& frame) = 0;
  // Waits for the next frame, other than answers to `stacks`. Nothing: the process has ended, or `limit` has
  // come.
  std::optional<protocol::Json> Next(Clock::time_point limit = Clock::time_point::max());
  // How it has ended, for people: "was killed by signal 9 (Killed), and left 2 processes". Nothing: it has
  // not, or has sent frames that Next has not returned.
  std::optional<std::string> End() const;
  // Until nothing of it is left, which may be later; also with frames that nobody takes.
  bool WaitEnd(Clock::time_point limit);

  // Where it is, from the page that it shares, whatever it is stuck in; of a rank elsewhere once it has
  // ended.
  enum class Phase { kIdle, kLoad, kCase, kWaits, kReset };
  struct Place {
    Phase phase = Phase::kIdle;
    double seconds = 0;           // since it came there
    std::int64_t iterations = 0;  // begun
    std::string stage;
  };
  virtual Place Where() const = 0;

  // What faulthandler has written since BeginCase, at a fatal signal or for its stacks; at most 64 kB.
  std::string Stacks() const;
  // The end of what it and its children have written since BeginCase: at most 4 kB.
  std::string Output() const;
  // Which part of it since then is not on stderr, for people; empty: all is there.
  std::string LeftOut() const;
  virtual void BeginCase();

 protected:
  const int rank_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<protocol::Json> frames_;
  std::optional<std::string> end_;
  bool over_ = false;  // nothing of it is left
  std::string stacks_text_, tail_, left_out_;
};

// What a fork server says when it is ready.
struct ForkServerInfo {
  std::string python, torch;                                  // versions; torch: empty without it
  std::vector<std::string> preloaded;                         // modules
  std::vector<std::pair<std::string, std::string>> deferred;  // those that ranks import, and why
  std::vector<std::pair<std::string, double>> import_ms;
};

// Starts the ranks of a world: a fork server, or those of several agents.
class RankServer {
 public:
  using Clock = RankProcess::Clock;
  using Ranks = std::vector<std::shared_ptr<RankProcess>>;

  struct World {
    Ranks ranks;
    std::vector<protocol::Json> ready;  // the frame of each
  };
  // What a rank does, as far as that can be found out at once.
  struct Look {
    bool known = true;      // false: where it is does not say in time
    bool answered = false;  // its control thread has
    protocol::Json stacks;  // its answer: what its threads do and the last collective of each group
    std::string text;       // faulthandler's stacks, of one that has not answered
    std::string state;      // of the process, likewise: "it is stopped"
    RankProcess::Place place;
  };

  static constexpr std::chrono::milliseconds kSignalLimit{150};

  virtual ~RankServer() = default;

  virtual const ForkServerInfo& info() const = 0;
  // Makes the ranks of a world, and waits until they are ready. `backend`: as the frame `fork` has it. Throws
  // StartError; then all are dead.
  virtual World Fork(int size, const std::string& backend, Clock::time_point deadline) = 0;
  // Why another server is needed: preloaded files that have changed on disk since they were imported, or that
  // it has ended or does not answer.
  virtual std::vector<std::string> Changed(Clock::time_point deadline) = 0;
  // The rank and all that it has started. Of one that has ended: ignored.
  virtual void Kill(const RankProcess& rank) = 0;
  // Waits until the control thread has answered or `limit`. With `stacks`, one that does not answer is sent a
  // signal for them, which interrupts system calls: for a rank that is given up, and kSignalLimit more.
  virtual Look LookAt(RankProcess& rank, bool stacks, Clock::time_point limit) = 0;
  // Whether ranks send the digests of the files that they have loaded; and of those (the member `files` of
  // their report) the first one that is another one here, for people. Empty: they are the same.
  virtual bool ComparesFiles() const { return false; }
  virtual std::string DifferentFile(const RankProcess&, const protocol::Json&) { return ""; }
  // Why no rank can be started any more, by another server neither; empty: it can.
  virtual std::string Lost() const { return ""; }

  // Kills all, and waits until all that they have started is dead. False at `limit`.
  bool KillAll(const Ranks& ranks, Clock::time_point limit);

 protected:
  // Takes the frame `ready` of each rank. Throws StartError, when all are dead.
  World WaitReady(Ranks ranks, Clock::time_point deadline);
  [[noreturn]] void Fail(const Ranks& ranks, int rank, const std::string& why, protocol::FailureKind kind);
};

}  // namespace cppool::daemon
