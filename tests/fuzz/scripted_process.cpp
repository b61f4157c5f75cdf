#include "tests/fuzz/scripted_process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include "client/src/process.h"
#include "client/src/stderr_tail.h"
#include "tests/fuzz/property.h"

namespace cppool::fuzz {
namespace {

std::string_view answers[2];
std::thread responder;  // there is at most one process at a time

base::UniqueFd Owned(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return base::UniqueFd(fd);
}

}  // namespace

void SetAnswers(std::string_view first, std::string_view second) {
  answers[0] = first;
  answers[1] = second;
}

}  // namespace cppool::fuzz

namespace cppool::client {

void MakePipe(base::UniqueFd*, base::UniqueFd*) {}  // of connections to servers, of which there are none

namespace {

// Writes one answer after each request, since a client ignores an answer that arrives before its request.
// Returns when either side closes.
void Respond(base::UniqueFd requests, base::UniqueFd output) {
  for (std::string_view answer : fuzz::answers) {
    for (char last = 0; last != '\n';) {
      char buffer[4096];
      const ssize_t count = read(requests.get(), buffer, sizeof(buffer));
      if (count <= 0) return;
      last = buffer[count - 1];  // there is at most one request at a time
    }
    while (!answer.empty()) {
      const ssize_t count = send(output.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
      if (count < 0) return;
      answer.remove_prefix(static_cast<std::size_t>(count));
    }
  }
}

std::pair<base::UniqueFd, base::UniqueFd> Sockets() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0)
    throw std::system_error(errno, std::generic_category(), "socketpair");
  return {base::UniqueFd(fds[0]), base::UniqueFd(fds[1])};
}

}  // namespace

std::unique_ptr<Process> Process::Spawn(const base::SpawnCommand&) {
  std::unique_ptr<Process> process(new Process());
  auto [input, requests] = Sockets();
  auto [output, answers] = Sockets();
  process->errors_ = fuzz::Owned(memfd_create("stderr", MFD_CLOEXEC), "memfd_create");
  process->input_ = std::move(input);
  process->output_ = std::move(output);
  fcntl(process->output(), F_SETFL, O_NONBLOCK);
  fuzz::responder = std::thread(Respond, std::move(requests), std::move(answers));
  process->pid_ = 1;
  return process;
}

Process::~Process() {
  input_.Reset();
  output_.Reset();
  if (fuzz::responder.joinable()) fuzz::responder.join();
}
void Process::CloseInput() { input_.Reset(); }
bool Process::Ended() { return false; }  // the end of the process is seen only as the end of its output
bool Process::WaitEnd(Clock::time_point) { return true; }
bool Process::Terminate(std::chrono::milliseconds, std::chrono::milliseconds) { return true; }
bool Process::EndedInOrder() { return false; }
bool Process::EndIsUnknown() { return false; }
std::string Process::DescribeEnd() { return "ended"; }
void Process::Abandon() {}

// NOLINTNEXTLINE(performance-unnecessary-value-param): the real signature
StderrTail::StderrTail(base::UniqueFd fd, std::function<void(std::string_view)>) : fd_(std::move(fd)) {}
StderrTail::~StderrTail() = default;
void StderrTail::CatchUp(Clock::time_point) {}
std::string StderrTail::Text() const { return ""; }
std::optional<StartFailure> StderrTail::StartFailure() const { return std::nullopt; }
void StderrTail::ForgetStart() {}
std::optional<Crash> StderrTail::Crash() const { return std::nullopt; }
void StderrTail::Abandon() {}

}  // namespace cppool::client
