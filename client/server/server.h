// `cppool serve`: pools behind a Unix socket, for all programs of one user.
#pragma once

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/event.h"
#include "base/unique_fd.h"
#include "client/server/served_pool.h"
#include "client/server/session.h"

namespace cppool::server {

class Server : public Host {
 public:
  // Listens at `path`, also where a server that crashed has left its socket. Takes the variables that are a
  // part of a pool's identity out of this process's environment: they are the clients'. `launch`: of pools
  // whose client names no launcher. Throws std::runtime_error when another server runs there, or it cannot
  // listen.
  Server(std::string path, std::chrono::milliseconds idle_exit, std::optional<std::string> launch);
  ~Server() override;
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Serves until Stop, or until it was idle: no client was connected for `idle_exit`. Then ends requests that
  // are under way, and all daemons. Returns why it ended.
  std::string Run();
  void Stop() override;  // any thread; does not wait

 private:
  struct Client {
    std::unique_ptr<Session> session;
    std::thread thread;
    std::atomic<bool> ended{false};
  };

  ServedPools& pools() override { return pools_; }
  Json Describe() override;
  bool stopping() const override { return stopping_; }
  const std::optional<std::string>& launch() const override { return launch_; }
  void Accept();
  void Reap(bool all);

  const std::string path_;
  const std::chrono::milliseconds idle_exit_;
  const std::optional<std::string> launch_;
  const Clock::time_point started_ = Clock::now();
  base::UniqueFd lock_, socket_;
  const base::Event wake_;
  std::atomic<bool> stopping_{false};
  ServedPools pools_;
  std::list<Client> clients_;  // of the thread that runs Run
};

}  // namespace cppool::server
