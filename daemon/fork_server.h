// Python rank processes and the server that forks them. What goes over their sockets is described in
// client/python/cppool/_ranks/README.md.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "protocol/framing.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

// The interpreter's path, its links not resolved, since a virtual environment is found by it. `wanted`: a
// path or a name on PATH; empty: $CPPOOL_PYTHON, the one of $VIRTUAL_ENV, or python3. Throws StartError.
std::string FindPython(const std::string& wanted);

// One rank, until it has ended. Any thread may call anything; one thread at a time calls Next.
class RankProcess {
 public:
  using Clock = std::chrono::steady_clock;

  RankProcess(int rank, std::size_t most_output);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int rank() const { return rank_; }
  pid_t pid() const;  // 0: not known yet

  // False: it has ended, or has read nothing for 10 s.
  bool Send(const protocol::Json& frame);
  // Waits for the next frame, other than answers to AskStacks. Nothing: the process has ended, or `limit` has
  // come.
  std::optional<protocol::Json> Next(Clock::time_point limit = Clock::time_point::max());
  // How it has ended, for people: "was killed by signal 9 (Killed), and left 2 processes". Nothing: it has
  // not, or has sent frames that Next has not returned.
  std::optional<std::string> End() const;
  bool WaitEnd(Clock::time_point limit);  // also with frames that nobody takes

  // Where it is, from the page that it shares: read whatever it is stuck in.
  enum class Phase { kIdle, kLoad, kCase, kWaits, kReset };
  struct Place {
    Phase phase = Phase::kIdle;
    double seconds = 0;           // since it came there
    std::int64_t iterations = 0;  // begun
    std::string stage;
  };
  Place Where() const;

  // What its threads do and the last collective of each group (frame `stacks`). Nothing: it has not answered
  // by `limit`.
  std::optional<protocol::Json> AskStacks(Clock::time_point limit);
  // What faulthandler has written since BeginCase, at a fatal signal or for kStacksSignal; at most 64 kB.
  std::string Stacks() const;
  // As Stacks(), as soon as there is some and no more has come for a moment.
  std::string WaitForStacks(Clock::time_point limit);

  // The end of what it and its children have written since BeginCase: at most 4 kB. Whole lines go to this
  // process's stderr, labelled with the rank, up to `most_output` bytes of a case.
  std::string Output() const;
  void BeginCase();

 private:
  friend class ForkServer;

  // On the thread that reads.
  void Read();  // what there is on its socket, after what there is on its pipes
  void ReadOutput();
  void ReadStacks();
  void TakeOutput(std::string_view bytes);
  void WriteLines(bool all);
  void TakeLine(std::string_view line);
  void Close(std::string how);  // it has ended: reads the rest
  void Break(const std::string& why);

  const int rank_;
  const std::size_t most_output_;
  base::UniqueFd socket_, output_, stacks_;
  const unsigned char* page_ = nullptr;
  bool at_end_ = false;  // of the socket; of the reading thread, as the next ones
  protocol::LineReader lines_;
  std::string line_;  // of output, that has not ended

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  pid_t pid_ = 0;
  std::deque<protocol::Json> frames_;
  std::optional<protocol::Json> answer_;  // to AskStacks
  std::optional<std::string> end_;
  std::string broken_;  // why it is to be killed; empty: it is not
  std::string stacks_text_, tail_;
  std::size_t written_ = 0;  // bytes of output since BeginCase
  std::mutex sending_;
};

// What a fork server says when it is ready.
struct ForkServerInfo {
  std::string python, torch;                                  // versions; torch: empty without it
  std::vector<std::string> preloaded;                         // modules
  std::vector<std::pair<std::string, std::string>> deferred;  // those that ranks import, and why
  std::vector<std::pair<std::string, double>> import_ms;
};

class ForkServer {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::string python;
    std::vector<std::string> preload;
    std::vector<std::string> environment;             // "NAME=value", beside this process's
    std::size_t most_output = std::size_t{64} << 20;  // bytes of a rank and case
  };
  // faulthandler of a rank writes the stacks of all threads. It interrupts system calls.
  static const int kStacksSignal;

  // Starts it and waits until it is ready. Throws StartError. The thread that calls this must live until
  // then: the server dies with it.
  ForkServer(Options options, Clock::time_point deadline);
  ~ForkServer();  // ends all ranks, and what they have started
  ForkServer(const ForkServer&) = delete;
  ForkServer& operator=(const ForkServer&) = delete;

  const ForkServerInfo& info() const { return info_; }

  struct World {
    std::vector<std::shared_ptr<RankProcess>> ranks;
    std::vector<protocol::Json> ready;  // the frame of each
  };
  // Forks the ranks of a world. `backend`: as the frame `fork` has it. Throws StartError; then all are dead.
  World Fork(int size, const std::string& backend, Clock::time_point deadline);
  // Why another server is needed: preloaded files that have changed on disk since they were imported, or that
  // it has ended or does not answer.
  std::vector<std::string> Changed(Clock::time_point deadline);
  // To the rank alone; SIGKILL: to all that it has started, too. Of one that has ended: ignored.
  void Kill(const RankProcess& rank, int signal);
  // Kills all, and waits until all that they have started is dead. False at `limit`.
  bool KillAll(const std::vector<std::shared_ptr<RankProcess>>& ranks, Clock::time_point limit);

 private:
  void Loop();
  void Send(const protocol::Json& frame, const std::vector<int>& descriptors = {});
  void TakeFrame(const protocol::Json& frame);
  void Gone();  // the server has ended
  void Wake();
  std::shared_ptr<RankProcess> MakeRank(int rank, int size, const std::string& backend, int listener,
                                        int port);

  const Options options_;
  ForkServerInfo info_;
  pid_t pid_ = -1;
  base::UniqueFd socket_, wake_;
  protocol::LineReader lines_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<RankProcess>> ranks_;  // that have not ended
  std::optional<protocol::Json> ready_, checked_;
  std::string gone_;  // how it has ended; empty: it has not
  bool stop_ = false;
  std::mutex sending_;
  std::thread thread_;
};

}  // namespace cppool::daemon
