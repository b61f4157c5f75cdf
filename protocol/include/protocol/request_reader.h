// Requests from stdin. The main thread reads while it waits for one, so that no other thread is in the way of
// a client that sends one request at a time. While the main thread handles a request that may take long, a
// thread "requests" reads what comes meanwhile, so that some requests can overtake.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "base/event.h"
#include "base/unique_fd.h"
#include "protocol/framing.h"
#include "protocol/request_queue.h"

namespace cppool::protocol {

class RequestReader {
 public:
  using Clock = std::chrono::steady_clock;

  struct Events {
    // A request that overtakes has been read; on the thread that has read it.
    std::function<void(const IncomingRequest&)> overtaken;
    // On the thread "requests", every `tick_time` while a request with `progress` is under way.
    std::function<void()> tick;
    std::chrono::milliseconds tick_time{100};
  };

  // `queue`: gets the requests that wait; it must outlive this. `stop_fd` (not owned, -1: none) becomes
  // readable when reading must stop (SIGTERM). `idle_limit`: how long Next() waits for the first byte of a
  // line. `defaults`: as ParseRequest has it. Throws std::system_error.
  RequestReader(base::UniqueFd input, int stop_fd, RequestQueue& queue, Events events,
                std::optional<std::chrono::milliseconds> idle_limit = {}, RunOptions defaults = {});
  ~RequestReader();  // waits for events that have begun
  RequestReader(const RequestReader&) = delete;
  RequestReader& operator=(const RequestReader&) = delete;

  // These two on one thread. Next waits for the next request that does not overtake; without an idle limit,
  // without a limit. Null at the end of input, after a stop, or after the idle limit: then no byte of a later
  // line has been read. The request is under way until the next call of either. Throws std::system_error when
  // the input cannot be read.
  RequestQueue::Entry Next();
  // Waits for at most `within`, which counts towards the idle limit of Next. False: no byte of a later line
  // has come, nor the end of input or a stop.
  bool Arrives(std::chrono::milliseconds within);
  bool idled() const { return idled_; }  // whether the idle limit was the reason

 private:
  enum class Waited { kInput, kStop, kIdle };
  Waited WaitForInput(std::optional<Clock::time_point> idle_until);
  void Read();
  bool HasRoom() const;
  void TakeLines(std::unique_lock<std::mutex>& lock);
  void Listen(bool on);
  void ReadAhead(std::unique_lock<std::mutex>& lock);
  void Loop();

  RequestQueue& queue_;
  const Events events_;
  base::UniqueFd input_;
  const int stop_fd_;
  const std::optional<std::chrono::milliseconds> idle_limit_;
  const RunOptions defaults_;
  std::optional<Clock::time_point> waiting_since_;  // the first Arrives before Next
  bool idled_ = false;

  base::UniqueFd epoll_;    // of the thread: `input_` while it reads ahead, and `wake_`
  const base::Event wake_;  // the thread looks again at what it is to do
  bool pollable_ = true;    // false: a file, which is always ready

  // Guards all below, and reading from `input_`.
  std::mutex mutex_;
  LineReader lines_;
  bool ended_ = false;    // there is nothing more to read
  bool stopped_ = false;  // by a stop or the idle limit
  bool ahead_ = false;    // the thread may read
  bool ticking_ = false;  // a request with `progress` is under way
  bool quit_ = false;
  std::exception_ptr failed_;  // of the thread: for Next
  std::thread thread_;
};

}  // namespace cppool::protocol
