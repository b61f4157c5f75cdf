#include "client/command/interruption.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>

namespace cppool::command {
namespace {

constexpr std::chrono::seconds kLastWords{2};

[[noreturn]] void End(int signal) {
  kill(getpid(), signal);
  _exit(128 + signal);  // the first process of a container ignores the signal
}

}  // namespace

Interruption::Interruption(std::function<void(int)> last_words, std::function<void()> where) {
  sigemptyset(&signals_);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction action;
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN)
      sigaddset(&signals_, signal);  // an ignored signal that is blocked would still arrive
  }
  arrived_ = signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK);
  if (arrived_ < 0) throw std::system_error(errno, std::generic_category(), "signalfd");
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  thread_ = std::thread(
      [this, last_words = std::move(last_words), where = std::move(where)] { Wait(last_words, where); });
}

Interruption::~Interruption() {
  over_.Set();
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  close(arrived_);
}

void Interruption::Wait(const std::function<void(int)>& last_words,
                        const std::function<void()>& where) const {
  signalfd_siginfo signal;
  while (true) {
    pollfd fds[2] = {{arrived_, POLLIN, 0}, {over_.fd(), POLLIN, 0}};
    if (poll(fds, 2, -1) > 0 && fds[1].revents != 0) return;
    if (read(arrived_, &signal, sizeof signal) != sizeof signal) continue;
    if (signal.ssi_signo != SIGQUIT) break;
    where();
  }
  const int number = static_cast<int>(signal.ssi_signo);
  pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);  // a second one is delivered here
  std::thread([number] {                             // the words may block, on a pipe that nobody reads
    std::this_thread::sleep_for(kLastWords);
    End(number);
  })
      .detach();
  last_words(number);
  End(number);
}

}  // namespace cppool::command
