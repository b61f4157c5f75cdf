#include "client/src/daemon.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <sstream>
#include <system_error>

#include "base/poll_timeout.h"
#include "base/words.h"
#include "client/src/attach.h"
#include "client/src/connection.h"
#include "client/src/process.h"
#include "client/src/process_state.h"
#include "protocol/json_text.h"

namespace cppool::client {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kMaxResponseBytes = 16 << 20;
// Limit for a daemon that has closed a pipe to end, and for its last stderr to arrive.
constexpr milliseconds kLastWords{500};
constexpr milliseconds kFirstReading{1000};
// For the answer to a request that is cancelled: the limits of a daemon after a failure, and what it needs to
// write it.
constexpr milliseconds kCancelLimit{1500};
constexpr milliseconds kServerIsSlow{5000};
constexpr milliseconds kSideLimit{500};  // for what is answered at once

base::SpawnCommand DaemonCommand(const PoolOptions& options) {
  base::SpawnCommand command;
  command.path = FindDaemon(options);
  command.arguments = DaemonArguments(options);
  // With it the daemon notices that its parent died before it could watch the parent.
  command.environment.push_back("CPPOOL_PARENT_PID=" + std::to_string(getpid()));
  if (options.launch)  // it says before who has not come
    command.environment.push_back("CPPOOL_START_LIMIT_MS=" + std::to_string(options.start_limit.count()));
  if (!options.devices.empty())
    command.environment.push_back("CUDA_VISIBLE_DEVICES=" + base::Join(options.devices, ","));
  for (const auto& [name, value] : options.environment) command.environment.push_back(name + "=" + value);
  return command;
}

// Returns where the path of a daemon that does not start can be mended.
std::string WhoNames(const PoolOptions& options) {
  if (!options.daemon.empty()) return " (the option `daemon` names it)";
  const char* path = getenv("CPPOOL_DAEMON");
  return path != nullptr && *path != '\0' ? " (CPPOOL_DAEMON names it)" : "";
}

std::string Excerpt(std::string_view text) {
  constexpr std::size_t kLength = 200;
  return text.size() <= kLength ? std::string(text) : std::string(text.substr(0, kLength)) + "...";
}

}  // namespace

std::string Seconds(milliseconds time) {
  std::ostringstream text;
  text << static_cast<double>(time.count()) / 1000.0 << " s";
  return text.str();
}

void Log(const PoolOptions& options, std::string_view line) {
  if (!options.log) return;
  try {
    options.log(line);
  } catch (...) {  // dropped, as pool.h says
  }
}

bool Interrupted(const PoolOptions& options) {
  try {
    return options.interrupted && options.interrupted();
  } catch (...) {  // dropped, as those of the other functions
    return false;
  }
}

std::vector<std::string> DaemonArguments(const PoolOptions& options) {
  // Who names GPUs wants them: without a GPU that is an error and no run on the host.
  const bool gpus =
      std::ranges::any_of(options.devices, [](const std::string& device) { return !device.empty(); });
  const std::string backend = options.backend == "auto" && gpus ? "cuda" : options.backend;
  std::vector<std::string> arguments = {"--world-size", std::to_string(options.world_size),
                                        "--backend",    backend,
                                        "--transport",  options.transport,
                                        "--sentinel",   options.sentinel};
  const auto add = [&](const char* option, const std::string& value) {
    arguments.insert(arguments.end(), {option, value});
  };
  for (const std::string& file : options.case_files) add("--case", file);
  if (options.python) add("--python", *options.python);
  for (const std::string& module : options.preload) add("--preload", module);
  if (options.launch) add("--launch", *options.launch);
  if (!options.log_level.empty()) add("--log-level", options.log_level);
  if (options.idle_exit > milliseconds(0)) {
    const auto ms = options.idle_exit.count();  // by hand: a harness's locale may write a comma
    add("--idle-exit", std::to_string(ms / 1000) + "." + std::to_string(1000 + ms % 1000).substr(1));
  }
  arguments.insert(arguments.end(), options.arguments.begin(), options.arguments.end());
  return arguments;
}

Daemon::Daemon(const PoolOptions& options) : options_(options), reader_(kMaxResponseBytes) {
  if (attached()) try {
      peer_ = Connection::Open(options);
      tail_ = std::make_unique<StderrTail>(peer_->TakeErrors(), options.on_stderr);
      return;
    } catch (const std::exception& error) {
      throw PoolError(PoolError::Kind::kStart, error.what(), "");
    }
  base::SpawnCommand command = DaemonCommand(options);
  if (command.path.empty())
    throw PoolError(
        PoolError::Kind::kStart,
        "cppoold was not found beside this program, in its prefix, in PATH or in " CPPOOL_INSTALL_BINDIR
        "; set CPPOOL_DAEMON or PoolOptions::daemon to its path",
        "");
  try {
    peer_ = Process::Spawn(command);
    tail_ = std::make_unique<StderrTail>(peer_->TakeErrors(), options.on_stderr);
  } catch (const std::system_error& error) {
    const std::string what = error.what();
    const bool of_path = what.starts_with(command.path + ": ");
    throw PoolError(PoolError::Kind::kStart,
                    "cannot start " + (of_path ? what : command.path + ": " + what) + WhoNames(options), "");
  }
}

void Daemon::Greet() {
  auto refuse = [](const std::string& message) { throw Lost{PoolError::Kind::kStart, message}; };
  Json answer;
  try {
    answer = Ask(protocol::HelloRequest{}, Clock::now() + options_.start_limit + Slack());
  } catch (const Lost& lost) {
    if (lost.kind == PoolError::Kind::kInterrupted || lost.told) throw;
    if (lost.kind == PoolError::Kind::kTimeout)
      refuse(Name() + "did not answer `hello` within " + Seconds(options_.start_limit) + " of its start" +
             lost.state);
    refuse(lost.message + " at its start");
  }
  auto member = [&](const char* name) { return answer.value(name, Json()); };
  if (member("ok") != true) refuse(Name() + "answered `hello` with " + Excerpt(protocol::JsonText(answer)));
  if (member("protocol") != protocol::kProtocolVersion)
    refuse(Name() + "speaks protocol " + protocol::JsonText(member("protocol")) + ", this client " +
           std::to_string(protocol::kProtocolVersion) + ": install both from one build");
  if (member("world_size") != options_.world_size)
    refuse(Name() + "says that its world size is another one: " + protocol::JsonText(member("world_size")));
  for (const Json& feature : answer.value("features", Json::array()))
    if (feature.is_string()) features_.push_back(feature.get<std::string>());
  tail_->ForgetStart();
}

bool Daemon::Has(std::string_view feature) const {
  return std::ranges::find(features_, feature) != features_.end();
}

void Daemon::SendSide(std::int64_t id, SideRequests& side, std::string& outgoing) {
  for (auto& [kind, answer] : side.Take()) {
    const bool cancel = kind == SideRequests::Kind::kCancel;
    if (!Has(cancel ? "cancel" : "status")) {
      answer.set_exception(std::make_exception_ptr(PoolError(
          PoolError::Kind::kProtocol,
          Name() + "has no feature `" + (cancel ? "cancel" : "status") + "`: it is older than this client",
          "")));
      continue;
    }
    protocol::Operation operation = protocol::StatusRequest{};
    if (cancel) operation = protocol::CancelRequest{Json(id)};
    side_answers_[++last_id_] = std::move(answer);
    outgoing += protocol::SerializeRequest({Json(last_id_), std::move(operation)}) + "\n";
  }
}

void Daemon::AskToCancel(std::int64_t id, std::string& outgoing) {
  if (Has("status")) {
    status_id_ = ++last_id_;
    outgoing += protocol::SerializeRequest({Json(status_id_), protocol::StatusRequest{}}) + "\n";
  }
  side_answers_[++last_id_] = {};
  outgoing += protocol::SerializeRequest({Json(last_id_), protocol::CancelRequest{Json(id)}}) + "\n";
}

bool Daemon::GiveSideAnswer(const Json& id, const Json& answer) {
  if (!id.is_number_integer()) return false;
  if (status_id_ != 0 && id == status_id_) {
    where_ = answer.value("text", "");
    return true;
  }
  const auto found = side_answers_.find(id.get<std::int64_t>());
  if (found == side_answers_.end()) return false;
  found->second.set_value(answer);
  side_answers_.erase(found);
  return true;
}

// An answer that is left would meet the next request.
void Daemon::AwaitSideAnswers() {
  const auto until = Clock::now() + kSideLimit;
  pollfd fd = {peer_->output(), POLLIN, 0};
  Json ignored;
  try {
    while (!side_answers_.empty() && Clock::now() < until) {
      while (NextAnswer(0, until, &ignored)) {
      }
      if (!side_answers_.empty() && poll(&fd, 1, base::PollTimeout(until)) > 0 && !Receive()) return;
    }
  } catch (const Lost&) {  // for the next request
  }
}

Json Daemon::Ask(protocol::Operation operation, Clock::time_point until, SideRequests* side) {
  const std::int64_t id = ++last_id_;
  return AskLine(id, protocol::SerializeRequest({Json(id), std::move(operation)}) + "\n", until, side);
}

void Daemon::KeepTurn(bool keep, Clock::time_point until) {
  const std::int64_t id = ++last_id_;
  AskLine(id, protocol::JsonText({{"op", "turn"}, {"id", id}, {"keep", keep}}) + "\n", until, nullptr);
}

Json Daemon::AskLine(std::int64_t id, std::string outgoing, Clock::time_point until, SideRequests* side) {
  DropStale(until);
  std::string_view unsent = outgoing;
  bool interrupted = false;
  status_id_ = 0;
  where_.clear();
  // What is asked beside the request is answered before this returns, or not at all.
  struct Unanswered {
    std::map<std::int64_t, SideRequests::Answer>& answers;
    ~Unanswered() {
      for (auto& [number, answer] : answers) answer.set_value(std::nullopt);
      answers.clear();
    }
  } const unanswered{side_answers_};
  if (side) side->Sent();
  int input = peer_->input();
  // The daemon's state is read near the end of the wait and at its end: the difference shows which threads
  // work.
  const auto start = Clock::now();
  const auto read_state_at = until - std::min<Clock::duration>(kFirstReading, (until - start) / 2);
  std::optional<ProcessState> state;
  auto check_at = start + kInterruptionCheck;
  for (;;) {
    Json answer;
    if (NextAnswer(id, until, &answer)) {
      AwaitSideAnswers();
      ThrowLost(answer);
      if (!interrupted) return answer;
      const bool fatal = answer.value("fatal", Json()) == true;
      throw Lost{
          PoolError::Kind::kInterrupted,
          "the request was cancelled, since the call was interrupted" + (where_.empty() ? "" : ": " + where_),
          false, where_, !fatal};
    }
    const auto now = Clock::now();
    if (now >= until && interrupted)
      throw Lost{
          PoolError::Kind::kInterrupted,
          Name() + "was killed, since the call was interrupted" + (where_.empty() ? "" : ": " + where_),
          false, where_};
    if (now >= until) {
      throw Lost{PoolError::Kind::kTimeout, Name() + "did not answer", false,
                 Describe(state.value_or(ProcessState{}), ReadProcessState(peer_->pid()))};
    }
    if (!state && now >= read_state_at) state = ReadProcessState(peer_->pid());
    pollfd fds[4] = {{input, static_cast<short>(unsent.empty() ? 0 : POLLOUT), 0},
                     {peer_->output(), POLLIN, 0},
                     {peer_->pidfd(), POLLIN, 0},
                     {side && unsent.empty() ? side->fd() : -1, POLLIN, 0}};
    int wait = base::PollTimeout(state ? until : read_state_at);
    if (peer_->pidfd() < 0) wait = std::min(wait, 50);  // without a pidfd: poll whether it has ended
    if (options_.interrupted && !interrupted) wait = std::min(wait, base::PollTimeout(check_at));
    const bool signalled = poll(fds, 4, wait) < 0;
    if (options_.interrupted && !interrupted && (signalled || Clock::now() >= check_at)) {
      check_at = Clock::now() + kInterruptionCheck;
      interrupted = Interrupted(options_);
      if (interrupted && (!side || !unsent.empty() || !Has("cancel")))
        throw Lost{PoolError::Kind::kInterrupted, Name() + "was killed, since the call was interrupted"};
      if (interrupted) {
        outgoing.clear();
        AskToCancel(id, outgoing);
        unsent = outgoing;
        until = std::min(until, Clock::now() + kCancelLimit);
      }
    }
    if (signalled) continue;
    if (fds[1].revents != 0) {
      if (!Receive()) ThrowClosed("closed its stdout", until, !unsent.empty());
    } else if (peer_->Ended()) {
      if (poll(&fds[1], 1, 0) > 0 && (fds[1].revents & POLLIN) != 0) continue;  // written since the last poll
      // All has been read, even if a grandchild holds the pipe.
      ThrowClosed("ended", until, !unsent.empty());
    }
    // POLLERR: the daemon closed its stdin with a part of the request unread. POLLHUP alone: it read the
    // request and then closed its stdin; an answer may still come.
    bool refused =
        (fds[0].revents & POLLERR) != 0 || (fds[0].revents != 0 && !unsent.empty() && !Send(&unsent));
    if (refused) ThrowClosed("closed its stdin", until, !unsent.empty());
    if ((fds[0].revents & POLLHUP) != 0) input = -1;
    if (fds[3].revents != 0 && unsent.empty()) {
      outgoing.clear();
      SendSide(id, *side, outgoing);
      unsent = outgoing;
    }
  }
}

void Daemon::ThrowLost(const Json& answer) const {
  if (!attached() || !answer.contains("lost")) return;
  const Json& lost = answer["lost"];
  const auto text = [&](const char* name) {
    return lost.is_object() && lost.contains(name) && lost[name].is_string() ? lost[name].get<std::string>()
                                                                             : "";
  };
  PoolError::Kind kind = PoolError::Kind::kDied;
  for (const auto other : {PoolError::Kind::kStart, PoolError::Kind::kTimeout, PoolError::Kind::kProtocol,
                           PoolError::Kind::kInterrupted, PoolError::Kind::kQueue})
    if (text("kind") == ToString(other)) kind = other;
  throw Lost{.kind = kind, .message = text("error"), .state = text("diagnosis"), .told = true};
}

milliseconds Daemon::Slack() const {
  if (!attached()) return milliseconds(0);
  return options_.queue_limit + options_.start_limit + 2 * (options_.grace + options_.kill_grace) +
         kServerIsSlow;
}

void Daemon::DropStale(Clock::time_point until) {
  pollfd fd = {peer_->output(), POLLIN, 0};
  // It reads as much as a pipe holds, or a little more. A flood goes on; the rest is read while waiting for
  // the answer.
  for (int i = 0; i < 16 && poll(&fd, 1, 0) > 0 && (fd.revents & POLLIN) != 0 && Receive(); ++i) {
  }
  Json answer;
  while (NextAnswer(0, until, &answer) && Clock::now() < until)
    Log(options_, "an answer without a request, ignored: " + Excerpt(protocol::JsonText(answer)));
}

bool Daemon::Send(std::string_view* unsent) {
  ssize_t count = send(peer_->input(), unsent->data(), unsent->size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count > 0) unsent->remove_prefix(static_cast<std::size_t>(count));
  return count >= 0 || errno == EAGAIN || errno == EINTR;
}

bool Daemon::LeftUnread() {
  // On a Unix socket: the other side closed it with unread bytes in it.
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(peer_->input(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == ECONNRESET;
}

bool Daemon::Receive() {
  char buffer[65536];
  ssize_t count = read(peer_->output(), buffer, sizeof buffer);
  if (count > 0) reader_.Append({buffer, static_cast<std::size_t>(count)});
  return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

bool Daemon::NextAnswer(std::int64_t id, Clock::time_point until, Json* answer) {
  while (auto line = reader_.Next()) {
    auto text = protocol::StripSentinel(line->text, options_.sentinel);
    bool bare_noise = options_.sentinel.empty() && line->text.rfind('{', 0) != 0;
    if (!text || bare_noise) {
      if (!options_.log) continue;
      Log(options_, line->text);  // may be slow, for any number of lines
      if (Clock::now() >= until) return false;
      continue;
    }
    if (line->overlong)
      throw Lost{PoolError::Kind::kProtocol,
                 Name() + "answered with more than " + std::to_string(kMaxResponseBytes >> 20) + " MiB"};
    try {
      *answer = protocol::ParseJson(*text);
    } catch (const protocol::InvalidRequest& error) {
      throw Lost{PoolError::Kind::kProtocol,
                 Name() + "answered with a line that is not JSON (" + error.what() + "): " + Excerpt(*text)};
    }
    if (!answer->is_object())
      throw Lost{PoolError::Kind::kProtocol,
                 Name() + "answered with JSON that is not an object: " + Excerpt(*text)};
    auto answered = answer->find("id");
    if (answered != answer->end() && *answered == id && answer->contains("progress")) {
      Log(options_, *text);
      if (Clock::now() >= until) return false;
      continue;
    }
    if (answered != answer->end() && *answered == id) return true;
    if (answered == answer->end()) {
      // The daemon could not parse a line: it must be this request, the only one without an answer.
      if (answer->value("ok", Json()) == false) return true;
      throw Lost{PoolError::Kind::kProtocol, Name() + "answered without the id: " + Excerpt(*text)};
    }
    if (GiveSideAnswer(*answered, *answer)) continue;
    Log(options_, "an answer to another request, ignored: " + Excerpt(*text));
    if (options_.log && Clock::now() >= until) return false;
  }
  return false;
}

void Daemon::ThrowClosed(const std::string& what, Clock::time_point until, bool part_unsent) {
  // A process that ends closes its descriptors first and releases its devices afterwards, which takes time.
  const bool ended = peer_->WaitEnd(std::min(until, Clock::now() + std::max(options_.grace, kLastWords)));
  const bool unread = part_unsent || LeftUnread();  // a part of a request counts as unread
  const bool may_go = options_.idle_exit > milliseconds(0);
  if (ended)
    throw Lost{PoolError::Kind::kDied, DescribeEnd(),
               unread && (EndedInOrder() || (may_go && peer_->EndIsUnknown()))};
  throw Lost{PoolError::Kind::kProtocol, Name() + what + " and runs on", unread && may_go};
}

std::string Daemon::Name() const {
  if (attached())
    return "the server (pid " + std::to_string(peer_->pid()) + ", " + SocketPath(options_.attach) + ") ";
  return "cppoold (pid " + std::to_string(peer_->pid()) + ", world size " +
         std::to_string(options_.world_size) + ") ";
}

bool Daemon::Stop() {
  peer_->CloseInput();
  peer_->WaitEnd(Clock::now() + options_.grace);
  return Kill();
}

bool Daemon::Kill() {
  bool ended = peer_->Terminate(options_.kill_grace, options_.kill_grace);
  CatchUpStderr();
  return ended;
}

void Daemon::CatchUpStderr() { tail_->CatchUp(Clock::now() + kLastWords); }

void Daemon::Abandon() {
  peer_->Abandon();
  tail_->Abandon();
}

}  // namespace cppool::client
