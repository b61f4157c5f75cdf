#include "protocol/request_reader.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/poll_timeout.h"

namespace cppool::protocol {
namespace {

// An empty line is no request.
bool IsEmpty(const LineReader::Line& line) {
  return !line.overlong && line.text.find_first_not_of(" \t\r") == std::string::npos;
}

}  // namespace

RequestReader::RequestReader(base::UniqueFd input, int stop_fd, RequestQueue& queue, Events events,
                             std::optional<std::chrono::milliseconds> idle_limit, RunOptions defaults)
    : queue_(queue),
      events_(std::move(events)),
      input_(std::move(input)),
      stop_fd_(stop_fd),
      idle_limit_(idle_limit),
      defaults_(std::move(defaults)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      lines_(kMaxRequestBytes) {
  epoll_event event{EPOLLIN, {.fd = wake_.fd()}};
  if (!epoll_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.fd(), &event) != 0)
    throw std::system_error(errno, std::generic_category(), "epoll");
  event = {EPOLLONESHOT, {.fd = input_.get()}};
  pollable_ = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, input_.get(), &event) == 0;
  thread_ = std::thread([this] { Loop(); });
  pthread_setname_np(thread_.native_handle(), "requests");
}

RequestReader::~RequestReader() {
  {
    const std::lock_guard lock(mutex_);
    quit_ = true;
    ahead_ = false;
  }
  wake_.Set();
  thread_.join();
}

RequestQueue::Entry RequestReader::Next() {
  std::optional<Clock::time_point> idle_until;
  if (idle_limit_) idle_until = waiting_since_.value_or(Clock::now()) + *idle_limit_;
  waiting_since_.reset();
  std::unique_lock lock(mutex_);
  Listen(false);
  while (true) {
    TakeLines(lock);
    if (auto request = queue_.Pop()) {
      TakeLines(lock);  // there is room for another one
      while (!pollable_ && HasRoom()) Read(), TakeLines(lock);
      ticking_ = request->run() && request->run()->progress;
      if (ticking_) wake_.Set();
      if (request->MayTakeLong()) Listen(true);
      return request;
    }
    if (failed_) std::rethrow_exception(failed_);
    if (ended_) return nullptr;
    const bool begun = lines_.buffered() > 0;  // a line that has begun is not idleness
    lock.unlock();
    const Waited waited = WaitForInput(begun ? std::nullopt : idle_until);
    lock.lock();
    if (waited == Waited::kInput) {
      Read();
    } else {
      ended_ = stopped_ = true;  // a part of a line is not a request
      idled_ = waited == Waited::kIdle;
    }
  }
}

bool RequestReader::Arrives(std::chrono::milliseconds within) {
  {
    const std::lock_guard lock(mutex_);
    Listen(false);
    if (ended_ || failed_ || lines_.buffered() > 0 || queue_.waiting() > 0) return true;
  }
  if (!waiting_since_) waiting_since_ = Clock::now();
  pollfd fds[2] = {{input_.get(), POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  return poll(fds, 2, static_cast<int>(within.count())) != 0;
}

RequestReader::Waited RequestReader::WaitForInput(std::optional<Clock::time_point> idle_until) {
  while (true) {
    pollfd fds[2] = {{input_.get(), POLLIN, 0}, {stop_fd_, POLLIN, 0}};  // a negative descriptor is ignored
    const int ready = poll(fds, 2, idle_until ? base::PollTimeout(*idle_until) : -1);
    if (ready < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "poll");
    if (ready == 0) return Waited::kIdle;
    if (ready > 0) return fds[1].revents ? Waited::kStop : Waited::kInput;
  }
}

// Under `mutex_`, as the next ones.
void RequestReader::Read() {
  char bytes[64 * 1024];
  const ssize_t count = read(input_.get(), bytes, sizeof(bytes));
  if (count < 0 && errno != EINTR && errno != EAGAIN)
    throw std::system_error(errno, std::generic_category(), "stdin cannot be read");
  if (count == 0) ended_ = true;
  if (count > 0) lines_.Append(std::string_view(bytes, static_cast<std::size_t>(count)));
}

bool RequestReader::HasRoom() const { return !ended_ && queue_.waiting() < RequestQueue::kMost; }

// Without the lock while a request is answered that overtakes: the other thread may take the lines after it.
void RequestReader::TakeLines(std::unique_lock<std::mutex>& lock) {
  while (queue_.waiting() < RequestQueue::kMost) {
    auto line = lines_.Next();
    if (!line && ended_ && !stopped_) line = lines_.Finish();
    if (!line) return;
    if (IsEmpty(*line)) continue;
    const auto request = std::make_shared<IncomingRequest>(*line, defaults_);
    if (!request->Overtakes()) {
      queue_.Push(request);
      continue;
    }
    lock.unlock();
    events_.overtaken(*request);
    lock.lock();
  }
}

// Whether the thread reads. Where nothing comes meanwhile it does not wake up.
void RequestReader::Listen(bool on) {
  if (!on) ticking_ = false;
  on = on && pollable_ && HasRoom();
  if (on == std::exchange(ahead_, on) && !on) return;
  epoll_event event{EPOLLONESHOT | (on ? EPOLLIN : 0u), {.fd = input_.get()}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, input_.get(), &event);
}

void RequestReader::Loop() {
  std::unique_lock lock(mutex_);
  auto tick_at = Clock::time_point::max();
  try {
    while (!quit_) {
      if (!ticking_) tick_at = Clock::time_point::max();
      if (ticking_ && tick_at == Clock::time_point::max()) tick_at = Clock::now() + events_.tick_time;
      lock.unlock();
      epoll_event event;
      const bool idle = tick_at == Clock::time_point::max();
      epoll_wait(epoll_.get(), &event, 1, idle ? -1 : base::PollTimeout(tick_at));
      wake_.Clear();
      if (Clock::now() >= tick_at) {
        events_.tick();
        tick_at = Clock::now() + events_.tick_time;
      }
      lock.lock();
      ReadAhead(lock);
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    failed_ = std::current_exception();
  }
}

void RequestReader::ReadAhead(std::unique_lock<std::mutex>& lock) {
  while (ahead_) {
    pollfd input = {input_.get(), POLLIN, 0};  // the main thread may have read what the event was for
    if (poll(&input, 1, 0) <= 0) return Listen(true);
    Read();
    TakeLines(lock);
    if (ahead_ && !HasRoom()) ahead_ = false;
  }
}

}  // namespace cppool::protocol
