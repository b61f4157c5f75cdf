#include "daemon/rank_output.h"

#include <poll.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <ext/stdio_sync_filebuf.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/stdout_channel.h"

namespace cppool::daemon {
namespace {

constexpr std::string_view kThreadName = "rank ";
constexpr std::string_view kLabel = "[rank ";
// The longest line without label and newline: with both it is at most PIPE_BUF, which a pipe that polls as
// ready takes without blocking.
constexpr std::size_t kLongest = 4096 - 16;

// What a thread of a rank writes to one descriptor.
class LabelledOutput {
 public:
  LabelledOutput(int fd, int rank) : fd_(fd), label_("[rank " + std::to_string(rank) + "] ") {
    line_.reserve(label_.size() + kLongest + 1);  // no call below needs memory: EndLine may run after a crash
    line_ = label_;
  }

  int fd() const { return fd_; }
  bool has_begun_line() const { return line_.size() > label_.size(); }

  // False: something could not be written.
  bool Add(std::string_view text) {
    bool written = true;
    while (!text.empty()) {
      const std::size_t room = label_.size() + kLongest - line_.size();
      const std::size_t count = std::min({text.find('\n'), text.size(), room});
      line_ += text.substr(0, count);
      text.remove_prefix(count);
      if (text.empty()) break;
      if (text.front() == '\n') text.remove_prefix(1);
      written = EndLine() && written;
    }
    return written;
  }

  bool EndLine() {
    line_ += '\n';
    std::string_view line = line_;
    if (line.substr(label_.size()).starts_with(kLabel)) line.remove_prefix(label_.size());
    const bool written = base::WriteAll(fd_, line);
    line_.resize(label_.size());
    return written;
  }

 private:
  const int fd_;
  const std::string label_;
  std::string line_;  // the one that was begun, after its label
};

// A thread of a rank that has written something.
struct RankThread {
  explicit RankThread(int its_rank)
      : rank(its_rank), outputs{LabelledOutput(STDOUT_FILENO, rank), LabelledOutput(STDERR_FILENO, rank)} {}
  const int rank;
  std::array<LabelledOutput, 2> outputs;
};

// Held while a line is written, so that it is in one piece, however long it is.
std::mutex mutex;
// Under `mutex`. Never destroyed: threads may write until the process ends.
auto& threads = *new std::set<RankThread*>;
// The RankThread of each thread. A key's destructor runs after those of thread_local objects, which may
// write, too.
pthread_key_t this_thread;

void EndThread(void* ended) {
  const std::unique_ptr<RankThread> thread(static_cast<RankThread*>(ended));
  const std::lock_guard lock(mutex);
  threads.erase(thread.get());
  for (LabelledOutput& output : thread->outputs)
    if (output.has_begun_line()) output.EndLine();
}

std::optional<int> RankOfThisThread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  if (!std::string_view(name).starts_with(kThreadName)) return std::nullopt;
  int rank = 0;
  const auto [end, error] = std::from_chars(name + kThreadName.size(), name + std::strlen(name), rank);
  if (error != std::errc() || (*end != '\0' && *end != ' ')) return std::nullopt;
  return rank;
}

// NULL: the thread belongs to no rank, or there is no memory.
RankThread* ThisRankThread() try {
  if (void* known = pthread_getspecific(this_thread)) return static_cast<RankThread*>(known);
  const auto rank = RankOfThisThread();
  if (!rank) return nullptr;
  auto thread = std::make_unique<RankThread>(*rank);
  const std::lock_guard lock(mutex);
  threads.insert(thread.get());
  pthread_setspecific(this_thread, thread.get());
  return thread.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

// The write function of a stream, on the thread that writes. 0: an error.
ssize_t Write(void* cookie, const char* data, std::size_t size) {
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(cookie));
  RankThread* const thread = ThisRankThread();
  if (!thread) return base::WriteAll(fd, {data, size}) ? static_cast<ssize_t>(size) : 0;
  const std::lock_guard lock(mutex);
  return thread->outputs[fd == STDERR_FILENO].Add({data, size}) ? static_cast<ssize_t>(size) : 0;
}

std::FILE* OpenStream(int fd) {
  void* const cookie = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  std::FILE* const stream = fopencookie(cookie, "w", {nullptr, Write, nullptr, nullptr});
  if (!stream) throw std::bad_alloc();
  std::setvbuf(stream, nullptr, _IONBF, 0);
#ifdef __GLIBC__
  // fileno(), which std::ios::sync_with_stdio(false) uses, needs the one, and freopen() would follow the
  // other to nowhere.
  stream->_fileno = fd;
  stream->_wide_data = nullptr;
#endif
  return stream;
}

}  // namespace

void LabelRankOutput() {
  std::FILE* const out = OpenStream(STDOUT_FILENO);
  std::FILE* const err = OpenStream(STDERR_FILENO);
  if (pthread_key_create(&this_thread, EndThread) != 0) throw std::bad_alloc();
  // The lock may be held by a thread that a child does not have. To wait for it before the fork could
  // deadlock with fflush(NULL).
  pthread_atfork(nullptr, nullptr, [] { new (&mutex) std::mutex; });
  std::fflush(stdout);
  stdout = out;  // variables, says glibc's manual
  stderr = err;
  using Buffer = __gnu_cxx::stdio_sync_filebuf<char>;
  std::cout.rdbuf(new Buffer(out));  // until the process ends, as the streams
  std::cerr.rdbuf(new Buffer(err));
  std::clog.rdbuf(std::cerr.rdbuf());
}

void EndLines(int rank) {
  const std::lock_guard lock(mutex);
  for (RankThread* thread : threads) {
    for (LabelledOutput& output : thread->outputs)
      if (thread->rank == rank && output.has_begun_line()) output.EndLine();
  }
}

void EndAllLines() {
  bool locked = false;
  // A thread may have crashed with the lock, or wait for the reader.
  for (int tries = 0; tries < 100 && !(locked = mutex.try_lock()); ++tries) {
    const timespec pause{0, 100'000};
    nanosleep(&pause, nullptr);
  }
  if (!locked) return;
  const std::lock_guard lock(mutex, std::adopt_lock);
  for (RankThread* thread : threads) {
    for (LabelledOutput& output : thread->outputs) {
      pollfd ready{output.fd(), POLLOUT, 0};
      if (output.has_begun_line() && poll(&ready, 1, 0) > 0 && (ready.revents & POLLOUT) != 0)
        output.EndLine();
    }
  }
}

}  // namespace cppool::daemon
