#include "scripted_process.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "process.h"
#include "property.h"
#include "stderr_tail.h"

namespace cppool::fuzz {
namespace {

std::string_view output;

internal::UniqueFd Owned(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return internal::UniqueFd(fd);
}

}  // namespace

void SetOutput(std::string_view bytes) { output = bytes; }

}  // namespace cppool::fuzz

namespace cppool::internal {

int PollTimeout(Clock::time_point) { return 1000; }  // a file is readable at once, and so is its end

// The requests go to a socket that holds them: they are small.
std::unique_ptr<Process> Process::Spawn(const Command&) {
  std::unique_ptr<Process> process(new Process());
  process->output_ = fuzz::Owned(memfd_create("stdout", MFD_CLOEXEC), "memfd_create");
  for (std::string_view rest = fuzz::output; !rest.empty();) {
    const ssize_t count = write(process->output(), rest.data(), rest.size());
    if (count < 0) throw std::system_error(errno, std::generic_category(), "write");
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
  lseek(process->output(), 0, SEEK_SET);
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0)
    throw std::system_error(errno, std::generic_category(), "socketpair");
  process->input_ = UniqueFd(fds[0]);
  process->errors_ = UniqueFd(fds[1]);  // the other end, kept open for as long
  process->pid_ = 1;
  return process;
}

Process::~Process() = default;
void Process::CloseInput() { input_.Reset(); }
bool Process::Ended() { return false; }  // nobody looks but at its output
bool Process::WaitEnd(Clock::time_point) { return true; }
bool Process::Terminate(std::chrono::milliseconds, std::chrono::milliseconds) { return true; }
std::string Process::DescribeEnd() { return "ended"; }
void Process::Abandon() {}

StderrTail::StderrTail(UniqueFd fd, std::function<void(std::string_view)>) : fd_(std::move(fd)) {}
StderrTail::~StderrTail() = default;
void StderrTail::CatchUp(Clock::time_point) {}
std::string StderrTail::Text() const { return ""; }
void StderrTail::Abandon() {}

}  // namespace cppool::internal
