// cppoold: the process around the dispatcher. Exit codes:
//   0              orderly end: `shutdown`, end of stdin, idle, SIGTERM between requests
//   1              nobody reads the answers, or the parent has died
//   2              could not start; stderr says why and what to do, to people and to programs (protocol/start.h)
//   3              cannot go on: the last answer is `fatal`, or stderr says why
//   128 + SIGTERM  SIGTERM during the start, a request, or the end
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/attention_case/attention_case.h"
#include "daemon/case_registry.h"
#include "daemon/crash_reporter.h"
#include "daemon/dispatcher.h"
#include "daemon/library_probe.h"
#include "daemon/log.h"
#include "daemon/options.h"
#include "daemon/process.h"
#include "daemon/rank_output.h"
#include "daemon/request_reader.h"
#include "daemon/start_error.h"
#include "daemon/stdout_channel.h"
#include "daemon/watchdog.h"
#include "daemon/world.h"
#include "protocol/start.h"

namespace {

using namespace cppool::daemon;
using cppool::protocol::StartFailure;
using cppool::protocol::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr int kNoReader = 1;
constexpr int kCannotStart = 2;
constexpr int kCannotGoOn = 3;
constexpr int kTerminated = 128 + SIGTERM;
constexpr std::chrono::seconds kOpenLimit{120};
constexpr std::chrono::milliseconds kIdleAfter{20};  // without a request, memory goes back to the devices
constexpr std::chrono::seconds kLastAnswerLimit{2};  // for a client that does not read

int terminate_pipe_in = -1;  // for the signal handler

extern "C" void OnTerminate(int) {
  const int error = errno;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(terminate_pipe_in, &one, sizeof(one));
  errno = error;
}

// While it lives, a call of exit() by a case or its libraries ends the process at once, with a message. The exit handlers
// of libraries, which would wait for the work of other ranks or crash on it, do not run: this one runs before them.
class ExitGuard {
 public:
  ExitGuard() {
    on_exit(
        [](int code, void*) {
          if (!armed) return;
          const std::string text = "cppoold: a case called exit(" + std::to_string(code) + ")\n";
          [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
          CrashReporter::ReportExit(code);
          _exit(code);
        },
        nullptr);
    armed = true;
  }
  ~ExitGuard() { armed = false; }
  ExitGuard(const ExitGuard&) = delete;
  ExitGuard& operator=(const ExitGuard&) = delete;

 private:
  static inline std::atomic<bool> armed{false};
};

UniqueFd MakeEvent() {
  UniqueFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw StartError("eventfd: out of file descriptors?", cppool::protocol::FailureKind::kInternal);
  return event;
}

// Ends a daemon that cannot start: writes the error for people, then the line for programs. `failure` is what is known beside the
// error. Without destructors and exit handlers, which could write after the line or wait for ranks that are stuck in their start.
[[noreturn]] void EndUnstarted(StartFailure failure, const std::exception& error) {
  failure.error = error.what();
  failure.kind = ToString(cppool::protocol::FailureKind::kInternal);
  if (const auto* start = dynamic_cast<const StartError*>(&error)) {
    failure.kind = ToString(start->kind());
    failure.detail = start->detail;
    failure.rank = start->rank;
    failure.devices = start->devices;
  }
  if (failure.detail.empty()) failure.detail = failure.error;
  std::fprintf(stderr, "cppoold: %s\n", failure.error.c_str());
  std::fflush(nullptr);  // also what libraries have buffered for stdout, which is stderr
  const std::string line = cppool::protocol::SerializeStart(failure);
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
  _exit(kCannotStart);
}

// The parent has died. Says so in the log, where that does not wait for a reader: whoever reads stderr may have gone, or be
// stuck.
[[noreturn]] void EndOrphaned(pid_t parent) {
  const std::string text =
      "cppoold: the parent process " + std::to_string(parent) + " has gone: this daemon ends\n";
  pollfd fd = {STDERR_FILENO, POLLOUT, 0};
  if (Logs(LogLevel::kInfo) && poll(&fd, 1, 0) > 0 && (fd.revents & POLLOUT) != 0) {
    [[maybe_unused]] const auto written =
        write(STDERR_FILENO, text.data(), text.size());  // a pipe has room for a line
  }
  _exit(kNoReader);
}

double Milliseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

class Daemon {
 public:
  // `start` is updated with the progress of the start, for EndUnstarted. It must outlive this.
  Daemon(Options options, StdoutChannel answers, Clock::time_point started, double spawn_ms,
         StartFailure& start)
      : options_(std::move(options)),
        answers_(std::move(answers)),
        started_(started),
        spawn_ms_(spawn_ms),
        start_(start) {
    start_.world_size = options_.world_size;
    start_.backend = NameOf(options_.backend);
    start_.transport = NameOf(options_.transport);
  }

  // Throws what kept it from starting.
  int Run() {
    start_.stage = "process";
    UniqueFd requests = TakeStdin();  // first: with stdin closed, the next descriptor opened would be 0
    CatchTermination();
    const pid_t parent = ParentToWatch();
    Watchdog watchdog(
        parent, terminate_.get(),
        {[this] { AnswerTimeout(); }, [parent] { EndOrphaned(parent); }, [this] { Terminate(); }});

    if (parent != getppid()) EndOrphaned(parent);  // it died before the watchdog watched it

    start_.stage = "backend";
    World world(ChooseBackend(options_.backend, options_.transport, options_.world_size));
    const auto chosen = Clock::now();
    start_.backend = world.backend().name();
    start_.stage = "cases";
    CaseRegistry registry;
    registry.Add(cppool::AttentionCase(), "built in");
    for (const std::string& file : options_.case_files) registry.LoadFile(file);
    const auto loaded = Clock::now();
    start_.stage = "ranks";
    try {
      world.Open(Clock::now() + kOpenLimit);
    } catch (const StartError& error) {
      EndUnstarted(start_, error);  // here, before destructors wait for ranks that are stuck
    }
    Dispatcher::Options options;
    options.sentinel = options_.sentinel;
    options.version = Version();
    options.started = started_;
    options.init_ms = InitTimes(world, chosen, loaded);
    options.kernels = options_.kernels;
    if (options_.allow_faults) {
      options.allow_faults = [this](std::string_view text) {
        answers_.Write(text, Clock::now() + kLastAnswerLimit);
      };
    }
    Dispatcher dispatcher(world, registry, &watchdog, std::move(options));
    dispatcher_ = &dispatcher;
    Log(LogLevel::kInfo, std::to_string(world.size()) + " ranks on " + world.backend().name() +
                             " are open after " + Rounded(Milliseconds(Clock::now() - started_), 0) + " ms");
    int exit_code = 0;
    try {
      const CrashReporter reporter(
          [](std::string_view line) {
            EndAllLines();
            [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
          },
          {[&](pid_t thread) { return dispatcher.PlaceOf(thread); },
           [&](const std::string& file) { return dispatcher.NamedLibrary(file); }});
      const ExitGuard guard;
      exit_code = Serve(dispatcher, std::move(requests));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "cppoold: %s\n", error.what());
      _exit(kCannotGoOn);  // ranks may be at work: no destructors
    }
    if (!world.Close()) {
      Log(LogLevel::kWarning, "the ranks did not close in time");
      _exit(exit_code);
    }
    return exit_code;
  }

 private:
  // SIGTERM makes `terminate_` readable, for the watchdog.
  void CatchTermination() {
    terminate_ = MakeEvent();
    stop_ = MakeEvent();
    terminate_pipe_in = terminate_.get();
    struct sigaction action {};
    action.sa_handler = OnTerminate;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, nullptr);
    sigset_t terminate;
    sigemptyset(&terminate);
    sigaddset(&terminate, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &terminate, nullptr);  // the parent may have blocked it
  }

  int Serve(Dispatcher& dispatcher, UniqueFd input) {
    std::optional<std::chrono::milliseconds> idle_limit;
    if (options_.idle_exit_s > 0)
      idle_limit = std::chrono::milliseconds(std::max(1LL, std::llround(options_.idle_exit_s * 1000)));
    RequestReader requests(std::move(input), stop_.get(), idle_limit);
    phase_ = Phase::kWaiting;
    while (auto line = requests.Next()) {
      Phase waiting = Phase::kWaiting;
      if (!phase_.compare_exchange_strong(waiting, Phase::kBusy))
        break;  // SIGTERM came: the request that was read is not begun
      const auto answer = dispatcher.Handle(*line);
      if (!answer) {
        while (true) pause();  // the watchdog answers and ends the process
      }
      if (answer->fatal) EndAllLines();  // of ranks that did not return
      // _exit, since destructors would wait for ranks that may be stuck.
      if (!answers_.Write(answer->text)) {
        Log(LogLevel::kError, "nobody reads stdout, an answer could not be written: this daemon ends");
        _exit(kNoReader);
      }
      if (answer->fatal) _exit(kCannotGoOn);
      if (answer->shutdown) break;
      phase_ = Phase::kWaiting;
      if (!requests.Arrives(kIdleAfter)) dispatcher.WhileIdle();
    }
    phase_ = Phase::kBusy;
    if (requests.idled())
      Log(LogLevel::kInfo,
          "no request for " + cppool::protocol::Json(options_.idle_exit_s).dump() + " s: this daemon ends");
    return 0;  // stdin is closed before the world is: a client that writes a request now gets an error at once
  }

  // On the watchdog's thread. Must not wait for anything that may be stuck.
  void AnswerTimeout() {
    EndAllLines();
    answers_.Write(dispatcher_.load()->TimeoutAnswer(), Clock::now() + kLastAnswerLimit);
    _exit(kCannotGoOn);
  }

  void Terminate() {
    Phase waiting = Phase::kWaiting;
    if (!phase_.compare_exchange_strong(waiting, Phase::kStopping)) _exit(kTerminated);
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(stop_.get(), &one, sizeof(one));
  }

  cppool::protocol::Json InitTimes(World& world, Clock::time_point chosen, Clock::time_point loaded) const {
    cppool::protocol::Json times = cppool::protocol::Json::object();
    for (const auto& [stage, ms] : world.backend().InitTimes()) times[stage] = ms;
    times["backend"] = Milliseconds(chosen - started_);
    times["cases"] = Milliseconds(loaded - chosen);
    times["ranks"] = world.open_ms();
    if (spawn_ms_ >= 0) times["spawn"] = spawn_ms_;
    times["total"] = Milliseconds(Clock::now() - started_) + std::max(spawn_ms_, 0.0);
    return times;
  }

  const Options options_;
  StdoutChannel answers_;
  const Clock::time_point started_;
  const double spawn_ms_;
  StartFailure& start_;
  UniqueFd terminate_;
  UniqueFd stop_;
  // SIGTERM in kWaiting leads to an orderly end; in the other phases it ends the process at once. The start and the end are kBusy.
  enum class Phase { kBusy, kWaiting, kStopping };
  std::atomic<Phase> phase_{Phase::kBusy};
  std::atomic<Dispatcher*> dispatcher_{nullptr};
};

}  // namespace

int main(int argc, char** argv) {
  const auto started = Clock::now();
  if (argc == 5 && std::string_view(argv[1]) == kProbeOption) return RunProbe(argv[2], argv[3], argv[4]);
  KeepHeapTight();
  StartFailure start;
  start.stage = "process";
  try {
    StdoutChannel answers = StdoutChannel::TakeStdout();  // before anything can write to stdout
    std::setvbuf(stdout, nullptr, _IOLBF, 0);             // libraries' output appears on stderr line by line
    const double spawn_ms = MillisecondsSinceSpawn();
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);  // a dump that exceeds the file size limit is then an ordinary error
    start.stage = "arguments";
    ParsedOptions parsed = ParseOptions(argc, argv);
    if (!parsed.options && parsed.exit_code == 0) {
      answers.Write(parsed.text);
      return 0;
    }
    if (!parsed.options) throw StartError(parsed.text);
    SetUpLog(parsed.options->log_level);
    LabelRankOutput();  // after the log has its stream: its lines name the rank themselves
    return Daemon(std::move(*parsed.options), std::move(answers), started, spawn_ms, start).Run();
  } catch (const std::exception& error) {
    EndUnstarted(start, error);
  }
}
