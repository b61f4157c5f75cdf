#include <cppool/pool.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include <cppool/suite.h>

#include "client/src/attach.h"
#include "client/src/daemon.h"
#include "client/src/describe.h"
#include "client/src/request.h"
#include "client/src/side_requests.h"

namespace cppool {

using client::Clock;
using client::Daemon;
using client::Lost;
using std::chrono::milliseconds;

PoolError::PoolError(Kind kind, const std::string& message, std::string stderr_tail, int attempts,
                     std::optional<StartFailure> start_failure, std::string diagnosis,
                     std::optional<Crash> crash, std::vector<LostAttempt> lost)
    : std::runtime_error(stderr_tail.empty() ? message
                                             : message + "\n" + client::kTailTitle + "\n" + stderr_tail),
      kind_(kind),
      stderr_tail_(std::move(stderr_tail)),
      attempts_(attempts),
      start_failure_(std::move(start_failure)),
      diagnosis_(std::move(diagnosis)),
      crash_(std::move(crash)),
      lost_(std::move(lost)) {}

std::string PoolError::flaky() const {
  if (kind_ == Kind::kStart || kind_ == Kind::kInterrupted)
    return "";  // the last daemon did not end the request
  const bool differs =
      std::ranges::any_of(lost_, [this](const LostAttempt& lost) { return lost.kind != kind_; });
  return differs ? client::FlakyAt(ToString(kind_), attempts_) : "";
}

std::string_view ToString(PoolError::Kind kind) {
  static constexpr auto kWords =
      std::to_array<std::string_view>({"start", "died", "timeout", "protocol", "interrupted", "queue"});
  static_assert(kWords.size() == static_cast<std::size_t>(PoolError::Kind::kQueue) + 1);
  return kWords.at(static_cast<std::size_t>(kind));
}

// The state of a Pool in one process. A forked child inherits the parent's state, whose lock may be held by a
// thread that the child does not have, and whose daemon belongs to the parent: the child puts it aside and
// never destroys it.
class Pool::State {
 public:
  explicit State(PoolOptions options) : options_(std::move(options)) {
    if (options_.on_stderr)
      options_.on_stderr = [this, given = std::move(options_.on_stderr)](std::string_view line) {
        reads_stderr_of_ = this;
        given(line);
      };
  }
  ~State() { Stop(); }

  // Sends the request, waits at most `limit` for the answer, and returns convert(answer, attempts before it).
  // A std::runtime_error of `convert` counts as a broken protocol.
  template <typename Convert>
  auto Ask(const protocol::Operation& operation, milliseconds limit, Convert convert,
           client::SideRequests* side = nullptr) {
    const Turn turn(this);
    const client::SideScope side_scope(side);
    bool sent_again = false;  // A daemon may end between two requests once without counting as an attempt.
    std::vector<LostAttempt> earlier;
    for (int attempt = 1;; ++attempt) {
      try {
        EnsureDaemon();
        Json answer = daemon_->Ask(operation, Clock::now() + limit + daemon_->Slack(), side);
        const bool fatal = answer.value("fatal", Json()) == true;
        const Json respawn = answer.value("respawn", Json());
        try {
          auto result = convert(std::move(answer), earlier);
          if (fatal && !Retire(&Daemon::Stop))
            Log("a daemon gave a fatal answer, and SIGKILL did not end it");
          if (!fatal && respawn.is_string()) {
            Log("the daemon is replaced: " + respawn.get<std::string>());
            Retire(&Daemon::Stop);
          }
          return result;
        } catch (const std::runtime_error& error) {
          throw Lost{PoolError::Kind::kProtocol,
                     std::string("cppoold gave an answer that is not a result: ") + error.what()};
        }
      } catch (const Lost& lost) {
        if (lost.goes_on) throw PoolError(lost.kind, lost.message, "", attempt, std::nullopt, lost.state);
        std::string message = lost.message;
        if (lost.kind == PoolError::Kind::kTimeout && !lost.told)
          message += " within " + client::Seconds(limit + (daemon_ ? daemon_->Slack() : milliseconds(0))) +
                     (options_.attach.empty() ? " and was killed" : "") + lost.state;
        const bool in_order = daemon_ && daemon_->EndedInOrder();
        const bool gone = Retire(&Daemon::Kill);
        if (!gone) message += "; SIGKILL did not end it: it is left behind";
        if (lost.unread && gone && !std::exchange(sent_again, true)) {  // it ended just as the call came
          if (!in_order) Log(message + "; the request is sent to a new daemon");
          --attempt;
          continue;
        }
        bool again = lost.kind == PoolError::Kind::kDied || lost.kind == PoolError::Kind::kProtocol;
        if (!again || attempt > options_.retries || (side && side->cancelled())) {
          if (attempt > 1) message += " (attempt " + std::to_string(attempt) + ")";
          if (last_start_failure_ && !lost.told) last_failure_ = message += ": " + last_start_failure_->error;
          if (last_crash_ && !lost.told) message += ": " + client::Text(*last_crash_);
          if (!again) message = AfterCause(earlier, message);
          throw PoolError(lost.kind, message, last_tail_, attempt, last_start_failure_, Diagnosis(lost.state),
                          last_crash_, std::move(earlier));
        }
        if (last_crash_ && !lost.told) message += ": " + client::Text(*last_crash_);
        earlier.push_back({lost.kind, message, last_crash_, last_tail_});
        Log(message + "; the request is sent to a new daemon");
      } catch (const PoolError& error) {  // nothing was started
        if (earlier.empty()) throw;
        const std::string message = AfterCause(earlier, error.what()), tail = earlier.back().stderr_tail;
        throw PoolError(error.kind(), message, tail, attempt, error.start_failure(), "", std::nullopt,
                        std::move(earlier));
      }
    }
  }

  Json Ask(const protocol::Operation& operation) {
    return Ask(operation, kAtOnce, [](Json answer, const auto&) { return answer; });
  }

  // The answer as it is.
  Json AskAny(const protocol::Operation& operation) {
    const protocol::RunRequest* run = protocol::RunOf(operation);
    if (!run) return Ask(operation);
    return Ask(
        operation, AnswerLimit(*run), [](Json answer, const auto&) { return answer; }, &side_);
  }

  void KeepTurn(bool keep) {
    const Turn turn(this);
    try {
      if (keep) EnsureDaemon();
      if (daemon_) daemon_->KeepTurn(keep, Clock::now() + daemon_->Slack());
    } catch (const Lost& lost) {
      Retire(&Daemon::Kill);
      if (lost.kind == PoolError::Kind::kInterrupted) throw PoolError(lost.kind, lost.message, "");
    }
  }

  bool IsUp() {
    const Turn turn(this);
    return daemon_ && !daemon_->Ended();
  }

  std::vector<std::string> Features() {
    return Ask(protocol::HelloRequest{}, kAtOnce,
               [](const Json& answer, const auto&) { return client::FeaturesFromJson(answer); });
  }

  Result Run(const protocol::Operation& run) {
    return AskResult(run, AnswerLimit(std::get<protocol::RunRequest>(run)), client::ResultFromJson);
  }

  Result Validate(protocol::RunRequest request) {
    const milliseconds limit = AnswerLimit(request);
    return AskResult(protocol::ValidateRequest{std::move(request)}, limit, client::ValidationFromJson);
  }

  bool Cancel() {
    RefuseHooks();
    const auto answer = side_.Ask(client::SideRequests::Kind::kCancel, std::nullopt);
    return answer && answer->value("ok", Json()) == true;
  }

  Json Status() {
    RefuseHooks();
    const Json nothing = {{"ok", true}, {"running", nullptr}, {"text", "nothing runs"}, {"waiting", 0}};
    Json starting = nothing;
    starting["text"] = "the daemon is starting";
    return side_.Ask(client::SideRequests::Kind::kStatus, starting).value_or(nothing);
  }

  void Stop() {
    const Turn turn(this);
    failed_starts_ = 0;
    Retire(&Daemon::Stop);
  }

  std::string StderrTail() {
    const Turn turn(this);
    if (!daemon_) return last_tail_;
    daemon_->CatchUpStderr();
    return daemon_->StderrText();
  }

  const pid_t process = getpid();
  State* next_abandoned = nullptr;

  // In a forked child: closes the copies of the descriptors, unless a thread that the child does not have was
  // using them.
  void Abandon() {
    if (!mutex_.try_lock()) return;
    if (daemon_) daemon_->Abandon();
    for (auto& daemon : unkillable_) daemon->Abandon();
  }

 private:
  static constexpr milliseconds kAtOnce{60000};  // the limit of operations that run nothing
  static constexpr milliseconds kFirstPause{100}, kLongestPause{60000};  // between failed starts
  static constexpr int kStartsInARow = 5;

  // The daemon answers a passed deadline, too.
  milliseconds AnswerLimit(const protocol::RunRequest& request) const {
    return request.deadline + options_.grace;
  }

  Result AskResult(const protocol::Operation& operation, milliseconds limit, Result (*read)(Json)) {
    return Ask(
        operation, limit,
        [read](Json answer, const std::vector<LostAttempt>& lost) {
          Result result = read(std::move(answer));
          result.lost = lost;
          result.attempts = static_cast<int>(lost.size()) + 1;
          if (!lost.empty()) result.flaky = client::FlakyAt(ToString(result.status), result.attempts);
          return result;
        },
        &side_);
  }

  // A call holds it, so that calls take turns. Its constructor waits until no other thread's call goes on.
  class Turn {
   public:
    explicit Turn(State* state) : state_(state), lock_(state->mutex_, std::defer_lock) {
      state->RefuseHooks();
      if (!state->options_.interrupted) {
        lock_.lock();
      } else {
        lock_.try_lock();  // nearly always enough; ThreadSanitizer does not know the lock with a limit
      }
      while (!lock_.owns_lock() && !lock_.try_lock_for(client::kInterruptionCheck)) {
        if (client::Interrupted(state->options_))
          throw PoolError(PoolError::Kind::kInterrupted,
                          "interrupted while the call waited for another thread's call", "");
      }
      state->caller_ = std::this_thread::get_id();
    }
    ~Turn() { state_->caller_ = std::thread::id(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    State* const state_;
    std::unique_lock<std::timed_mutex> lock_;
  };

  void RefuseHooks() const {
    if (caller_ == std::this_thread::get_id() || reads_stderr_of_ == this)
      throw std::logic_error(
          "a Pool cannot be used in its own on_stderr, log or interrupted, nor in a signal handler that "
          "runs during a call of it on the same thread: the call would wait for itself");
  }

  // "; it was stopped; ..." as a text of its own.
  static std::string Diagnosis(const std::string& state) {
    return state.starts_with("; ") ? state.substr(2) : state;
  }

  void EnsureDaemon() {
    std::erase_if(unkillable_, [](auto& daemon) { return daemon->Ended() && daemon->Kill(); });
    if (daemon_ && daemon_->Ended()) {  // between two calls: not counted as an attempt
      if (options_.idle_exit <= milliseconds(0) || !daemon_->EndedInOrder())
        Log(daemon_->DescribeEnd() + " between two calls" +
            (options_.attach.empty() ? "; another is started" : ""));
      Retire(&Daemon::Kill);
    }
    if (daemon_) return;
    BackOff();
    try {
      daemon_ = std::make_unique<Daemon>(options_);
      daemon_->Greet();
      failed_starts_ = 0;
    } catch (const Lost& lost) {
      if (lost.kind != PoolError::Kind::kInterrupted) NoteFailedStart(lost.message);
      throw;
    } catch (const PoolError& error) {
      last_tail_.clear();
      last_start_failure_.reset();
      last_crash_.reset();
      NoteFailedStart(error.what());
      throw;
    }
  }

  void NoteFailedStart(std::string message) {
    ++failed_starts_;
    last_failure_ = std::move(message);
    const milliseconds pause = kFirstPause * (1 << std::min(failed_starts_ - 1, 10));
    next_start_ = Clock::now() + std::min(pause, kLongestPause);
  }

  // Every failed start is followed by a pause, twice as long as the one before. The first pauses are waited
  // for; later ones make calls fail at once.
  void BackOff() const {
    if (failed_starts_ == 0) return;
    if (failed_starts_ < kStartsInARow) {
      std::this_thread::sleep_until(next_start_);  // less than a second
    } else if (const auto left = next_start_ - Clock::now(); left > Clock::duration::zero()) {
      throw PoolError(PoolError::Kind::kStart,
                      "cppoold has failed to start " + std::to_string(failed_starts_) +
                          " times in a row and is not started for another " +
                          client::Seconds(std::chrono::ceil<milliseconds>(left)) +
                          ", or until Pool::Stop() is called. The last failure: " + last_failure_,
                      last_tail_, 1, last_start_failure_);
    }
  }

  // Ends the daemon. False: it has not ended, and is kept to be reaped later.
  bool Retire(bool (Daemon::*end)()) {
    if (!daemon_) return true;
    std::unique_ptr<Daemon> daemon = std::move(daemon_);
    bool ended = (daemon.get()->*end)();
    last_tail_ = daemon->StderrText();
    last_start_failure_ = daemon->WhyNotStarted();
    last_crash_ = daemon->WhyCrashed();
    if (end == &Daemon::Stop && last_crash_)  // in a destructor of a library: no call fails for it
      Log(daemon->DescribeEnd() + " when it was stopped: " + last_crash_->error);
    if (!ended) unkillable_.push_back(std::move(daemon));
    return ended;
  }

  // The cause comes first: what happened to the next daemon may be its consequence.
  static std::string AfterCause(const std::vector<LostAttempt>& earlier, const std::string& message) {
    return earlier.empty() ? message : earlier.back().error + "; then " + message;
  }

  void Log(std::string_view line) const { client::Log(options_, line); }

  static thread_local const State* reads_stderr_of_;  // set on the thread that calls on_stderr
  PoolOptions options_;
  client::SideRequests side_;
  std::timed_mutex mutex_;                 // A Turn holds it.
  std::atomic<std::thread::id> caller_{};  // the thread whose turn it is
  std::unique_ptr<Daemon> daemon_;
  std::vector<std::unique_ptr<Daemon>> unkillable_;
  std::string last_tail_;                           // The daemon that ended last wrote it, as the next two.
  std::optional<StartFailure> last_start_failure_;  // absent when that daemon had started
  std::optional<Crash> last_crash_;                 // absent when that daemon did not crash
  int failed_starts_ = 0;                           // in a row; the last of them set the next two
  std::string last_failure_;
  Clock::time_point next_start_;
};

thread_local const Pool::State* Pool::State::reads_stderr_of_ = nullptr;

namespace {

// Throws std::invalid_argument for texts that a command line cannot hold, and for limits out of range.
PoolOptions Checked(PoolOptions options) {
  auto refuse = [](const std::string& what) { throw std::invalid_argument("PoolOptions: " + what); };
  std::vector<std::pair<std::string, const std::string*>> texts = {
      {"daemon", &options.daemon},     {"backend", &options.backend},     {"transport", &options.transport},
      {"sentinel", &options.sentinel}, {"log_level", &options.log_level}, {"attach", &options.attach}};
  for (const std::string& text : options.devices) texts.emplace_back("devices", &text);
  for (const std::string& text : options.case_files) texts.emplace_back("case_files", &text);
  for (const std::string& text : options.arguments) texts.emplace_back("arguments", &text);
  for (const auto& [name, value] : options.environment) {
    if (name.empty() || name.find('=') != std::string::npos)
      refuse("environment: '" + name + "' is not the name of a variable");
    texts.insert(texts.end(), {{"environment", &name}, {"environment", &value}});
  }
  for (const auto& [name, text] : texts)
    if (text->find('\0') != std::string::npos) refuse(name + " cannot hold a zero byte");
  if (options.sentinel.find('\n') != std::string::npos) refuse("sentinel: an answer is one line");
  if (options.retries < 0) refuse("retries must be 0 or more");
  if (!options.attach.empty()) {
    client::SocketAddress(client::SocketPath(options.attach));
    if (options.idle_exit > milliseconds(0))
      refuse("idle_exit cannot be given with attach: `cppool serve --idle-exit` says it for the server");
  }
  for (const auto& [name, limit] :
       {std::pair("start_limit", options.start_limit), std::pair("grace", options.grace),
        std::pair("kill_grace", options.kill_grace), std::pair("idle_exit", options.idle_exit),
        std::pair("queue_limit", options.queue_limit)})
    if (limit < milliseconds(0) || limit > std::chrono::hours(24))
      refuse(std::string(name) + " must be from 0 to 24 h");
  return options;
}

}  // namespace

Pool::Pool(PoolOptions options)
    : options_(std::make_shared<const PoolOptions>(Checked(std::move(options)))),
      state_(new State(*options_)) {}

Pool::~Pool() { delete &OfThisProcess(); }

Pool::State& Pool::OfThisProcess() const {
  static std::atomic<State*> abandoned{nullptr};  // keeps them reachable for leak checkers
  State* state = state_.load();
  while (state->process != getpid()) {
    auto fresh = std::make_unique<State>(*options_);
    if (!state_.compare_exchange_strong(state, fresh.get()))
      continue;  // another thread of this child has replaced it
    state->Abandon();
    state->next_abandoned = abandoned.load();
    while (!abandoned.compare_exchange_weak(state->next_abandoned, state)) {
    }
    return *fresh.release();
  }
  return *state;
}

Result Pool::Run(const Json& params, const RunOptions& options) {
  return client::PoolAccess::RunAsItIs(*this, client::ToRequest(params, options));
}

Result Pool::Validate(const Json& params, const RunOptions& options) {
  return OfThisProcess().Validate(client::ToRequest(params, options));
}

Result client::PoolAccess::Run(Pool& pool, protocol::RunRequest request) {
  return RunAsItIs(pool, Complete(std::move(request)));
}

Result client::PoolAccess::RunAsItIs(Pool& pool, protocol::RunRequest request) {
  const auto asked = std::make_shared<const Asked>(Asked{pool.options_, std::move(request)});
  try {
    Result result = pool.OfThisProcess().Run(asked->operation);
    result.asked = asked;
    return result;
  } catch (PoolError& error) {
    error.asked_ = asked;
    throw;
  }
}

Result client::PoolAccess::Validate(Pool& pool, protocol::RunRequest request) {
  return pool.OfThisProcess().Validate(Complete(std::move(request)));
}

Json client::PoolAccess::Ask(Pool& pool, const protocol::Operation& operation) {
  return pool.OfThisProcess().AskAny(operation);
}

void client::PoolAccess::KeepTurn(Pool& pool, bool keep) {
  if (!pool.options().attach.empty()) pool.OfThisProcess().KeepTurn(keep);
}

bool client::PoolAccess::IsUp(Pool& pool) { return pool.OfThisProcess().IsUp(); }

Json Pool::Hello() { return OfThisProcess().Ask(protocol::HelloRequest{}); }
Json Pool::List(const std::vector<std::string>& load) {
  return OfThisProcess().Ask(protocol::ListRequest{client::AbsolutePaths(load)});
}
Json Pool::Stats() { return OfThisProcess().Ask(protocol::StatsRequest{}); }

std::vector<std::string> Pool::Features() { return OfThisProcess().Features(); }

bool Pool::Cancel() { return OfThisProcess().Cancel(); }

Json Pool::Status() { return OfThisProcess().Status(); }

void Pool::Stop() { OfThisProcess().Stop(); }

std::string Pool::StderrTail() const { return OfThisProcess().StderrTail(); }

struct Pools::Node {
  Node(PoolOptions options, int world_size) : pool(WithWorldSize(std::move(options), world_size)) {}
  static PoolOptions WithWorldSize(PoolOptions options, int world_size) {
    options.world_size = world_size;
    return options;
  }
  Pool pool;
  Node* next = nullptr;
};

Pools::Pools(PoolOptions options) : options_(Checked(std::move(options))) {}

Pools::~Pools() {
  for (Node* node = head_.load(); node != nullptr;) delete std::exchange(node, node->next);
}

Pool& Pools::At(int world_size) {
  std::unique_ptr<Node> fresh;
  for (Node* head = head_.load();;) {
    for (Node* node = head; node != nullptr; node = node->next)
      if (node->pool.options().world_size == world_size) return node->pool;
    if (!fresh) fresh = std::make_unique<Node>(options_, world_size);
    fresh->next = head;
    if (head_.compare_exchange_strong(head, fresh.get())) return fresh.release()->pool;
  }
}

Result Pools::Run(const Cell& cell, RunOptions options) {
  options.case_name = cell.case_name;
  return At(cell.world_size).Run(cell.params, options);
}

Pools& SharedPools() {
  static Pools pools = [] {
    PoolOptions options;
    if (const char* server = std::getenv("CPPOOL_ATTACH")) options.attach = server;
    return Pools(std::move(options));
  }();
  return pools;
}

void Pools::Stop() {
  for (Node* node = head_.load(); node != nullptr; node = node->next) node->pool.Stop();
}

}  // namespace cppool
