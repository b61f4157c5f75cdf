// The ranks of this machine that are Python processes, and the server that forks them. What goes over their
// sockets is described in client/python/cppool/_ranks/README.md.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <ctime>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/event.h"
#include "base/spawn.h"
#include "base/unique_fd.h"
#include "daemon/rank_process.h"
#include "daemon/world.h"
#include "protocol/framing.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

// The interpreter's path, its links not resolved, since a virtual environment is found by it. `wanted`: a
// path or a name on PATH; empty: $CPPOOL_PYTHON, the one of $VIRTUAL_ENV, or python3. Throws StartError.
std::string FindPython(const std::string& wanted);

// A rank of this machine.
class ForkedRank : public RankProcess {
 public:
  ForkedRank(int rank, std::size_t most_output);
  ~ForkedRank() override;

  bool Send(const protocol::Json& frame) override;
  Place Where() const override;
  // Whole lines of its output go to this process's stderr, up to `most_output` bytes of a case, each with the
  // label "[rank N] "; a long line in parts, whose label is "[rank N+] " but for the last one.
  void BeginCase() override;

 private:
  friend class ForkServer;

  pid_t pid() const;  // 0: not known yet
  // What its threads do and the last collective of each group (frame `stacks`). Nothing: it has not answered
  // by `limit`.
  std::optional<protocol::Json> AskStacks(Clock::time_point limit);
  // As Stacks(), as soon as there is some and no more has come for a moment.
  std::string WaitForStacks(Clock::time_point limit);

  // On the thread that reads.
  void Read();  // what there is on its socket, after what there is on its pipes
  void ReadOutput();
  void ReadStacks();
  void TakeOutput(std::string_view bytes);
  void TellLeftOut();  // with `mutex_`
  void WriteLines(bool all);
  void TakeLine(std::string_view line);
  void TellEnd(std::string how);  // it has ended: reads the rest
  void Close(std::string how);    // likewise, and nothing of it is left
  void Break(const std::string& why);

  const std::size_t most_output_;
  base::UniqueFd socket_, output_, stacks_;
  const unsigned char* page_ = nullptr;
  bool at_end_ = false;  // of the socket; of the reading thread, as the next ones
  protocol::LineReader lines_;
  std::string line_;  // of output, that has not ended
  int port_ = 0;      // of its world's store
  timespec since_{};  // it is forked after this

  // Under `mutex_`.
  pid_t pid_ = 0;
  std::optional<protocol::Json> answer_;  // to AskStacks
  std::string broken_;                    // why it is to be killed; empty: it is not
  std::size_t written_ = 0;               // bytes of output since BeginCase
  std::size_t unread_ = 0;                // of those, labels included, that stderr did not take
  std::mutex sending_;
};

class ForkServer : public RankServer {
 public:
  struct Options {
    std::string python;
    std::vector<std::string> preload;
    std::string devices;                              // CUDA_VISIBLE_DEVICES of the ranks
    std::size_t most_output = std::size_t{64} << 20;  // bytes of a rank and case
    // Forked by a process that has imported the modules for all daemons of this process's parent with the
    // same interpreter, modules and environment: the first of them starts it, and it ends with the last.
    bool shared = false;
  };
  // As many as there are ranks, and none on the host.
  static std::string VisibleDevices(BackendChoice backend, int ranks);

  // Starts it and waits until it is ready. Throws StartError. The thread that calls this must live until
  // then: the server dies with it, or what forks it.
  ForkServer(Options options, Clock::time_point deadline);
  ~ForkServer() override;  // ends all ranks, and what they have started
  ForkServer(const ForkServer&) = delete;
  ForkServer& operator=(const ForkServer&) = delete;

  // Which ranks of a world are here, and where they find its store: rank 0 is given the socket that listens.
  struct Seats {
    int size = 1, first = 0, ranks = 1;
    int node = 0;  // its number
    std::string backend, host;
    int port = 0, listener = -1;
  };
  // Forks them. Throws StartError, or std::system_error: then those before are under way.
  Ranks Start(const Seats& seats);
  // A socket that listens at this address, and its port. Throws std::system_error.
  static std::pair<base::UniqueFd, int> Listen(const std::string& host);

  const ForkServerInfo& info() const override { return info_; }
  World Fork(int size, const std::string& backend, Clock::time_point deadline) override;
  std::vector<std::string> Changed(Clock::time_point deadline) override;
  void Kill(const RankProcess& rank) override { Kill(static_cast<const ForkedRank&>(rank), SIGKILL); }
  Look LookAt(RankProcess& rank, bool stacks, Clock::time_point limit) override;

 private:
  // One try. False: what was to fork it has ended, and another one can be started. Throws StartError.
  bool Start(const base::SpawnCommand& command, Clock::time_point deadline);
  void EndThread();
  void Loop();
  void Send(const protocol::Json& frame, const std::vector<int>& descriptors = {});
  void TakeFrame(const protocol::Json& frame);
  void TellEnd(ForkedRank& rank);
  void Gone();  // the server has ended
  std::shared_ptr<ForkedRank> MakeRank(const Seats& seats, int rank);
  void Kill(const ForkedRank& rank, int signal);  // other than SIGKILL: to the rank alone

  const Options options_;
  ForkServerInfo info_;
  pid_t pid_ = -1;
  pid_t child_ = 0;  // to be reaped: the same, or what forks it; 0: that is another daemon's
  base::UniqueFd socket_;
  const base::Event wake_;
  protocol::LineReader lines_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<ForkedRank>> ranks_;  // that have not ended
  std::optional<protocol::Json> ready_, checked_;
  std::string gone_;  // how it has ended; empty: it has not
  bool stop_ = false;
  std::mutex sending_;
  std::thread thread_;
};

}  // namespace cppool::daemon
