#include "daemon/crash_reporter.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <setjmp.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "daemon/stack_sampler.h"
#include "kernels/signal_stack.h"
#include "protocol/crash.h"

namespace cppool::daemon {
namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
constexpr int kDeepest = 32;
constexpr int kHandlerFrames = 2;  // the handler, and the kernel's trampoline
constexpr int kExitFrames = 2;     // EndByExit, and the exit() or exit handler that calls it
constexpr int kReportLimitMs = 500;
constexpr int kStackLimitMs = 250;       // for a stuck thread's handler to start
constexpr std::size_t kShortFrames = 6;  // frames of the stack in the error's text

// The crashed thread writes this for the reporter's thread. It is static, since the handler may run when the
// reporter is gone.
struct Crashed {
  pid_t process = 0;             // the reporter's; a child that fork() made has a copy of all this
  std::atomic<pid_t> thread{0};  // the first that crashed; 0: none
  std::atomic<bool> walking{false};
  sigjmp_buf way_out;
  int signal = 0;  // 0: none
  int exit_code = 0;
  std::atomic<const char*> stuck{nullptr};  // says what did not return, when the process ends for that
  int first = 0, count = 0;
  void* frames[kDeepest];
  std::atomic<int> wake{-1};  // an eventfd; -1: there is no reporter
  std::atomic<bool> reported{false};
  std::atomic<const std::string*> partial{nullptr};  // the line as far as it is known
} crashed;
std::array<struct sigaction, kSignals.size()> before;
const std::function<void(std::string_view)>* write_line = nullptr;

pid_t ThisThread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void SleepOneMs() {
  const timespec pause{0, 1'000'000};
  nanosleep(&pause, nullptr);
}

// Asks the reporter and waits for it.
void Report() {
  const int error = errno;
  const std::uint64_t one = 1;
  if (write(crashed.wake.load(), &one, sizeof(one)) == sizeof(one)) {
    for (int ms = 0; ms < kReportLimitMs && !crashed.reported.load(); ++ms) SleepOneMs();
  }
  const std::string* partial = crashed.partial.load();
  if (!crashed.reported.load() && partial && write_line) (*write_line)(*partial);
  errno = error;
}

// Whether `thread` is the one to report. False: one has crashed before, or there is no reporter in this
// process.
bool IsFirst(pid_t thread) {
  pid_t none = 0;
  return crashed.wake.load() >= 0 && crashed.process == getpid() &&
         crashed.thread.compare_exchange_strong(none, thread);
}

// Does not return when another thread has crashed before: the process ends with that one.
void LeaveTheEndToTheFirst() {
  const pid_t first = crashed.thread.load();
  while (first != 0 && first != ThisThread() && crashed.process == getpid()) pause();
}

void RestoreHandlers() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before[i], nullptr);
}

extern "C" void OnCrash(int signal, siginfo_t* info, void*) {
  if (crashed.thread.load() == ThisThread() && crashed.walking.load()) siglongjmp(crashed.way_out, 1);
  if (IsFirst(ThisThread())) {
    crashed.signal = signal;
    crashed.walking = true;  // a damaged stack can make the unwinder access any address
    if (sigsetjmp(crashed.way_out, 1) == 0) crashed.count = backtrace(crashed.frames, kDeepest);
    crashed.walking = false;
    crashed.first = kHandlerFrames;
    Report();
    if (crashed.stuck.load()) _exit(crashed.exit_code);
  }
  LeaveTheEndToTheFirst();
  RestoreHandlers();
  // The instruction faults again. A signal that was sent is sent again, and so is SIGTRAP, whose handler
  // returns behind the instruction.
  if (info->si_code <= 0 || signal == SIGTRAP) syscall(SYS_tgkill, getpid(), ThisThread(), signal);
}

std::string What() {
  if (const char* stuck = crashed.stuck.load()) return stuck;
  if (crashed.signal == 0) return "called exit(" + std::to_string(crashed.exit_code) + ")";
  const char* name = sigdescr_np(crashed.signal);
  return "crashed by signal " + std::to_string(crashed.signal) + (name ? " (" + std::string(name) + ")" : "");
}

std::string Describe(const CrashPlace& place, const std::string& library,
                     const std::vector<std::string>& stack) {
  std::string text = place.rank ? "rank " + std::to_string(*place.rank) + " " + What() : What();
  if (!place.when.empty()) text += (crashed.stuck.load() ? ", " : " ") + place.when;
  std::string where;
  if (!place.stage.empty()) where += " in stage '" + place.stage + "'";
  if (!place.case_name.empty()) where += " in case '" + place.case_name + "'";
  if (!library.empty())
    where += (!where.empty() ? ", library " : place.when.empty() ? " in " : ", in ") + library;
  text += where;
  for (std::size_t i = 0; i < stack.size() && i < kShortFrames; ++i)
    text += (i ? " < " : ", stack: ") + stack[i];
  return text;
}

}  // namespace

class CrashReporter::State {
 public:
  State(std::function<void(std::string_view)> write, Sources sources)
      : write_(std::move(write)), sources_(std::move(sources)), wake_(eventfd(0, EFD_CLOEXEC)) {
    PrepareStackSampling();  // loads the unwinder, which a handler cannot do
    write_line = &write_;
    crashed.process = getpid();
    sigset_t all, mask;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mask);
    thread_ = std::thread([this] { Wait(); });
    pthread_setname_np(thread_.native_handle(), "crash reporter");  // here: the thread may not run for long
    pthread_sigmask(SIG_SETMASK, &mask, nullptr);
    crashed.wake = wake_.get();
    struct sigaction action {};
    action.sa_sigaction = OnCrash;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &before[i]);
  }
  ~State() {
    RestoreHandlers();
    crashed.wake = -1;
    ending_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_.get(), &one, sizeof(one));
    thread_.join();
    write_line = nullptr;
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

 private:
  void Wait() {
    std::uint64_t count = 0;
    while (read(wake_.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
    }
    if (ending_) return;
    const std::string unplaced = protocol::SerializeCrash(ToCrash({}, "", {}));
    crashed.partial = &unplaced;
    const CrashPlace place = sources_.place ? sources_.place(crashed.thread.load()) : CrashPlace{};
    const std::string partial = protocol::SerializeCrash(ToCrash(place, place.library, {}));
    crashed.partial = &partial;
    std::string library = place.library;
    const int frames = crashed.count - crashed.first;
    for (int i = 0; sources_.named && i < frames; ++i) {
      Dl_info info{};
      if (dladdr(crashed.frames[crashed.first + i], &info) == 0 || !info.dli_fname) continue;
      if (std::string named = sources_.named(info.dli_fname); !named.empty()) {
        library = std::move(named);  // the innermost frame's
        break;
      }
    }
    std::vector<std::string> stack;
    if (frames > 0) stack = NameFrames(crashed.frames + crashed.first, frames);
    write_(protocol::SerializeCrash(ToCrash(place, library, std::move(stack))));
    crashed.reported = true;
    for (;;) pause();  // the process ends; `partial` must live until then
  }

  static Crash ToCrash(const CrashPlace& place, const std::string& library, std::vector<std::string> stack) {
    Crash crash;
    crash.error = Describe(place, library, stack);
    crash.rank = place.rank;
    crash.stage = place.stage;
    crash.case_name = place.case_name;
    crash.library = library;
    crash.stack = std::move(stack);
    return crash;
  }

  const std::function<void(std::string_view)> write_;
  const Sources sources_;
  const base::UniqueFd wake_;
  const kernels::SignalStack signal_stack_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

CrashReporter::CrashReporter(std::function<void(std::string_view)> write, Sources sources)
    : state_(std::make_unique<State>(std::move(write), std::move(sources))) {}

CrashReporter::~CrashReporter() = default;

void CrashReporter::EndByExit(int code) {
  if (IsFirst(ThisThread())) {
    crashed.exit_code = code;
    crashed.count = backtrace(crashed.frames, kDeepest);
    crashed.first = kExitFrames;
    Report();
  }
  LeaveTheEndToTheFirst();
  _exit(code);
}

void CrashReporter::EndStuck(pid_t thread, const char* what, int code) {
  crashed.exit_code = code;
  crashed.stuck = what;
  // Its handler reports it and ends the process. A thread that does not take the signal is reported without
  // its stack.
  syscall(SYS_tgkill, getpid(), thread, SIGABRT);
  for (int ms = 0; ms < kStackLimitMs && crashed.thread.load() == 0; ++ms) SleepOneMs();
  if (IsFirst(thread)) Report();
  for (int ms = 0; ms < 2 * kReportLimitMs && !crashed.reported.load(); ++ms) SleepOneMs();
  _exit(code);
}

}  // namespace cppool::daemon
