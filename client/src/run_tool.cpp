#include "client/src/run_tool.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <system_error>

#include <cppool/compile.h>
#include "base/poll_timeout.h"
#include "client/src/process.h"

namespace cppool::client {
namespace {

constexpr std::size_t kMostOutput = 1 << 20;
constexpr std::chrono::milliseconds kAskAgain{100};     // whether the call is interrupted
constexpr std::chrono::milliseconds kWithoutPidfd{10};  // between two looks at whether the program has ended

// Its stdin is a socket to the caller, which ends when the caller does: then the group gets SIGTERM, on which
// compilers remove their temporary files, and SIGKILL. The program's exit code is written to that socket.
constexpr const char* kScript = R"(exec 3<&0 </dev/null
folder=$1
shift
{ read -r end <&3; trap '' TERM; kill -TERM 0; rm -rf -- "$folder"; sleep 1; kill -KILL 0; } >/dev/null 2>&1 &
"$@" 3<&-
echo $? >&3
)";

// Appends what can be read without waiting, up to what a pipe holds: somebody may write for ever. Closed at
// its end.
void Drain(pollfd* fd, std::string* text) {
  char buffer[1 << 16];
  const ssize_t count = fd->fd >= 0 ? read(fd->fd, buffer, sizeof buffer) : -1;
  if (count == 0) fd->fd = -1;
  if (count > 0 && text->size() < kMostOutput) text->append(buffer, static_cast<std::size_t>(count));
}

}  // namespace

ToolEnd RunTool(const std::vector<std::string>& words, const std::string& folder,
                std::chrono::milliseconds limit, const std::function<bool()>& interrupted) {
  std::vector<std::string> arguments = {"-c", kScript, "sh", folder};
  arguments.insert(arguments.end(), words.begin(), words.end());
  std::unique_ptr<Process> process;
  try {
    using Words = std::vector<std::string>;
    process = Process::Spawn({"/bin/sh", arguments, folder.empty() ? Words{} : Words{"TMPDIR=" + folder}});
  } catch (const std::system_error& error) {
    throw CompileError(words[0] + ": cannot be started: " + error.what());
  }
  const base::UniqueFd errors = process->TakeErrors();
  const auto until = Clock::now() + limit;
  ToolEnd end;
  pollfd fds[3] = {{process->output(), POLLIN, 0}, {errors.get(), POLLIN, 0}, {process->pidfd(), POLLIN, 0}};
  for (;;) {
    const bool ended = process->Ended();
    Drain(&fds[0], &end.output);
    Drain(&fds[1], &end.output);
    if (ended) break;
    if (Clock::now() >= until)
      throw CompileError(words[0] + " did not end within " + std::to_string(limit.count() / 1000) +
                         " s and was killed");
    if (interrupted && interrupted())
      throw CompileError(words[0] + " was killed, since the call was interrupted");
    auto next = until;
    if (interrupted) next = std::min(next, Clock::now() + kAskAgain);
    if (process->pidfd() < 0) next = std::min(next, Clock::now() + kWithoutPidfd);
    poll(fds, 3, base::PollTimeout(next));  // interrupted or not: the loop checks
  }
  char status[16] = "";
  if (recv(process->input(), status, sizeof status - 1, MSG_DONTWAIT) <= 0) {
    end.how = process->DescribeEnd();
    return end;
  }
  const int code = std::atoi(status);
  const char* const signal = code > 128 ? sigdescr_np(code - 128) : nullptr;  // as shells have it
  end.well = code == 0;
  end.how = signal != nullptr ? "was killed by signal " + std::to_string(code - 128) + " (" + signal + ")"
                              : "exited with code " + std::to_string(code);
  return end;
}

}  // namespace cppool::client
