// cppoold: the process around the dispatcher. Exit codes:
//   0              orderly end: `shutdown`, end of stdin, idle, SIGTERM between requests
//   1              nobody reads the answers, or the parent has died
//   2              could not start; stderr says why and what to do (protocol/start.h)
//   3              cannot go on: the last answer is `fatal`, or stderr says why
//   128 + SIGTERM  SIGTERM during the start or a request, or 1 s into an end that hangs
// and that of a call of exit() by a case or a library.
#include <poll.h>
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
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/event.h"
#include "base/stdout_channel.h"
#include "daemon/attention_case/attention_case.h"
#include "daemon/case_registry.h"
#include "daemon/crash_reporter.h"
#include "daemon/dispatcher.h"
#include "daemon/fork_server.h"
#include "daemon/library.h"
#include "daemon/library_probe.h"
#include "daemon/library_store.h"
#include "daemon/log.h"
#include "daemon/machines/agent.h"
#include "daemon/machines/agent_ranks.h"
#include "daemon/machines/agents.h"
#include "daemon/machines/launcher.h"
#include "daemon/machines/process_agents.h"
#include "daemon/options.h"
#include "daemon/process.h"
#include "daemon/process_ranks.h"
#include "daemon/rank_output.h"
#include "daemon/start_error.h"
#include "daemon/thread_ranks.h"
#include "daemon/under_way.h"
#include "daemon/watchdog.h"
#include "daemon/world.h"
#include "protocol/request_queue.h"
#include "protocol/request_reader.h"
#include "protocol/start.h"

namespace {

using namespace cppool::daemon;
using cppool::StartFailure;
using cppool::base::Event;
using cppool::base::StdoutChannel;
using cppool::base::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr int kNoReader = 1;
constexpr int kCannotStart = 2;
constexpr int kCannotGoOn = 3;
constexpr int kTerminated = 128 + SIGTERM;
constexpr std::chrono::seconds kOpenLimit{120};
constexpr std::chrono::milliseconds kIdleAfter{20};  // without a request, memory goes back to the devices
constexpr std::chrono::seconds kLastAnswerLimit{2};  // for a client that does not read
constexpr std::chrono::seconds kExitLimit{10};       // for destructors and exit handlers, libraries' too
constexpr std::chrono::seconds kTerminatedLimit{1};  // for what is left of the end when SIGTERM comes

const Event* terminate_event = nullptr;  // for the signal handler

extern "C" void OnTerminate(int) {
  const int error = errno;
  terminate_event->Set();
  errno = error;
}

// Writes the error for people, then the line for programs. `failure` is what is known beside the error.
void WriteUnstarted(StartFailure failure, const std::exception& error) {
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
}

// Ends a daemon that cannot start, without destructors and exit handlers, which could write after the line or
// wait for ranks that are stuck in their start.
[[noreturn]] void EndUnstarted(const StartFailure& failure, const std::exception& error) {
  WriteUnstarted(failure, error);
  _exit(kCannotStart);
}

// The parent has died. Says so in the log, where that does not wait for a reader: whoever reads stderr may
// have gone, or be stuck.
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

  // Throws what kept it from starting. What is made here lives until the process has ended: libraries'
  // destructors, which run after main, are watched over as requests are.
  int Run() {
    UniqueFd requests =
        cppool::base::TakeStdin();  // first: with stdin closed, the next descriptor opened would be 0
    RestrainForkedChildren(requests.get(), answers_.fd());
    CatchTermination();
    CatchCrashes();
    const pid_t parent = ParentToWatch();
    watchdog_.emplace(parent, terminate_.fd(),
                      Watchdog::Events{[this] { DeadlinePassed(); },
                                       [this, parent] {
                                         EndLauncher();
                                         EndOrphaned(parent);
                                       },
                                       [this] { Terminate(); }});

    if (parent != getppid()) EndOrphaned(parent);  // it died before the watchdog watched it

    Dispatcher::Options options;
    options.sentinel = options_.sentinel;
    options.version = Version();
    options.started = started_;
    options.init_ms = options_.launch   ? StartAgents(std::move(requests))
                      : options_.python ? StartProcesses(std::move(requests))
                                        : StartThreads(std::move(requests));
    dispatcher_ = std::make_unique<Dispatcher>(*ranks_, under_way_, &*watchdog_, std::move(options));
    Log(LogLevel::kInfo, std::to_string(options_.world_size) + " ranks on " + start_.backend +
                             " are open after " + Rounded(Milliseconds(Clock::now() - started_), 0) + " ms");
    CatchExit();
    try {
      Serve();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "cppoold: %s\n", error.what());
      End(kCannotGoOn);  // ranks may be at work: no destructors
    }
    if (world_ && !world_->Close()) {
      Log(LogLevel::kWarning, "the ranks did not close in time");
      _exit(0);
    }
    watchdog_->Arm(Clock::now() + kExitLimit);
    phase_ = Phase::kEnding;
    ranks_->Close();  // it stays: what is known of libraries is asked until the end
    world_.reset();
    return 0;
  }

 private:
  // All make `ranks_`, and return the times of the start, by stage.
  cppool::protocol::Json StartThreads(UniqueFd requests) {
    start_.stage = "backend";
    world_ =
        std::make_unique<World>(ChooseBackend(options_.backend, options_.transport, options_.world_size));
    World& world = *world_;
    const auto chosen = Clock::now();
    start_.backend = world.backend().name();
    start_.stage = "cases";
    registry_.Add(cppool::AttentionCase(), "built in");
    for (const std::string& file : options_.case_files) LoadCases(file);
    const auto loaded = Clock::now();
    start_.stage = "ranks";
    try {
      world.Open(Clock::now() + kOpenLimit);
    } catch (const StartError& error) {
      EndUnstarted(start_, error);  // here, before destructors wait for ranks that are stuck
    }
    ThreadRanks::Options ranks;
    ranks.kernels = options_.kernels;
    if (options_.allow_faults)
      ranks.faults = FaultMeans{HalfAnswer(), [this](std::string_view text) {
                                  answers_.Write(text, Clock::now() + kLastAnswerLimit);
                                }};
    OpenRequests(std::move(requests));  // before the ranks count threads and descriptors
    ranks_ = std::make_unique<ThreadRanks>(world, registry_, under_way_, std::move(ranks));
    cppool::protocol::Json times = cppool::protocol::Json::object();
    for (const auto& [stage, ms] : world.backend().InitTimes()) times[stage] = ms;
    times["backend"] = Milliseconds(chosen - started_);
    times["cases"] = Milliseconds(loaded - chosen);
    times["ranks"] = world.open_ms();
    return WithTotal(std::move(times));
  }

  cppool::protocol::Json StartProcesses(UniqueFd requests) {
    start_.stage = "ranks";
    ProcessRanks::Options options = PythonOptions();
    const ForkServer::Options server{
        .python = options.python,
        .preload = options_.preload,
        .devices = ForkServer::VisibleDevices(options_.backend, options_.world_size),
        .shared = true};
    options.start = [server](Clock::time_point deadline) {
      return std::make_shared<ForkServer>(server, deadline);
    };
    OpenRequests(std::move(requests));
    auto ranks = std::make_unique<ProcessRanks>(under_way_, std::move(options), Clock::now() + kOpenLimit);
    start_.backend = ranks->Hello().at("backend");
    cppool::protocol::Json times = ranks->init_ms();
    ranks_ = std::move(ranks);
    return WithTotal(std::move(times));
  }

  ProcessRanks::Options PythonOptions() const {
    ProcessRanks::Options options;
    options.world_size = options_.world_size;
    options.python = FindPython(*options_.python);
    if (options_.backend == BackendChoice::kCuda || options_.transport == cppool::kernels::Transport::kNccl)
      options.backend = "nccl";
    return options;
  }

  cppool::protocol::Json StartAgents(UniqueFd requests) {
    start_.stage = "ranks";
    Agents::Options options;
    options.world_size = options_.world_size;
    options.version = Version();
    options.words = SplitWords(*options_.launch);
    options.write_answer = [this](std::string_view text) {
      answers_.Write(text, Clock::now() + kLastAnswerLimit);
    };
    options.lost = [this](const std::string& why) {
      Log(LogLevel::kError, why + ": this daemon ends");
      End(kCannotGoOn);
    };
    const cppool::protocol::Json place = {
        {"backend", static_cast<int>(options_.backend)}, {"transport", static_cast<int>(options_.transport)},
        {"kernels", options_.kernels.Words()},           {"log_level", options_.log_level},
        {"allow_faults", options_.allow_faults},         {"half_answer", HalfAnswer()},
        {"python", options_.python.has_value()}};
    const auto limit = Clock::now() + StartLimit();
    const auto python = options_.python ? std::optional(PythonOptions()) : std::nullopt;
    OpenRequests(std::move(requests));
    auto* const agents = new Agents(std::move(options));  // never destroyed: its threads go on to the end
    agents_ = agents;
    cppool::protocol::Json times;
    try {
      agents->Start(limit);
      times = OpenAgents(*agents, place, python, limit);
    } catch (const std::exception& error) {
      while (ending_) pause();        // agents go because of it, and its thread ends the process
      WriteUnstarted(start_, error);  // before the launcher ends, which may take longer than a client waits
      agents->EndUnstarted();
      _exit(kCannotStart);
    }
    start_.backend = ranks_->Hello().at("backend");
    return WithTotal(std::move(times));
  }

  // Makes `ranks_`, and returns the times of the start. Throws StartError.
  cppool::protocol::Json OpenAgents(Agents& agents, const cppool::protocol::Json& place,
                                    const std::optional<ProcessRanks::Options>& python,
                                    Clock::time_point limit) {
    cppool::protocol::Json times;
    if (python) {
      auto ranks =
          std::make_unique<AgentProcessRanks>(under_way_, agents, *python, options_.preload, place, limit);
      times = ranks->init_ms();
      ranks_ = std::move(ranks);
    } else {
      auto ranks = std::make_unique<AgentRanks>(
          under_way_, agents,
          AgentRanks::Options{
              options_.world_size, place, options_.case_files, options_.allow_faults, {}, options_.kernels},
          limit);
      times = ranks->init_ms();
      ranks_ = std::move(ranks);
    }
    return times;
  }

  // The client, which kills a daemon that has not started in time, says when: the text on who has come is
  // wanted before.
  static std::chrono::milliseconds StartLimit() {
    const char* const given = std::getenv("CPPOOL_START_LIMIT_MS");
    const long long limit = given ? std::atoll(given) : 0;
    if (limit <= 0) return kOpenLimit;
    return std::chrono::milliseconds(std::max(limit - 2000, limit / 2));
  }

  std::string HalfAnswer() const { return options_.sentinel + "{\"ok\": true, \"status\": \"pas"; }

  // Without destructors, which may wait for what is stuck.
  [[noreturn]] void End(int code) {
    EndLauncher();
    _exit(code);
  }

  void EndLauncher() {
    ending_ = true;
    if (Agents* const agents = agents_) agents->EndLauncher();
  }

  cppool::protocol::Json WithTotal(cppool::protocol::Json times) const {
    if (spawn_ms_ >= 0) times["spawn"] = spawn_ms_;
    times["total"] = Milliseconds(Clock::now() - started_) + std::max(spawn_ms_, 0.0);
    return times;
  }

  // SIGTERM makes `terminate_` readable, for the watchdog.
  void CatchTermination() {
    terminate_event = &terminate_;
    struct sigaction action {};
    action.sa_handler = OnTerminate;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, nullptr);
    sigset_t terminate;
    sigemptyset(&terminate);
    sigaddset(&terminate, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &terminate, nullptr);  // the parent may have blocked it
  }

  void CatchCrashes() {
    reporter_.emplace(
        [](std::string_view line) {
          EndAllLines();
          [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
        },
        CrashReporter::Sources{[this](pid_t thread) { return PlaceOf(thread); },
                               [this](const std::string& file) { return NamedLibrary(file); }});
  }

  // Functions of libc such as err() call libc's own exit(), which runs this handler before those that are
  // there now.
  void CatchExit() {
    on_exit(
        [](int code, void* daemon) {
          if (static_cast<Daemon*>(daemon)->phase_ != Phase::kEnding) CrashReporter::EndByExit(code);
        },
        this);
  }

  // The crash reporter's thread calls this, and the next one.
  CrashPlace PlaceOf(pid_t thread) const {
    const Phase phase = phase_;
    CrashPlace place = phase == Phase::kStarting ? CrashPlace{} : dispatcher_->PlaceOf(thread);
    if (phase == Phase::kStarting) {
      place.when = "while the daemon started";
      place.library = start_libraries_.BeingOpened();
    }
    if (phase == Phase::kEnding) place.when = "while the daemon ended";
    return place;
  }
  std::string NamedLibrary(const std::string& file) const {
    if (std::string named = start_libraries_.Named(file); !named.empty()) return named;
    return phase_ == Phase::kStarting ? "" : ranks_->NamedLibrary(file);
  }

  // Of a copy, as those that requests name. Throws StartError.
  void LoadCases(const std::string& file) {
    try {
      const LoadedLibrary& library =
          start_libraries_.Load(file, LibraryKind::kCases, LibraryStore::Clock::time_point::max());
      registry_.AddLibrary(library.handle, file, "--case " + file);
    } catch (const LibraryError& error) {
      throw StartError(std::string("--case ") + error.what());
    } catch (const cppool::kernels::RuntimeError& error) {
      throw StartError(std::string("--case ") + error.what(), cppool::protocol::FailureKind::kInternal);
    }
  }

  void OpenRequests(UniqueFd input) {
    std::optional<std::chrono::milliseconds> idle_limit;
    if (options_.idle_exit_s > 0)
      idle_limit = std::chrono::milliseconds(std::max(1LL, std::llround(options_.idle_exit_s * 1000)));
    cppool::protocol::RequestReader::Events events;
    events.overtaken = [this](const cppool::protocol::IncomingRequest& request) {
      const std::lock_guard lock(overtaking_);
      WriteAnswer(dispatcher_->Overtake(request, queue_));
    };
    events.tick = [this] {
      dispatcher_->Progress([this](std::string_view line) { answers_.WriteIfReady(line); });
    };
    requests_.emplace(std::move(input), stop_.fd(), queue_, std::move(events), idle_limit);
  }

  void Serve() {
    phase_ = Phase::kWaiting;
    while (const auto request = requests_->Next()) {
      Phase waiting = Phase::kWaiting;
      if (!phase_.compare_exchange_strong(waiting, Phase::kBusy))
        break;  // SIGTERM came: the request that was read is not begun
      const auto answer = dispatcher_->Handle(request);
      if (!answer) {
        while (true) pause();  // the watchdog answers and ends the process
      }
      if (answer->fatal) EndAllLines();  // ranks that did not return may have begun some
      {
        const std::lock_guard lock(overtaking_);  // the answer to a cancel comes before that of its run
        WriteAnswer(answer->text);
      }
      if (answer->fatal) End(kCannotGoOn);
      if (answer->shutdown) break;
      phase_ = Phase::kWaiting;
      if (!requests_->Arrives(kIdleAfter)) dispatcher_->WhileIdle();
    }
    phase_ = Phase::kBusy;
    if (requests_->idled())
      Log(LogLevel::kInfo,
          "no request for " + cppool::protocol::Json(options_.idle_exit_s).dump() + " s: this daemon ends");
    requests_.reset();  // stdin is closed before the world is: a client that writes a request now gets an
                        // error at once
  }

  // On the main thread, or that of the requests that overtake.
  void WriteAnswer(std::string_view text) {
    if (answers_.Write(text)) return;
    Log(LogLevel::kError, "nobody reads stdout, an answer could not be written: this daemon ends");
    End(kNoReader);  // destructors would wait for ranks that may be stuck
  }

  // The watchdog's thread calls this, and the next one. Must not wait for anything that may be stuck.
  void DeadlinePassed() {
    if (Agents* const agents = agents_; agents && phase_ == Phase::kEnding) agents->launcher().Kill();
    if (phase_ == Phase::kEnding && end_terminated_)
      CrashReporter::EndStuck(getpid(), "had not returned 1 s after SIGTERM", kTerminated);
    if (phase_ == Phase::kEnding)
      CrashReporter::EndStuck(getpid(), "did not return within 10 s", kCannotGoOn);
    EndAllLines();
    answers_.Write(dispatcher_->TimeoutAnswer(), Clock::now() + kLastAnswerLimit);
    End(kCannotGoOn);
  }

  void Terminate() {
    if (phase_ == Phase::kEnding) {
      if (!std::exchange(end_terminated_, true)) watchdog_->Arm(Clock::now() + kTerminatedLimit);
      return;
    }
    Phase waiting = Phase::kWaiting;
    if (!phase_.compare_exchange_strong(waiting, Phase::kStopping)) End(kTerminated);
    stop_.Set();
  }

  const Options options_;
  StdoutChannel answers_;
  const Clock::time_point started_;
  const double spawn_ms_;
  StartFailure& start_;
  const Event terminate_, stop_;
  // SIGTERM in kWaiting leads to an orderly end, and in kEnding it shortens the time that the end may take;
  // in the other phases it ends the process at once: in kBusy also while the world closes. In kEnding, when
  // the world is closed, a destructor on the main thread may get stuck, or one of a rank's thread: then the
  // main thread, whose stack is reported, waits for that thread to end.
  enum class Phase { kStarting, kBusy, kWaiting, kStopping, kEnding };
  std::atomic<Phase> phase_{Phase::kStarting};
  bool end_terminated_ = false;  // SIGTERM came in kEnding; for the watchdog's thread
  std::optional<CrashReporter> reporter_;
  std::optional<Watchdog> watchdog_;
  std::unique_ptr<World> world_;
  CaseRegistry registry_;
  LibraryStore start_libraries_{{}};  // of --case
  UnderWay under_way_;
  std::unique_ptr<Ranks> ranks_;
  std::atomic<Agents*> agents_{nullptr};    // null: it has none
  std::atomic<bool> ending_{false};         // the launcher is being ended: that agents go is no failure
  std::unique_ptr<Dispatcher> dispatcher_;  // there in all phases but kStarting
  cppool::protocol::RequestQueue queue_;
  std::mutex overtaking_;  // held while a request that overtakes has its effect and is answered
  std::optional<cppool::protocol::RequestReader> requests_;
};

}  // namespace

// Libraries find this function before libc's: exit handlers and destructors of libraries, which would wait
// for the work of other ranks or crash on it, do not run, and when several ranks call it at once the first
// one is reported.
extern "C" void exit(int code) noexcept { CrashReporter::EndByExit(code); }

int main(int argc, char** argv) {
  const auto started = Clock::now();
  if (argc == 5 && std::string_view(argv[1]) == kProbeOption) return RunProbe(argv[2], argv[3], argv[4]);
  if (argc > 2 && std::string_view(argv[1]) == kExecLauncher) return ExecLauncher(argv + 2);
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
    if (!parsed.options->agent.empty()) {
      LabelRankOutput();
      static auto* const registry = new CaseRegistry;
      registry->Add(cppool::AttentionCase(), "built in");
      try {
        return RunAgent(parsed.options->agent, *registry);
      } catch (const std::exception& error) {  // the line for programs is the head's
        std::fprintf(stderr, "cppoold: %s\n", error.what());
        _exit(kCannotStart);
      }
    }
    start.stage = "process";
    LabelRankOutput();           // after the log has its stream: its lines name the rank themselves
    static auto* const daemon =  // never destroyed
        new Daemon(std::move(*parsed.options), std::move(answers), started, spawn_ms, start);
    return daemon->Run();
  } catch (const std::exception& error) {
    EndUnstarted(start, error);
  }
}
