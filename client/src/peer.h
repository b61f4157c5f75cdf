// What answers a Daemon's requests: a process of its own (process.h), or the pool of a server
// (connection.h). Not thread-safe; every wait has a limit.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "base/unique_fd.h"

namespace cppool::client {

using Clock = std::chrono::steady_clock;

class Peer {
 public:
  virtual ~Peer() = default;
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  virtual pid_t pid() const = 0;  // of the process that answers; 0: not known
  virtual int pidfd() const = 0;  // readable when that has ended; -1: the kernel has none
  // A socket that takes requests: send(2) with MSG_NOSIGNAL raises no SIGPIPE.
  virtual int input() const = 0;
  virtual int output() const = 0;           // answers, non-blocking
  virtual base::UniqueFd TakeErrors() = 0;  // what is written on stderr, non-blocking

  // No request follows: end of file on its side.
  virtual void CloseInput() = 0;

  virtual bool Ended() = 0;                           // does not wait
  virtual bool WaitEnd(Clock::time_point until) = 0;  // false: it goes on
  // Ends it: asks, waits `grace`, forces, waits at most `kill_limit`. False: it has not ended; may be called
  // again.
  virtual bool Terminate(std::chrono::milliseconds grace, std::chrono::milliseconds kill_limit) = 0;
  virtual std::string DescribeEnd() = 0;  // "exited with code 3"
  virtual bool EndedInOrder() = 0;
  virtual bool EndIsUnknown() = 0;  // ended, and nobody knows how

  // In a forked child of the process that made it: closes the copies of the descriptors and does nothing
  // else.
  virtual void Abandon() = 0;

 protected:
  Peer() = default;
};

}  // namespace cppool::client
