// A server's pool in place of a process: requests and answers go through a socket, and the lines that the
// daemon writes on stderr come through a pipe whose other end the server is given.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <cppool/pool.h>
#include "base/unique_fd.h"
#include "client/src/peer.h"

namespace cppool::client {

class Connection : public Peer {
 public:
  // Connects to the server that options.attach names and asks for the pool. Throws std::runtime_error or
  // std::invalid_argument that says why there is none.
  static std::unique_ptr<Connection> Open(const PoolOptions& options);

  pid_t pid() const override { return pid_; }
  int pidfd() const override { return pidfd_.get(); }
  int input() const override { return socket_.get(); }
  int output() const override { return socket_.get(); }
  base::UniqueFd TakeErrors() override { return std::move(errors_); }
  void CloseInput() override;
  bool Ended() override;
  bool WaitEnd(Clock::time_point until) override;
  bool Terminate(std::chrono::milliseconds grace, std::chrono::milliseconds kill_limit) override;
  std::string DescribeEnd() override { return "closed the connection"; }
  bool EndedInOrder() override { return false; }
  bool EndIsUnknown() override { return false; }
  void Abandon() override;

 private:
  Connection() = default;
  void Connect(const std::string& path);
  void Ask(const std::string& path, const PoolOptions& options);

  pid_t pid_ = 0;
  base::UniqueFd pidfd_, socket_, errors_;
  bool closed_ = false;
};

// Connects to the server of this user at `path`; `pid` is its process. Throws as Connection::Open.
base::UniqueFd ConnectToServer(const std::string& path, pid_t* pid);
// A pidfd of a process, close-on-exec; -1: the kernel has none, or the process has ended.
int OpenPidfd(pid_t pid);
// The next line that comes from the socket, byte by byte, so that nothing behind it is read. Throws
// std::runtime_error when there is none within `limit`.
std::string ReadLineFrom(int socket, std::chrono::milliseconds limit);

}  // namespace cppool::client
