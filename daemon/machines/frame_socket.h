// A TCP connection between a head and an agent that carries frames: lines of JSON, as those of rank
// processes.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/event.h"
#include "base/unique_fd.h"
#include "protocol/framing.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

class FrameSocket {
 public:
  using Clock = std::chrono::steady_clock;
  // Both on the thread that reads, and neither may throw. `gone`: once, at the end.
  struct Events {
    std::function<void(protocol::Json frame)> take;
    std::function<void(const std::string& why)> gone;
  };
  // A thread of its own says on each side that the process is there; so much later without a word it is not.
  static constexpr std::chrono::seconds kBeat{2}, kSilence{10};
  static constexpr std::size_t kMostUnknown = 4096;  // bytes from somebody who has not shown the secret

  explicit FrameSocket(base::UniqueFd socket);
  ~FrameSocket();
  FrameSocket(const FrameSocket&) = delete;
  FrameSocket& operator=(const FrameSocket&) = delete;

  // Before Start: the next frame, of at most kMostUnknown bytes, with what came before where it is not yet
  // whole. Throws std::runtime_error: it has gone, has sent what is no frame, or nothing by `limit`.
  protocol::Json Next(Clock::time_point limit);
  // After the handshake: from now on a thread says that this process is there.
  void BeginBeats();
  // Between that and Start. Throws std::runtime_error: it has gone, or nothing came from it for kSilence.
  void CheckAlive();
  void Start(Events events);

  // Any thread. False: the other side has gone, or has read nothing for kSilence.
  bool Send(const protocol::Json& frame);
  int fd() const { return socket_.get(); }
  void Shut();                      // any thread: both sides see the end
  std::string own_address() const;  // of this machine, as the other side reaches it
  std::string peer_address() const;

 private:
  void Read();
  bool Append();  // false: at the end

  base::UniqueFd socket_;
  const base::Event stop_;
  protocol::LineReader lines_;
  std::size_t unknown_ = 0;                 // bytes that have come before Start
  Clock::time_point heard_ = Clock::now();  // when the latest bytes came
  Events events_;
  std::mutex sending_;
  std::thread reader_, beater_;
};

// Waits until it is connected. Throws StartError.
base::UniqueFd ConnectTo(const std::string& host, const std::string& port,
                         std::chrono::steady_clock::time_point limit);

}  // namespace cppool::daemon
