#include "client/src/stderr_tail.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>

#include "protocol/framing.h"

namespace cppool::client {
namespace {

constexpr std::size_t kLineLimit = 4096;  // on_line gets no more of a line
constexpr std::size_t kKept =
    2 * kTailCharacters;  // enough is left without start lines and the '\r' of "\r\n"

std::string Without(std::string_view prefix, std::string_view text) {
  std::string rest;
  while (!text.empty()) {
    const std::size_t length = std::min(text.find('\n'), text.size() - 1) + 1;
    const std::string_view line = text.substr(0, length);
    if (!line.starts_with(prefix)) rest += line;
    text.remove_prefix(length);
  }
  return rest;
}

}  // namespace

StderrTail::StderrTail(base::UniqueFd fd, std::function<void(std::string_view)> on_line)
    : fd_(std::move(fd)), on_line_(std::move(on_line)) {
  MakePipe(&wake_read_, &wake_write_);
  // Signals of the harness must be handled by its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { Read(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

StderrTail::~StderrTail() {
  ending_ = true;
  wake_write_.Reset();
  thread_.join();  // the thread waits only for the two descriptors and for at most two calls of on_line
}

void StderrTail::Read() {
  protocol::LineReader lines(kLineLimit);
  char buffer[65536];
  bool asked = false;  // to catch up
  ssize_t behind = 0;  // bytes to read until it has
  for (bool open = true; open;) {
    pollfd fds[2] = {{fd_.get(), POLLIN, 0}, {wake_read_.get(), POLLIN, 0}};
    // Without a limit: other threads wake it through the pipe.
    if (poll(fds, 2, -1) < 0) continue;
    if (fds[1].revents != 0) {
      if (read(wake_read_.get(), buffer, 1) == 0) break;
      int waiting = 0;
      ioctl(fd_.get(), FIONREAD, &waiting);
      behind = waiting;
      asked = true;
    } else {
      const ssize_t count = read(fd_.get(), buffer, sizeof buffer);
      open = count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
      if (count > 0) {
        Keep({buffer, static_cast<std::size_t>(count)});
        lines.Append({buffer, static_cast<std::size_t>(count)});
        while (auto line = ending_ ? std::nullopt : lines.Next()) TakeLine(line->text);
        behind -= std::min(behind, count);
      }
    }
    if (!asked || behind > 0) continue;
    asked = false;
    std::lock_guard lock(mutex_);
    catching_up_ = false;
    caught_up_.notify_all();
  }
  if (auto line = lines.Finish()) TakeLine(line->text);
  std::lock_guard lock(mutex_);
  ended_ = true;
  caught_up_.notify_all();
}

void StderrTail::TakeLine(std::string_view line) {
  if (starting_) {
    if (auto failure = protocol::ParseStart(line)) {
      std::lock_guard lock(mutex_);
      if (starting_) start_failure_ = std::move(failure);
    }
  }
  if (auto crash = protocol::ParseCrash(line)) {
    std::lock_guard lock(mutex_);
    crash_ = std::move(crash);
  }
  if (!on_line_) return;
  try {
    on_line_(line);
  } catch (...) {  // dropped, as pool.h says
  }
}

void StderrTail::Keep(std::string_view bytes) {
  if (bytes.size() > kKept) bytes.remove_prefix(bytes.size() - kKept);
  std::lock_guard lock(mutex_);
  kept_ += bytes;
  if (kept_.size() > 16 * kKept) kept_.erase(0, kept_.size() - kKept);
}

void StderrTail::CatchUp(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  if (ended_) return;
  catching_up_ = true;
  if (write(wake_write_.get(), "c", 1) != 1) return;
  caught_up_.wait_until(lock, until, [this] { return ended_ || !catching_up_; });
}

std::optional<StartFailure> StderrTail::StartFailure() const {
  std::lock_guard lock(mutex_);
  return start_failure_;
}

void StderrTail::ForgetStart() {
  std::lock_guard lock(mutex_);
  starting_ = false;
  start_failure_.reset();
}

std::optional<Crash> StderrTail::Crash() const {
  std::lock_guard lock(mutex_);
  return crash_;
}

std::string StderrTail::Text() const {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    text = start_failure_ ? Without(protocol::kStartPrefix, kept_) : kept_;
    if (crash_) text = Without(protocol::kCrashPrefix, text);
  }
  for (std::size_t end = text.find("\r\n"); end != std::string::npos; end = text.find("\r\n", end))
    text.erase(end, 1);
  if (!text.empty() && text.back() != '\n') text += '\n';
  std::size_t start = text.size() - std::min(text.size(), kTailCharacters);
  std::size_t line = text.size();  // where the last lines begin
  for (std::size_t i = 0; i < kTailLines && line > start; ++i) {
    line = line < 2 ? std::string::npos : text.rfind('\n', line - 2);
    line = line == std::string::npos ? 0 : line + 1;
  }
  start = std::max(start, line);
  while (start < text.size() && (text[start] & 0xC0) == 0x80)
    ++start;  // not in the middle of a UTF-8 character
  return text.substr(start);
}

void StderrTail::Abandon() {
  for (base::UniqueFd* fd : {&fd_, &wake_read_, &wake_write_}) fd->ResetInherited();
}

}  // namespace cppool::client
