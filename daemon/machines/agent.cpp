#include "daemon/machines/agent.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/nccl_settings.h"
#include "daemon/crash_reporter.h"
#include "daemon/failure_kind.h"
#include "daemon/library.h"
#include "daemon/local_ranks.h"
#include "daemon/log.h"
#include "daemon/machines/frame_socket.h"
#include "daemon/machines/gather.h"
#include "daemon/machines/handshake.h"
#include "daemon/machines/library_frames.h"
#include "daemon/machines/process_agent.h"
#include "daemon/machines/remote_meeting.h"
#include "daemon/options.h"
#include "daemon/process.h"
#include "daemon/rank_output.h"
#include "daemon/start_error.h"
#include "daemon/thread_ranks.h"
#include "daemon/watchdog.h"
#include "protocol/crash.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kConnectLimit{20}, kOpenLimit{120};
constexpr int kHeadHasGone = 1, kCannotGoOn = 3;

class Agent {
 public:
  explicit Agent(CaseRegistry& registry) : registry_(registry) {}

  int Run(const std::string& head) {
    Greet(head);
    RestrainForkedChildren(socket_->fd(), -1);
    watchdog_.emplace(ParentToWatch(), -1,
                      Watchdog::Events{nullptr, [] { End("the launcher's process has gone"); }, nullptr});
    socket_->Start({[this](Json frame) { Take(std::move(frame)); },
                    [](const std::string& why) { End("the head has gone: " + why); }});
    const Json place = NextJob();  // once all others have come
    if (place.at("frame") != "place") throw StartError("the head sent no frame `place`");
    reporter_.emplace([this](std::string_view line) { TellCrash(line); },
                      CrashReporter::Sources{[this](pid_t thread) { return PlaceOf(thread); },
                                             [this](const std::string& file) {
                                               return ranks_ ? ranks_->NamedLibrary(file) : "";
                                             }});
    try {
      Open(place);
    } catch (const std::exception& error) {
      Json frame = {{"frame", "unstarted"}, {"error", error.what()}};
      const auto* start = dynamic_cast<const StartError*>(&error);
      frame["kind"] = ToString(start ? start->kind() : FailureKind::kInternal);
      if (start) frame["detail"] = start->detail;
      if (start && start->rank) frame["rank"] = *start->rank;
      socket_->Send(frame);
      std::this_thread::sleep_for(FrameSocket::kBeat);  // the head ends the launcher
      _exit(kCannotGoOn);                               // ranks may be stuck in their start
    }
    on_exit(  // as the daemon does: err() of libc calls libc's own exit()
        [](int code, void* agent) {
          if (!static_cast<Agent*>(agent)->ending_) CrashReporter::EndByExit(code);
        },
        this);
    for (Json job = NextJob(); job.at("frame") != "close"; job = NextJob()) Do(job);
    ending_ = true;
    if (processes_) processes_->Close();
    return !world_ || world_->Close() ? 0 : kCannotGoOn;
  }

 private:
  // The head, the launcher or this process cannot go on, and nobody is left to tell.
  [[noreturn]] static void End(const std::string& why) {
    EndAllLines();
    Log(LogLevel::kInfo, why + ": this agent ends");
    _exit(kHeadHasGone);
  }

  void Greet(const std::string& head) {
    const char* const given = std::getenv(kSecretVariable);
    const std::string secret = given ? given : "";
    unsetenv(kSecretVariable);
    unsetenv("CPPOOL_PARENT_PID");  // the head's
    const std::size_t colon = head.rfind(':');
    if (colon == std::string::npos) throw StartError("--agent takes HOST:PORT, not " + head);
    if (secret.empty())
      throw StartError(std::string("--agent: ") + kSecretVariable +
                       " is not set: agents are started by cppoold --launch, whose launcher must pass it on "
                       "(srun does; mpirun with -x " +
                       kSecretVariable + ")");
    socket_ = std::make_unique<FrameSocket>(
        ConnectTo(head.substr(0, colon), head.substr(colon + 1), Clock::now() + kConnectLimit));
    const AgentPlace place = PlaceFromEnvironment();
    try {
      GreetHead(*socket_, secret,
                {{"version", Version()},
                 {"node", NodeName()},
                 {"pid", getpid()},
                 {"index", place.index},
                 {"agents", place.agents}},
                Clock::now() + kConnectLimit);
    } catch (const std::exception& error) {
      throw StartError("the head at " + head + " does not take this agent: " + error.what());
    }
  }

  void Open(const Json& frame) {
    const auto started = Clock::now();
    const int world_size = frame.at("world_size"), agents = frame.at("agents"), index = frame.at("index");
    const kernels::Place place(world_size, world_size / agents * index, world_size / agents);
    const auto backend = static_cast<BackendChoice>(frame.at("backend").get<int>());
    SetUpLog(frame.at("log_level"));
    if (frame.value("python", false)) {
      processes_.emplace(*socket_, place, index, backend);
      socket_->Send({{"frame", "ready"}});
      return;
    }
    const auto exchange = [this](const char* what) -> kernels::Exchange {
      return [this, what](const std::string& own) {
        socket_->Send({{"frame", "exchange"}, {"what", what}, {"data", own}});
        const Json all = NextJob();
        if (all.at("frame") != "exchanged") throw StartError("the head sent no frame `exchanged`");
        return all.at("all").get<std::vector<std::string>>();
      };
    };
    const auto tell = [this](const kernels::RankNews& news) {
      socket_->Send({{"frame", "tell"},
                     {"rank", news.rank},
                     {"round", news.round},
                     {"shape", {news.shape.size, news.shape.stride}}});
    };
    world_ = std::make_unique<World>(ChooseBackend(
        backend, static_cast<kernels::Transport>(frame.at("transport").get<int>()), place,
        [&] { return kernels::ConnectGloo(index, agents, socket_->own_address(), exchange("gloo")); },
        {exchange("nccl"), tell}));
    world_->Open(Clock::now() + kOpenLimit);
    ThreadRanks::Options options;
    if (const std::string words = frame.at("kernels"); !words.empty())
      options.kernels = protocol::ParseKernels(words);
    if (frame.at("allow_faults").get<bool>())
      options.faults = FaultMeans{frame.at("half_answer"), [this](std::string_view text) {
                                    socket_->Send({{"frame", "write"}, {"text", text}});
                                  }};
    ranks_ = std::make_unique<ThreadRanks>(*world_, registry_, under_way_, std::move(options));
    Json hello = ranks_->Hello(), times = Json::object();
    for (const auto& [stage, ms] : world_->backend().InitTimes()) times[stage] = ms;
    times["ranks"] = world_->open_ms();
    times["agents"] = std::chrono::duration<double, std::milli>(Clock::now() - started).count();
    socket_->Send({{"frame", "ready"},
                   {"backend", hello.at("backend")},
                   {"transport", hello.at("transport")},
                   {"devices", hello.at("devices")},
                   {"nccl", base::NcclSettings()},
                   {"init_ms", std::move(times)}});
  }

  // On the reading thread.
  void Take(Json frame) {
    const std::string name = frame.at("frame");
    if (processes_ && processes_->Take(frame)) return;
    if (name == "clock") {
      socket_->Send({{"frame", "answer"}, {"ask", frame.at("ask")}, {"ns", kernels::TraceClockNs()}});
      return;
    }
    if (name == "met") {
      if (const auto meeting = Meeting()) meeting->Take(frame);
    } else if (name == "abort") {
      world_->backend().Abort(frame.value("reason", "the head says so"));
    } else if (name == "tell") {
      const Json& shape = frame.at("shape");
      world_->backend().Take({frame.at("rank"), frame.at("round"), {shape.at(0), shape.at(1)}});
    } else if (name == "profile") {
      world_->backend().Profile(frame.at("begin"));
    } else if (name == "snapshot") {
      std::thread([this, frame = std::move(frame)] { AnswerSnapshot(frame); }).detach();
    } else {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(frame));
      changed_.notify_all();
    }
  }

  Json NextJob() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !jobs_.empty(); });  // its end is that of the head
    Json job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }

  static Clock::time_point LimitOf(const Json& job) {
    return Clock::now() + std::chrono::milliseconds(job.at("limit_ms").get<std::int64_t>());
  }

  void Do(const Json& job) {
    const std::string name = job.at("frame");
    if (name == "run" || name == "probe") return Start(job);
    if (name == "trim") return ranks_->WhileIdle();
    if (world_) world_->threads().Wait();  // all ranks have reported: no rank has more than its return to do
    Json answer = {{"frame", "answer"}, {"ask", job.at("ask")}};
    try {
      if (processes_) processes_->Do(job, answer);
      if (name == "prepare") Prepare(job, answer);
      if (name == "finish") Finish(job, answer);
      if (name == "trace") {
        if (trace_.ranks.empty()) Runner()->MoveTrace(trace_);
        const int index = job.at("rank").get<int>() - world_->place().first;
        answer["trace"] = ToJson(std::exchange(trace_.ranks.at(static_cast<std::size_t>(index)), {}));
      }
      if (name == "memory") answer["memory"] = ranks_->Memory();
      if (name == "cases")
        answer["cases"] = ranks_->CasesOf(job.at("load").get<std::vector<std::string>>(),
                                          job.at("digests").get<std::map<std::string, std::string>>(),
                                          Clock::now() + std::chrono::seconds(30));
      if (name == "library") answer.update(library_.Take(job, ranks_->libraries()));
      if (name == "recover")
        world_->backend().Recover(std::chrono::milliseconds(job.at("limit_ms").get<std::int64_t>()));
    } catch (const Refusal& refusal) {
      answer["kind"] = ToString(refusal.kind());
      answer["error"] = refusal.what();
    } catch (const protocol::InvalidRequest& error) {
      answer["kind"] = ToString(FailureKind::kInvalidRequest);
      answer["error"] = error.what();
    } catch (const StartError& error) {
      answer["kind"] = ToString(error.kind());
      answer["error"] = error.what();
    } catch (const LibraryError& error) {
      answer["kind"] = ToString(FailureKind::kInvalidRequest);
      answer["error"] = error.what();
    } catch (const kernels::RuntimeError& error) {
      answer["kind"] = ToString(ToFailureKind(error.status()));
      answer["error"] = error.what();
    } catch (const std::exception& error) {
      answer["kind"] = ToString(FailureKind::kInternal);
      answer["error"] = error.what();
    }
    socket_->Send(answer);
  }

  void Prepare(const Json& job, Json& answer) {
    auto parsed = protocol::ParseRequest(job.at("request").get<std::string>());
    auto& request = std::get<protocol::RunRequest>(parsed.operation);
    request.digests = job.at("digests");  // also of libraries that the head's options name
    prepared_ = ranks_->PrepareRun(request, LimitOf(job));
    answer["library"] = prepared_->registered.library;
    answer["seed"] = prepared_->seed ? Json(*prepared_->seed) : Json();
    answer["kernels"] = prepared_->kernels;
    answer["warnings"] = prepared_->warnings;
    answer["loaded"] = Json::array();
    for (const auto& [kind, file, digest] : ranks_->TakeLoaded())
      answer["loaded"].push_back({static_cast<int>(kind), file, digest});
  }

  void Start(const Json& job) {
    world_->threads().Wait();
    const auto run = job.at("run").get<std::uint64_t>();
    const auto meeting = std::make_shared<RemoteMeeting>(*socket_, world_->threads(), world_->place(), run);
    const auto sink = [this, run](const RankReport& report) {
      socket_->Send({{"frame", "report"}, {"run", run}, {"rank", report.rank}, {"report", ToJson(report)}});
    };
    const bool probe = job.at("frame") == "probe";
    std::shared_ptr<RankRunner> runner;
    {
      const std::lock_guard lock(mutex_);
      meeting_ = meeting;
      if (!probe || !runner_) runner_ = std::make_shared<LocalRanks>(*world_, prepared_, "");
      runner = runner_;
    }
    if (probe) return runner->StartProbe(meeting, job.at("round"), sink);
    trace_ = {};
    ranks_->BeginRun();
    runner->Start(meeting, sink);
  }

  void Finish(const Json& job, Json& answer) {
    protocol::RunResult result;
    ranks_->EndRun(*prepared_, LimitOf(job), result);
    answer["host_bytes"] = result.leaks.host_bytes;
    answer["threads"] = result.leaks.threads;
    answer["fds"] = result.leaks.fds;
    answer["processes"] = result.leaks.processes;
    answer["warnings"] = result.warnings;
    answer["respawn"] = result.respawn;
  }

  void AnswerSnapshot(const Json& frame) {
    Json reports = Json::array();
    if (const auto runner = Runner())
      for (const RankReport& report : runner->Snapshots(frame.at("stacks")))
        reports.push_back(ToJson(report));
    socket_->Send({{"frame", "answer"}, {"ask", frame.at("ask")}, {"reports", std::move(reports)}});
  }

  // The line goes to stderr, too, which the launcher may or may not show to the head's user.
  void TellCrash(std::string_view line) {
    EndAllLines();
    [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
    const auto crash = protocol::ParseCrash(line.substr(0, line.find('\n')));
    if (!crash) return;
    Json frame = {{"frame", "crash"}, {"text", crash->error}, {"stage", crash->stage}};
    if (crash->rank) frame["rank"] = *crash->rank;
    socket_->Send(frame);
  }

  CrashPlace PlaceOf(pid_t thread) const {
    const auto runner = Runner();
    CrashPlace place = runner ? runner->PlaceOf(thread) : CrashPlace{};
    if (runner && prepared_) {
      place.case_name = prepared_->registered.name;
      place.library = prepared_->registered.library;
    }
    return place;
  }

  std::shared_ptr<RankRunner> Runner() const {
    const std::lock_guard lock(mutex_);
    return runner_;
  }
  std::shared_ptr<RemoteMeeting> Meeting() const {
    const std::lock_guard lock(mutex_);
    return meeting_;
  }

  CaseRegistry& registry_;
  std::unique_ptr<FrameSocket> socket_;
  std::optional<Watchdog> watchdog_;
  std::optional<CrashReporter> reporter_;
  UnderWay under_way_;
  std::unique_ptr<World> world_;
  std::unique_ptr<ThreadRanks> ranks_;
  std::optional<ProcessAgent> processes_;  // instead of both
  LibraryReceiver library_;
  std::shared_ptr<const PreparedRun> prepared_;  // of the main thread, as the next one
  RunTrace trace_;                               // of the latest run, once it was asked for
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Json> jobs_;
  std::shared_ptr<RankRunner> runner_;  // of the latest run
  std::shared_ptr<RemoteMeeting> meeting_;
  std::atomic<bool> ending_{false};  // main returns next
};

}  // namespace

int RunAgent(const std::string& head, CaseRegistry& registry) {
  static auto* const agent = new Agent(registry);  // never destroyed: its threads go on to the end
  return agent->Run(head);
}

}  // namespace cppool::daemon
