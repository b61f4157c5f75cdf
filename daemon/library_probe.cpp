#include "daemon/library_probe.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>
#include <thread>

#include "base/poll_timeout.h"
#include "base/spawn.h"
#include "base/stdout_channel.h"
#include "base/unique_fd.h"
#include "daemon/case_registry.h"
#include "daemon/crash_reporter.h"
#include "daemon/library.h"
#include "daemon/start_error.h"
#include "protocol/crash.h"

namespace cppool::daemon {
namespace {

using Clock = std::chrono::steady_clock;
using base::UniqueFd;

// The process writes one line to its stdout: one of these, or that of a crash (protocol/crash.h).
constexpr const char* kGood = "good\n";
constexpr const char* kBad = "bad ";  // and the error's text

constexpr std::chrono::seconds kKillLimit{1};
constexpr std::size_t kMostOutput = 64 << 10;

const char* NameOf(LibraryKind kind) { return kind == LibraryKind::kKernels ? "kernels" : "cases"; }

// A process that is killed with its object, unless it has been waited for.
class Child {
 public:
  // Throws LibraryError.
  Child(const std::string& program, const std::vector<std::string>& arguments, const std::string& path) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) != 0) Fail(path, errno);
    output_ = UniqueFd(fds[0]);
    const UniqueFd theirs(fds[1]), nothing(open("/dev/null", O_RDONLY | O_CLOEXEC));
    try {
      // In the daemon's group: what it starts ends with the daemon.
      pid_ = base::Spawn({program, arguments, {}, false}, nothing.get(), theirs.get(), STDERR_FILENO);
    } catch (const std::system_error& error) {
      Fail(path, error.code().value());
    }
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    Wait(Clock::now() + kKillLimit);  // one that cannot be killed is left behind
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // All that it writes to its stdout until it closes it, or kGood; nothing when there is more to come at
  // `until`.
  std::optional<std::string> ReadAll(Clock::time_point until) {
    std::string text;
    for (;;) {
      pollfd fd{output_.get(), POLLIN, 0};
      const int ready = poll(&fd, 1, base::PollTimeout(until));
      if (ready == 0) return std::nullopt;
      char buffer[4096];
      const ssize_t count = ready < 0 ? -1 : read(output_.get(), buffer, sizeof(buffer));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return text;
      if (text.size() < kMostOutput) text.append(buffer, static_cast<std::size_t>(count));
      if (text == kGood) return text;  // a child of its own may hold the pipe
    }
  }

  // Its wait status; nothing when it has not ended by `until`.
  std::optional<int> Wait(Clock::time_point until) {
    for (;;) {
      int status = 0;
      const pid_t ended = waitpid(pid_, &status, WNOHANG);
      if (ended < 0 && errno == EINTR) continue;
      if (ended != 0) {
        pid_ = -1;
        return ended < 0 ? 0 : status;
      }
      if (Clock::now() >= until) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  [[noreturn]] static void Fail(const std::string& path, int error) {
    throw LibraryError(path + ": the process that tries libraries could not be started: " + strerror(error));
  }

  pid_t pid_ = -1;
  UniqueFd output_;
};

std::string DescribeStatus(int status) {
  if (WIFEXITED(status)) return "ended its process with exit code " + std::to_string(WEXITSTATUS(status));
  if (!WIFSIGNALED(status)) return "ended its process";
  const char* name = sigdescr_np(WTERMSIG(status));
  return "was ended by signal " + std::to_string(WTERMSIG(status)) +
         (name ? " (" + std::string(name) + ")" : "");
}

std::string Seconds(Clock::duration time) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  return std::to_string(ms / 1000) + "." + std::to_string(ms % 1000 / 100) + " s";
}

}  // namespace

std::optional<kernels::KernelLibrary> CheckTable(LibraryKind kind, void* library, const std::string& path) {
  if (kind == LibraryKind::kKernels) return kernels::KernelLibrary(library, path);
  try {
    CaseRegistry().AddLibrary(library, path, path);
    return std::nullopt;
  } catch (const StartError& error) {
    throw LibraryError(error.what());
  }
}

void ProbeLibrary(const std::string& program, LibraryKind kind, const std::string& file,
                  const std::string& path, std::chrono::milliseconds limit, Clock::time_point until) {
  const std::string when = path + ": when it was opened to try it, before the daemon loads it, it ";
  const auto start = Clock::now();
  const bool is_cut = until - start < limit;
  if (!is_cut) until = start + limit;
  if (until <= start)
    throw LibraryError(path +
                       ": there is no time to try it before the daemon loads it, since the request's "
                       "deadline is near: choose a longer deadline");
  Child child(program, {kProbeOption, NameOf(kind), file, path}, path);
  const auto verdict = child.ReadAll(until);
  if (!verdict)
    throw LibraryError(when + "did not return within " + Seconds(Clock::now() - start) +
                       (is_cut
                            ? ", since the request's deadline is near: choose a longer deadline, or look at"
                            : ": look at") +
                       " what its constructors and its table's function wait for");
  if (*verdict == kGood) return;
  if (verdict->starts_with(kBad)) throw LibraryError(verdict->substr(strlen(kBad)));
  if (const auto crash = protocol::ParseCrash(std::string_view(*verdict).substr(0, verdict->find('\n'))))
    throw LibraryError(when + crash->error);
  const auto status = child.Wait(std::max(until, Clock::now() + kKillLimit));
  throw LibraryError(when + (status ? DescribeStatus(*status) : "closed the stdout of its process"));
}

int RunProbe(const std::string& kind, const std::string& file, const std::string& path) {
  // The daemon's main thread, which waits for this, lives as long as the daemon.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  base::StdoutChannel verdict = base::StdoutChannel::TakeStdout();
  const CrashReporter reporter([&](std::string_view line) { verdict.Write(line); }, {});
  std::string text = kGood;
  try {
    const LibraryKind kinds[] = {LibraryKind::kCases, LibraryKind::kKernels};
    const auto known = std::ranges::find_if(kinds, [&](LibraryKind one) { return kind == NameOf(one); });
    if (known == std::end(kinds)) throw LibraryError("unknown kind of library " + kind);
    CheckTable(*known, OpenLibrary(file, path), path);
  } catch (const std::exception& error) {
    text = kBad + std::string(error.what());
  } catch (...) {
    text = kBad + path + ": its constructors or its table's function threw something";
  }
  verdict.Write(text);
  _exit(0);  // without destructors of the library
}

}  // namespace cppool::daemon
