#include "stderr_tail.h"

#include <poll.h>
#include <signal.h>

#include <cerrno>

#include "protocol/framing.h"

namespace cppool::internal {
namespace {

constexpr std::size_t kLineLimit = 4096;

}  // namespace

StderrTail::StderrTail(UniqueFd fd, std::function<void(std::string_view)> on_line)
    : fd_(std::move(fd)), on_line_(std::move(on_line)) {
  MakePipe(&wake_read_, &wake_write_);
  // The harness's signals are for its own threads.
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
  wake_write_.Reset();
  thread_.join();  // it waits for nothing but the two descriptors, and for on_line
}

void StderrTail::Read() {
  protocol::LineReader reader(kLineLimit);
  char buffer[16384];
  for (bool open = true; open;) {
    pollfd fds[2] = {{fd_.get(), POLLIN, 0}, {wake_read_.get(), POLLIN, 0}};
    poll(fds, 2, -1);  // for as long as the daemon lives: the destructor wakes it
    if (fds[1].revents != 0) break;
    if (fds[0].revents == 0) continue;
    ssize_t count = read(fd_.get(), buffer, sizeof buffer);
    if (count > 0) reader.Append({buffer, static_cast<std::size_t>(count)});
    open = count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
    while (auto line = reader.Next()) Keep(std::move(line->text));
  }
  if (auto line = reader.Finish()) Keep(std::move(line->text));
  std::lock_guard lock(mutex_);
  ended_ = true;
  ended_changed_.notify_all();
}

void StderrTail::Keep(std::string line) {
  if (on_line_) {
    try {
      on_line_(line);
    } catch (...) {  // there is nobody to tell
    }
  }
  std::lock_guard lock(mutex_);
  lines_.push_back(std::move(line));
  if (lines_.size() > kTailLines) lines_.pop_front();
}

void StderrTail::WaitEnd(Clock::time_point until) const {
  std::unique_lock lock(mutex_);
  ended_changed_.wait_until(lock, until, [this] { return ended_; });
}

std::string StderrTail::Text() const {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    for (const std::string& line : lines_) text += line + "\n";
  }
  if (text.size() <= kTailCharacters) return text;
  std::size_t start = text.size() - kTailCharacters;
  while (start < text.size() && (text[start] & 0xC0) == 0x80)
    ++start;  // not in the middle of a UTF-8 character
  return text.substr(start);
}

void StderrTail::Abandon() {
  for (UniqueFd* fd : {&fd_, &wake_read_, &wake_write_}) fd->ResetInherited();
}

}  // namespace cppool::internal
