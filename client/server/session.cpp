#include "client/server/session.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>
#include <utility>

#include "client/src/connection.h"
#include "client/src/describe.h"
#include "client/src/members.h"
#include "client/src/request.h"
#include "protocol/features.h"
#include "protocol/json_text.h"
#include "protocol/response.h"
#include "protocol/run_record.h"

namespace cppool::server {
namespace {

using protocol::FailureKind;

constexpr std::size_t kMostWaiting = 64;       // requests of a client that have been read
constexpr std::size_t kMostUnsent = 64 << 20;  // bytes of answers: a client that reads no more is dropped
constexpr std::size_t kMostStderr = 64 << 20;  // bytes: a client that reads no more misses lines
constexpr std::size_t kWritten = 1 << 20;      // bytes that are kept though they are written
constexpr int kStderrWaitMs = 5000;            // for a client that reads nothing of them
constexpr int kStderrLookMs = 100;             // whether it is still there
constexpr std::size_t kMostCommand = 60;       // characters of a client's command that others are shown

Json Refused(const std::string& why, const std::optional<Json>& id) {
  return protocol::ErrorResponse({FailureKind::kInvalidRequest, std::nullopt, "", why}, id);
}

Json Cancelled(const std::optional<Json>& id) {
  return protocol::ErrorResponse({FailureKind::kCancelled, std::nullopt, "", "the request was cancelled"},
                                 id);
}

std::string NameOf(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline", std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();  // an iterator would throw when the process ends meanwhile
  std::string command = text.str();
  std::ranges::replace(command, '\0', ' ');
  while (command.ends_with(' ')) command.pop_back();
  if (command.size() > kMostCommand) command = command.substr(0, kMostCommand) + "...";
  return "pid " + std::to_string(pid) + (command.empty() ? "" : " (" + command + ")");
}

// The server reads requests itself: what it does not know its clients cannot ask for.
void KeepKnownFeatures(Json& hello) {
  if (!hello.contains("features") || !hello["features"].is_array()) return;
  static const std::set<std::string> known = [] {
    std::set<std::string> names(std::begin(protocol::kFeatures), std::end(protocol::kFeatures));
    protocol::ForEach(protocol::kRunMembers, [&](const auto& member) { names.insert(member.name); });
    return names;
  }();
  Json kept = Json::array();
  for (const Json& feature : hello["features"])
    if (feature.is_string() && known.count(feature.get_ref<const std::string&>()) != 0)
      kept.push_back(feature);
  hello["features"] = std::move(kept);
}

// {"op": "turn", "keep": true}, which daemons do not have: the id, and whether to keep it.
std::optional<std::pair<std::optional<Json>, bool>> ParseTurn(std::string_view line) {
  if (line.find("\"turn\"") == std::string_view::npos) return std::nullopt;
  const Json json = Json::parse(line, nullptr, false);
  if (!json.is_object() || json.value("op", Json()) != "turn") return std::nullopt;
  std::optional<Json> id;
  if (json.contains("id")) id = json["id"];
  if (!json.contains("keep") || !json["keep"].is_boolean() || json.size() != (id ? 3 : 2))
    throw protocol::RequestError("\"turn\" has the member \"keep\", true or false, and no other", id);
  return {{id, json["keep"].get<bool>()}};
}

}  // namespace

bool Session::Item::is_run() const {
  const auto* operation = std::get_if<protocol::Operation>(&work);
  return operation && protocol::RunOf(*operation);
}

Session::Session(Host& host, base::UniqueFd socket, pid_t pid)
    : host_(host),
      socket_(std::move(socket)),
      pidfd_(pid > 0 ? client::OpenPidfd(pid) : -1),
      name_(NameOf(pid)),
      client_(pid > 0 ? "process " + std::to_string(pid) : "socket " + std::to_string(socket_.get())) {}

void Session::Serve() {
  std::thread other([this] { Loop(); });
  Loop();
  other.join();
  kept_.End();
}

void Session::Loop() {
  std::unique_lock reading(reading_);
  while (const auto line = NextLine()) {
    Take(*line);
    if (!StartWork()) continue;
    reading.unlock();
    Work();
    reading.lock();
  }
}

std::optional<protocol::LineReader::Line> Session::NextLine() {
  for (bool has_room = true; !over_;) {
    if (auto line = lines_.Next()) return line;
    bool idle = false;
    {
      const std::lock_guard lock(mutex_);
      has_room = queue_.size() < kMostWaiting;
      idle = !working_ && queue_.empty();
    }
    const bool flushed = Flush(), wrote = FlushStderr();
    if (last_ && idle && flushed) break;
    const auto events = static_cast<short>((has_room && !last_ ? POLLIN : 0) | (flushed ? 0 : POLLOUT));
    pollfd fds[4] = {{socket_.get(), events, 0},
                     {wake_.fd(), POLLIN, 0},
                     {pidfd_.get(), POLLIN, 0},
                     {wrote ? -1 : errors_.get(), POLLOUT, 0}};
    // Without a limit: the other thread and the server wake it.
    if (poll(fds, 4, -1) < 0) continue;
    if (fds[1].revents != 0) wake_.Clear();
    if ((fds[0].revents & (POLLHUP | POLLERR)) != 0 || fds[2].revents != 0 || host_.stopping()) break;
    if ((fds[0].revents & POLLIN) == 0 || Receive()) continue;
    last_ = true;  // a client that has shut down its side still gets its answers
    if (auto line = lines_.Finish()) return line;
  }
  over_ = true;
  given_up_ = true;
  {
    const std::lock_guard lock(mutex_);
    queue_.clear();
  }
  host_.pools().Wake();
  return std::nullopt;
}

bool Session::Receive() {
  char buffer[65536];
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))];
  iovec bytes = {buffer, sizeof buffer};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t count = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part) + at, sizeof descriptor);
      base::UniqueFd owned(descriptor);
      if (errors_ || begun_) continue;  // one is taken, with the first line
      fcntl(descriptor, F_SETFL, O_NONBLOCK);
      errors_ = std::move(owned);
    }
  }
  lines_.Append({buffer, static_cast<std::size_t>(count)});
  return count > 0;
}

void Session::Take(const protocol::LineReader::Line& line) {
  if (line.text.find_first_not_of(" \t") == std::string::npos && !line.overlong) return;
  if (!begun_) {
    begun_ = true;
    if (line.overlong) {
      Send(Refused("the first line has more than " + std::to_string(protocol::kMaxRequestBytes) + " bytes",
                   {}));
      last_ = true;
      return;
    }
    Begin(line.text);
    return;
  }
  if (!pool_ || shut_) return;  // after `ps`, `stop`, a refusal or `shutdown`
  if (line.overlong)
    return Push(
        {std::nullopt,
         Refused("the request has more than " + std::to_string(protocol::kMaxRequestBytes) + " bytes", {})});
  try {
    if (auto turn = ParseTurn(line.text)) return Push({std::move(turn->first), turn->second});
    protocol::Request request = protocol::ParseRequest(line.text);
    if (const auto* cancel = std::get_if<protocol::CancelRequest>(&request.operation))
      return Cancel(cancel->cancels, request.id);
    if (std::holds_alternative<protocol::StatusRequest>(request.operation)) return Status(request.id);
    Push({std::move(request.id), std::move(request.operation)});
  } catch (const protocol::RequestError& error) {
    Push({error.id, Refused(error.what(), error.id)});
  }
}

void Session::Begin(const std::string& line) {
  std::optional<Json> id;
  Json answer;
  try {
    const Json wanted = protocol::ParseJson(line);
    if (!wanted.is_object()) throw std::invalid_argument("the first line is not a JSON object");
    if (wanted.contains("id")) id = wanted["id"];
    const Json op = wanted.value("op", Json());
    if (op == "attach") {
      wanted_ = client::ReadAttachLine(wanted, host_.launch());
      pool_ = host_.pools().At(wanted_);
      answer = {{"pid", getpid()}, {"features", client::kServerFeatures}};
    } else if (op == "ps" || op == "stop") {
      Json any;
      client::Members members(wanted, protocol::EchoValue(op));
      for (const char* key : {"op", "id"}) members.Take(key, &any);
      members.End();
      answer = op == "ps" ? host_.Describe() : Json{{"pid", getpid()}};
    } else {
      throw std::invalid_argument(
          "the first line of a connection to a server has \"op\": \"attach\", \"ps\" or "
          "\"stop\", and not " +
          protocol::EchoValue(op));
    }
    Send(protocol::OkResponse(std::move(answer), id));
    if (op == "stop") host_.Stop();
  } catch (const std::exception& error) {
    Send(Refused(error.what(), id));
  }
  last_ = last_ || !pool_;
}

void Session::Push(Item item) {
  const std::lock_guard lock(mutex_);
  // The other thread may have answered `shutdown` since the line was read.
  if (!shut_) queue_.push_back(std::move(item));
}

bool Session::StartWork() {
  const std::lock_guard lock(mutex_);
  if (working_ || queue_.empty()) return false;
  working_ = true;
  return true;
}

void Session::Work() {
  for (;;) {
    bool wake = false;
    {
      const std::lock_guard lock(mutex_);
      wake = queue_.size() >= kMostWaiting;
      if (queue_.empty()) {
        working_ = false;
        current_.reset();
        break;
      }
      current_ = std::move(queue_.front());
      queue_.pop_front();
      if (!IsGone()) given_up_ = false;
    }
    if (wake) Wake();
    Json answer = AnswerTo(*current_);
    {
      const std::lock_guard lock(mutex_);
      ended_cancelled_ = protocol::FailedWith(answer, FailureKind::kCancelled);
      current_->work = Json();  // it can no longer be cancelled
    }
    EndStderr(answer);
    Send(answer);
  }
  Wake();  // perhaps it was all
}

Json Session::AnswerTo(const Item& item) {
  if (const Json* answer = std::get_if<Json>(&item.work)) return *answer;
  try {
    if (const bool* keep = std::get_if<bool>(&item.work)) {
      kept_.End();
      if (*keep) kept_ = host_.pools().Keep(*pool_, *this, wanted_.queue_limit);
      return protocol::OkResponse(Json::object(), item.id);
    }
    protocol::Operation operation = std::get<protocol::Operation>(item.work);
    if (auto* run = std::get_if<protocol::RunRequest>(&operation))
      *run = client::Complete(std::move(*run), wanted_.folder);
    if (auto* validate = std::get_if<protocol::ValidateRequest>(&operation))
      validate->run = client::Complete(std::move(validate->run), wanted_.folder);
    if (auto* list = std::get_if<protocol::ListRequest>(&operation))
      list->load = client::AbsolutePaths(list->load, wanted_.folder);
    if (std::holds_alternative<protocol::ShutdownRequest>(operation)) {  // of this connection
      const std::lock_guard lock(mutex_);
      queue_.clear();
      last_ = shut_ = true;
      return protocol::OkResponse(Json::object(), item.id);
    }
    Json answer = host_.pools().Ask(*pool_, operation, *this, wanted_.queue_limit);
    if (std::holds_alternative<protocol::HelloRequest>(operation)) KeepKnownFeatures(answer);
    protocol::SetId(answer, item.id);
    return answer;
  } catch (const GivenUp&) {
    return Cancelled(item.id);
  } catch (const PoolError& error) {
    return Lost(error, item.id);
  } catch (const std::exception& error) {
    return Refused(error.what(), item.id);
  }
}

Json Session::Lost(const PoolError& error, const std::optional<Json>& id) const {
  protocol::Failure failure = client::FailureOf(error);
  std::string_view kind = ToString(error.kind());
  if (host_.stopping()) {
    kind = ToString(PoolError::Kind::kDied);
    failure = {FailureKind::kInternal, std::nullopt, "",
               "the server was stopped while the request was under way"};
  }
  Json answer = protocol::ErrorResponse(failure, id);
  answer["lost"] = {{"kind", kind}, {"error", failure.detail}, {"diagnosis", error.diagnosis()}};
  return answer;
}

void Session::Cancel(const Json& cancels, const std::optional<Json>& id) {
  for (bool tried = false;; tried = true) {
    {
      const std::lock_guard lock(mutex_);
      const auto meant = [&](const Item& item) { return item.is_run() && item.id == cancels; };
      const bool current = current_ && meant(*current_);
      const auto waits = std::ranges::find_if(queue_, meant);
      const auto count = std::ranges::count_if(queue_, meant) + (current ? 1 : 0);
      if (tried && !current && ended_cancelled_) return Send(protocol::OkResponse(Json::object(), id));
      if (count != 1)
        return Send(Refused(count == 0
                                ? "no request with the id " + protocol::EchoValue(cancels) + " waits or runs"
                                : std::to_string(count) + " requests have the id " +
                                      protocol::EchoValue(cancels) + ": none is cancelled",
                            id));
      if (!current) {
        Send(Cancelled(waits->id));
        queue_.erase(waits);
        return Send(protocol::OkResponse(Json::object(), id));
      }
      given_up_ = true;  // if it has no turn yet
    }
    host_.pools().Wake();
    try {
      if (pool_->Cancel(*this)) return Send(protocol::OkResponse(Json::object(), id));
    } catch (const PoolError& error) {
      return Send(Lost(error, id));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until it has reached the daemon
  }
}

void Session::Status(const std::optional<Json>& id) {
  Json answer = {{"ok", true}, {"running", nullptr}, {"text", "nothing runs"}};
  std::optional<Json> running;
  std::size_t waiting = 0;
  {
    const std::lock_guard lock(mutex_);
    waiting = queue_.size();
    if (current_ && current_->is_run()) running = current_->id;
    if (current_ && !std::holds_alternative<Json>(current_->work))
      answer["text"] = "the request waits for its turn or for the start of its daemon";
  }
  try {
    if (auto of_pool = pool_->Status(*this)) answer = std::move(*of_pool);
  } catch (const PoolError& error) {
    return Send(Lost(error, id));
  }
  if (answer.contains("running") && answer["running"].is_object())
    protocol::SetId(answer["running"], running);
  answer["waiting"] = waiting;
  protocol::SetId(answer, id);
  Send(answer);
}

void Session::TakeStderr(std::string_view line) {
  if (!errors_) return;
  bool first = false;
  {
    const std::lock_guard lock(output_);
    if (stderr_.left() + line.size() >= kMostStderr) {
      left_out_ += line.size() + 1;
      return;
    }
    first = stderr_.text.empty();
    stderr_.text.append(line) += '\n';
  }
  if (!FlushStderr() && first) Wake();  // the rest is for the thread that reads
}

void Session::EndStderr(Json& answer) {
  for (int waited_ms = 0; !FlushStderr() && !IsGone();) {
    pollfd ready = {errors_.get(), POLLOUT, 0};
    waited_ms = poll(&ready, 1, kStderrLookMs) == 0 ? waited_ms + kStderrLookMs : 0;
    if (waited_ms < kStderrWaitMs) continue;
    const std::lock_guard lock(output_);
    left_out_ += stderr_.left();
    stderr_ = {};
  }
  const std::lock_guard lock(output_);
  if (left_out_ == 0) return;
  Json& warnings = answer["warnings"];
  if (!warnings.is_array()) warnings = Json::array();
  warnings.push_back(std::to_string(std::exchange(left_out_, 0)) +
                     " bytes of the daemon's stderr are left out, since the client did not read them");
}

void Session::TakeLog(std::string_view line) {
  if (auto progress = client::ProgressOf(line)) {
    {
      const std::lock_guard lock(mutex_);
      if (current_) protocol::SetId(*progress, current_->id);
    }
    SendText(protocol::SerializeResponse(*progress, wanted_.sentinel), true);
  } else if (!wanted_.sentinel.empty()) {
    SendText(std::string(line) + "\n", true);
  }
}

bool Session::IsGone() {
  pollfd fds[2] = {{socket_.get(), 0, 0}, {pidfd_.get(), POLLIN, 0}};
  return host_.stopping() || (poll(fds, 2, 0) > 0 && (fds[0].revents | fds[1].revents) != 0);
}

void Session::Send(const Json& answer) {
  SendText(protocol::SerializeResponse(answer, wanted_.sentinel), false);
}

void Session::SendText(const std::string& text, bool may_be_left_out) {
  bool drop = false;
  {
    const std::lock_guard lock(output_);
    if (may_be_left_out && !unsent_.text.empty()) return;
    unsent_.text += text;
    drop = unsent_.left() > kMostUnsent;
  }
  if (drop) shutdown(socket_.get(), SHUT_RDWR);  // the thread that reads notices it
  if (!Flush()) Wake();                          // the rest is for the thread that reads
}

bool Session::Flush(Unwritten& output, const base::UniqueFd& to) {
  const std::lock_guard lock(output_);
  while (output.left() > 0) {
    const ssize_t count = write(to.get(), output.text.data() + output.written, output.left());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) {
      if (output.written > kWritten) output.text.erase(0, std::exchange(output.written, 0));
      return false;
    }
    if (count < 0) break;  // nobody reads it
    output.written += static_cast<std::size_t>(count);
  }
  output = {};
  return true;
}

}  // namespace cppool::server
