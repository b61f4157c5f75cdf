// What a case leaves behind in the daemon's process: threads, open descriptors, processes, and host memory
// that grows.
#pragma once

#include <cppool/case.h>
#include <dirent.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "daemon/world.h"
#include "protocol/response.h"

namespace cppool::daemon {

// The entries of a folder of /proc/self that are numbers: threads (task), or descriptors (fd).
class ProcNumbers {
 public:
  explicit ProcNumbers(const char* folder);
  // How many there are now, without a list: a microsecond. 0: the system does not tell (fd before Linux 6.2).
  std::size_t Count() const;
  const std::set<int>& List();
  const std::set<int>& last() const { return last_; }

 private:
  struct Close {
    void operator()(DIR* folder) const { closedir(folder); }
  };
  const std::unique_ptr<DIR, Close> folder_;
  std::set<int> last_;
};

// On the thread that starts jobs, while the ranks are idle.
class Leftovers {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Leftovers(World& world);

  // Before a run: what is there now is no case's, be it of a library that a request has opened. `opened`: how
  // many there were so far, as what they bring may take the place of what has gone.
  void BeginRun(std::size_t opened);
  // After a run of the case: adds to `leaks` what it has left, and to `warnings` a text for each kind. When
  // something seems to be left it looks again for at most a fifth of a second, and not beyond `until`: a
  // thread that is about to end is no leak. What CUDA, NCCL and OpenMP may have made for themselves, and host
  // memory, counts when each of the last five runs of the case has left some.
  void Report(const cppool_case* definition, Clock::time_point until, protocol::Leaks& leaks,
              std::vector<std::string>& warnings);

 private:
  struct Kind {
    std::vector<std::string> sure, doubtful;  // for people
  };
  struct Found {
    Kind threads, fds, processes;
  };
  // In how many runs of a case in a row there was something that one run may leave.
  struct History {
    int threads = 0, fds = 0, host = 0;
    std::uint64_t host_bytes = 0;  // after the last run
  };

  bool MayHaveLeft() const;  // what is there may differ from the last lists
  void Forget();             // makes them anew
  Found Look();
  void ReportHostMemory(History& history, protocol::Leaks& leaks, std::vector<std::string>& warnings);
  std::uint64_t HostBytes() const;  // in use by the heap, stacks and the like: memory without a file
  std::size_t Groups() const;

  World& world_;
  const bool on_cuda_;
  ProcNumbers threads_, fds_;
  const base::UniqueFd memory_;
  std::set<int> known_threads_, known_fds_, known_processes_;
  std::size_t known_groups_;
  std::size_t opened_ = 0;
  std::uint64_t host_bytes_;  // after the last run of any case
  std::map<const cppool_case*, History> histories_;
};

}  // namespace cppool::daemon
