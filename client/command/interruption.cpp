#include "interruption.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>

namespace cppool::command {
namespace {

constexpr std::chrono::seconds kLastWords{2};

std::atomic<int> to_thread = -1;  // the handler's end of the pipe

[[noreturn]] void End(int signal) {
  kill(getpid(), signal);
  _exit(128 + signal);  // of a container's first process the signal is ignored
}

void Tell(int signal) {
  const int error = errno;
  const auto number = static_cast<unsigned char>(signal);
  [[maybe_unused]] const ssize_t sent = write(to_thread, &number, 1);
  errno = error;
}

}  // namespace

Interruption::Interruption(std::function<void(int)> last_words) {
  if (pipe2(pipe_, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
  to_thread = pipe_[1];
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
  thread_ = std::thread([this, last_words = std::move(last_words)] { Wait(last_words); });
  SetHandlers(Tell);
}

void Interruption::SetHandlers(void (*handler)(int)) const {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
}

Interruption::~Interruption() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  Tell(0);
  thread_.join();
  to_thread = -1;
  close(pipe_[0]);
  close(pipe_[1]);
}

void Interruption::Wait(const std::function<void(int)>& last_words) const {
  unsigned char number = 0;
  while (read(pipe_[0], &number, 1) < 0 && errno == EINTR) {
  }
  if (number == 0) return;
  SetHandlers(SIG_DFL);
  std::thread([number] {  // nobody may take the words
    std::this_thread::sleep_for(kLastWords);
    End(number);
  })
      .detach();
  last_words(number);
  End(number);
}

}  // namespace cppool::command
