#include "daemon/fork_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>
#include <system_error>
#include <tuple>

#include "base/poll_timeout.h"
#include "base/words.h"
#include "daemon/fork_template.h"
#include "daemon/log.h"
#include "daemon/process.h"
#include "daemon/process_frames.h"
#include "daemon/shared_memory.h"
#include "daemon/start_error.h"
#include "daemon/timeout_report.h"
#include "protocol/parameters.h"

namespace cppool::daemon {
namespace {

using base::UniqueFd;
using protocol::FailureKind;
using protocol::Json;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxFrame = 4 << 20;
constexpr int kFrameNesting = 70;         // results have up to 60, in a report
constexpr std::size_t kMostFrames = 256;  // of a rank that nobody takes
constexpr std::size_t kTail = 4096, kMostStacks = 64 << 10;
// Of a line: readers of stderr take 4096 bytes, with the label.
constexpr std::size_t kLongestPart = 4096 - 16;
constexpr std::size_t kMostAtOnce = 1 << 20;  // a pipe holds no more
constexpr std::size_t kPageSize = 4096, kLongestStage = 256;
constexpr std::chrono::seconds kSendLimit{10}, kEndLimit{5}, kSharedEndLimit{2};
constexpr std::chrono::milliseconds kQuiet{20};  // after the last stack of faulthandler
constexpr int kStderrWaitMs = 1000;
constexpr int kRetryMs = 2;
constexpr const char* kDevices = "CUDA_VISIBLE_DEVICES=";

UniqueFd OrThrow(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return UniqueFd(fd);
}

// A pipe whose read end does not block.
std::pair<UniqueFd, UniqueFd> MakePipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
  std::pair<UniqueFd, UniqueFd> ends{UniqueFd(fds[0]), UniqueFd(fds[1])};
  if (fcntl(fds[0], F_SETFL, O_NONBLOCK) != 0)
    throw std::system_error(errno, std::generic_category(), "fcntl");
  return ends;
}

std::pair<UniqueFd, UniqueFd> MakeSockets() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0)
    throw std::system_error(errno, std::generic_category(), "socketpair");
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Calls take(bytes) until nothing more is there at once. False: at the end.
template <typename Take>
bool ReadAll(int fd, Take take) {
  char buffer[1 << 16];
  for (std::size_t total = 0; total < kMostAtOnce;) {
    const ssize_t count = recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT);
    const ssize_t got = count < 0 && errno == ENOTSOCK ? read(fd, buffer, sizeof(buffer)) : count;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (got == 0) return false;
    total += static_cast<std::size_t>(got);
    take(std::string_view(buffer, static_cast<std::size_t>(got)));
  }
  return true;
}

// False: the other side has gone, or has not read by `limit`. The descriptors go with the first byte.
bool SendAll(int fd, std::string_view text, const std::vector<int>& descriptors, Clock::time_point limit) {
  std::array<char, CMSG_SPACE(sizeof(int) * 8)> control{};
  bool attach = !descriptors.empty();
  while (!text.empty()) {
    iovec part{const_cast<char*>(text.data()), text.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (attach) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
      std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
    }
    const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      attach = false;
      text.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (Clock::now() >= limit) return false;
      pollfd ready = {fd, POLLOUT, 0};
      poll(&ready, 1, base::PollTimeout(limit));
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

// faulthandler of a rank writes the stacks of all threads. It interrupts system calls.
const int kStacksSignal = SIGRTMAX - 3;

// kStopped; empty: nothing worth saying.
std::string DescribeState(pid_t pid) {
  const char state = StateOf(pid);
  if (state == 'T' || state == 't') return kStopped;
  return state == 'D' ? "it is in a wait of the kernel that nothing interrupts" : "";
}

}  // namespace

std::string FindPython(const std::string& wanted) {
  namespace fs = std::filesystem;
  const auto variable = [](const char* name) -> std::string {
    const char* const value = std::getenv(name);
    return value ? value : "";
  };
  std::string name = wanted, from = "--python";
  if (name.empty()) {
    name = variable("CPPOOL_PYTHON");
    from = "--python without a path: $CPPOOL_PYTHON";
  }
  if (name.empty() && !variable("VIRTUAL_ENV").empty()) {
    name = variable("VIRTUAL_ENV") + "/bin/python";
    from = "--python without a path: $VIRTUAL_ENV";
  }
  if (name.empty()) {
    name = "python3";
    from = "--python";
  }
  if (name.find('/') != std::string::npos) {
    const std::string path = fs::absolute(name).lexically_normal().string();
    if (access(path.c_str(), X_OK) != 0 || fs::is_directory(path))
      throw StartError(from + ": " + path + " is no program: give the path of a Python 3.9 or later");
    return path;
  }
  std::istringstream folders(variable("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = fs::absolute(fs::path(folder.empty() ? "." : folder) / name).string();
    if (access(path.c_str(), X_OK) == 0 && !fs::is_directory(path)) return path;
  }
  throw StartError(from + ": no program " + name + " on PATH: give the path of a Python 3.9 or later");
}

ForkedRank::ForkedRank(int rank, std::size_t most_output)
    : RankProcess(rank), most_output_(most_output), lines_(kMaxFrame) {}

ForkedRank::~ForkedRank() {
  if (page_) munmap(const_cast<unsigned char*>(page_), kPageSize);
}

pid_t ForkedRank::pid() const {
  const std::lock_guard lock(mutex_);
  return pid_;
}

bool ForkedRank::Send(const Json& frame) {
  const std::string line = protocol::JsonText(frame) + "\n";
  const std::lock_guard sending(sending_);
  return SendAll(socket_.get(), line, {}, Clock::now() + kSendLimit);
}

RankProcess::Place ForkedRank::Where() const {
  // A rank that is killed while it writes leaves the page half written: what is there then has to do.
  for (int tries = 0;; ++tries) {
    std::array<unsigned char, 28 + kLongestStage> copy;
    const auto* const sequence = reinterpret_cast<const std::uint32_t*>(page_);
    // Each load with acquire, so that the sequence is read before and after all of them.
    const std::uint32_t before = __atomic_load_n(sequence, __ATOMIC_ACQUIRE);
    for (std::size_t i = 0; i < copy.size(); ++i) copy[i] = __atomic_load_n(page_ + i, __ATOMIC_ACQUIRE);
    if ((before % 2 != 0 || __atomic_load_n(sequence, __ATOMIC_ACQUIRE) != before) && tries < 100) continue;
    std::uint32_t phase, length;
    std::uint64_t since;
    Place place;
    std::memcpy(&phase, &copy[4], 4);
    std::memcpy(&since, &copy[8], 8);
    std::memcpy(&place.iterations, &copy[16], 8);
    std::memcpy(&length, &copy[24], 4);
    place.phase = phase <= 4 ? static_cast<Phase>(phase) : Phase::kCase;
    const auto now = static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count());
    place.seconds = since > 0 && since < now ? static_cast<double>(now - since) * 1e-9 : 0;
    place.stage.assign(reinterpret_cast<const char*>(&copy[28]),
                       std::min<std::size_t>(length, kLongestStage));
    return place;
  }
}

std::optional<Json> ForkedRank::AskStacks(Clock::time_point limit) {
  {
    const std::lock_guard lock(mutex_);
    answer_.reset();
  }
  if (!Send({{"frame", "stacks"}})) return std::nullopt;
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, limit, [&] { return answer_ || end_; });
  return std::exchange(answer_, std::nullopt);
}

std::string ForkedRank::WaitForStacks(Clock::time_point limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, limit, [&] { return !stacks_text_.empty() || end_; });
  for (std::size_t known = 0; known != stacks_text_.size() && Clock::now() < limit;) {
    known = stacks_text_.size();
    changed_.wait_for(lock, kQuiet, [&] { return stacks_text_.size() != known; });
  }
  return stacks_text_;
}

void ForkedRank::BeginCase() {
  RankProcess::BeginCase();
  const std::lock_guard lock(mutex_);
  written_ = unread_ = 0;
}

void ForkedRank::Read() {
  ReadOutput();
  std::vector<std::string> lines;
  at_end_ = !ReadAll(socket_.get(), [&](std::string_view bytes) {
    lines_.Append(bytes);
    while (auto line = lines_.Next()) {
      if (line->overlong) return Break("sent a frame of more than " + std::to_string(kMaxFrame) + " bytes");
      lines.push_back(std::move(line->text));
    }
  });
  ReadOutput();  // all that came before a report
  for (const std::string& line : lines) TakeLine(line);
}

void ForkedRank::TakeLine(std::string_view line) {
  Json frame;
  try {
    frame = protocol::ParseJson(line, kFrameNesting);
  } catch (const protocol::InvalidRequest& error) {
    return Break(std::string("sent what is no frame: ") + error.what());
  }
  const std::string name = frame.is_object() ? TextOf(frame, "frame") : "";
  if (name.empty()) return Break("sent an object without \"frame\"");
  if (name == "report" && TextOf(frame, "phase") == "case") WriteLines(true);
  const std::lock_guard lock(mutex_);
  if (name == "stacks")
    answer_ = std::move(frame);
  else if (frames_.size() < kMostFrames)
    frames_.push_back(std::move(frame));
  else
    broken_ = "sent more than " + std::to_string(kMostFrames) + " frames that were not asked for";
  changed_.notify_all();
}

void ForkedRank::Break(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) broken_ = why;
}

void ForkedRank::ReadOutput() {
  if (output_ && !ReadAll(output_.get(), [this](std::string_view bytes) { TakeOutput(bytes); }))
    output_.Reset();
  WriteLines(!output_);
}

void ForkedRank::ReadStacks() {
  const bool more = ReadAll(stacks_.get(), [this](std::string_view bytes) {
    const std::lock_guard lock(mutex_);
    stacks_text_ += bytes.substr(0, kMostStacks - std::min(stacks_text_.size(), kMostStacks));
    changed_.notify_all();
  });
  if (!more) stacks_.Reset();
}

void ForkedRank::TakeOutput(std::string_view bytes) {
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t before = written_;
    written_ += bytes.size();
    tail_ += bytes;
    if (tail_.size() > kTail) tail_.erase(0, tail_.size() - kTail);
    full = before <= most_output_ && written_ > most_output_;
    if (written_ > most_output_) TellLeftOut();
    if (before > most_output_) return;
  }
  line_ += bytes;
  if (full)
    line_ += "\n(more than " + std::to_string(most_output_) +
             " bytes of output: the rest of this case's is dropped)\n";
  if (line_.size() > kMostAtOnce) WriteLines(false);
}

void ForkedRank::TellLeftOut() {
  left_out_.clear();
  if (written_ > most_output_)
    left_out_ = std::to_string(written_) + " bytes of output: what follows the first " +
                std::to_string(most_output_) + " is left out";
  if (unread_ > 0)
    left_out_ += (left_out_.empty() ? "" : "; ") + std::to_string(unread_) +
                 " bytes of output are left out, since nobody read the daemon's stderr for a second";
}

// Waits a little where nobody reads stderr; then the lines are lost.
void ForkedRank::WriteLines(bool all) {
  std::string text;
  std::size_t from = 0;
  const auto add = [&](std::size_t end, bool goes_on = false) {
    text += "[rank " + std::to_string(rank_) + (goes_on ? "+] " : "] ");
    text.append(line_, from, end - from);
    text += '\n';
  };
  while (from < line_.size()) {
    const std::size_t newline = line_.find('\n', from);
    const std::size_t end = std::min(newline, from + kLongestPart);
    if (end > line_.size()) {  // it has not ended
      if (!all) break;
      add(line_.size());
      from = line_.size();
      break;
    }
    add(end, end != newline);
    from = end == newline ? end + 1 : end;
  }
  line_.erase(0, from);
  for (std::string_view rest = text; !rest.empty();) {
    pollfd ready = {STDERR_FILENO, POLLOUT, 0};
    const ssize_t count =
        poll(&ready, 1, kStderrWaitMs) <= 0
            ? 0
            : write(STDERR_FILENO, rest.data(), std::min<std::size_t>(rest.size(), PIPE_BUF));
    if (count <= 0) {
      const std::lock_guard lock(mutex_);
      unread_ += rest.size();
      return TellLeftOut();
    }
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
}

void ForkedRank::TellEnd(std::string how) {
  if (!at_end_) Read();
  ReadOutput();
  WriteLines(true);
  if (stacks_) ReadStacks();
  const std::lock_guard lock(mutex_);
  if (!end_) end_ = broken_.empty() ? std::move(how) : broken_ + "; it " + how;
  changed_.notify_all();
}

void ForkedRank::Close(std::string how) {
  TellEnd(std::move(how));
  output_.Reset();
  stacks_.Reset();
  const std::lock_guard lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

ForkServer::ForkServer(Options options, Clock::time_point deadline)
    : options_(std::move(options)), lines_(kMaxFrame) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path folder = program.parent_path().parent_path() / "share/cppool/_ranks";
  if (!std::filesystem::exists(folder / "__main__.py"))
    throw StartError("--python: the ranks' code is not in " + folder.string() +
                     ", where the installation has it");
  base::SpawnCommand command{options_.python, {folder.string()}, {}};
  if (!options_.preload.empty())
    command.arguments.insert(command.arguments.end(), {"--preload", base::Join(options_.preload, ",")});
  if (!options_.shared || options_.devices.empty())
    command.environment.push_back(kDevices + options_.devices);
  ReapTemplates();
  while (!Start(command, deadline)) {
  }
}

bool ForkServer::Start(const base::SpawnCommand& command, Clock::time_point deadline) {
  try {
    if (options_.shared) {
      std::tie(socket_, child_) = JoinTemplate(command, deadline);
    } else {
      auto [ours, theirs] = MakeSockets();
      base::SpawnCommand own = command;
      own.environment.push_back("CPPOOL_RANKS_OF=" + std::to_string(getpid()) + ":" + StartTime("self"));
      child_ = pid_ = base::Spawn(own, theirs.get(), STDERR_FILENO, STDERR_FILENO);
      socket_ = std::move(ours);
    }
  } catch (const std::system_error& error) {
    throw StartError("--python " + options_.python + " cannot be started: " + error.what() +
                     ": give the path of a Python 3.9 or later");
  }
  const bool joined = child_ == 0;
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "rank frames");
    Loop();
  });
  if (options_.shared) Send({{"frame", "begin"}, {"devices", options_.devices}}, {STDERR_FILENO});
  std::string why;
  bool again = false;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return ready_ || !gone_.empty(); });
    again = !ready_ && !gone_.empty() && joined && Clock::now() < deadline;
    if (ready_ && ready_->contains("error"))
      why = TextOf(*ready_, "error");
    else if (!ready_)
      why =
          "--python " + options_.python +
          (gone_.empty() ? " was not ready in time"
                         : " " + gone_ + " before it was ready: is it a Python 3.9 or later?" +
                               (options_.preload.empty() ? "" : " A module of --preload may have ended it"));
    if (why.empty()) {
      pid_ = ready_->at("pid").get<pid_t>();
      info_.python = TextOf(*ready_, "python");
      info_.torch = TextOf(*ready_, "torch");
      for (const Json& module : ready_->value("preloaded", Json::array())) info_.preloaded.push_back(module);
      for (const Json& module : ready_->value("deferred", Json::array()))
        info_.deferred.emplace_back(TextOf(module, "module"), TextOf(module, "why"));
      for (const Json& module : ready_->value("import_ms", Json::array()))
        info_.import_ms.emplace_back(module.at(0), module.at(1));
    } else if (ready_) {
      if (const std::string trace = TextOf(*ready_, "traceback"); !trace.empty())
        Log(LogLevel::kError, trace);
    }
  }
  if (why.empty()) return true;
  EndThread();
  if (gone_.empty() && child_ > 0) {  // else it serves others
    kill(-child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  } else {
    ReapTemplates(child_);
  }
  if (!again) throw StartError(why);
  const std::lock_guard lock(mutex_);
  stop_ = false;
  gone_.clear();
  return false;
}

ForkServer::~ForkServer() {
  Send({{"frame", "bye"}});
  {
    std::unique_lock lock(mutex_);
    const auto gone = [&] { return !gone_.empty(); };
    if (!changed_.wait_for(lock, kEndLimit, gone)) {
      kill(-pid_, SIGKILL);
      changed_.wait_for(lock, kSharedEndLimit, gone);
    }
  }
  EndThread();
  if (child_ > 0 && !options_.shared) waitpid(child_, nullptr, 0);
  ReapTemplates(child_);
}

void ForkServer::EndThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.Set();
  thread_.join();
}

void ForkServer::Send(const Json& frame, const std::vector<int>& descriptors) {
  const std::string line = protocol::JsonText(frame) + "\n";
  const std::lock_guard sending(sending_);
  SendAll(socket_.get(), line, descriptors, Clock::now() + kSendLimit);  // what is lost shows as its end
}

void ForkServer::Loop() {
  while (true) {
    std::vector<std::shared_ptr<ForkedRank>> ranks;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      ranks = ranks_;
    }
    const bool gone = !gone_.empty();  // written by this thread alone
    std::vector<pollfd> fds = {{wake_.fd(), POLLIN, 0}, {gone ? -1 : socket_.get(), POLLIN, 0}};
    for (const auto& rank : ranks) {
      fds.push_back({rank->at_end_ ? -1 : rank->socket_.get(), POLLIN, 0});
      fds.push_back({rank->output_.get(), POLLIN, 0});
      fds.push_back({rank->stacks_.get(), POLLIN, 0});
    }
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[0].revents) wake_.Clear();
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (fds[2 + 3 * i + 1].revents) ranks[i]->ReadOutput();
      if (fds[2 + 3 * i + 2].revents) ranks[i]->ReadStacks();
      if (fds[2 + 3 * i].revents) ranks[i]->Read();
      if (fds[2 + 3 * i].revents && ranks[i]->at_end_) TellEnd(*ranks[i]);
      bool broken = false;
      {
        const std::lock_guard lock(ranks[i]->mutex_);
        broken = !ranks[i]->broken_.empty() && !ranks[i]->end_;
      }
      if (broken) Kill(*ranks[i], SIGKILL);
    }
    if (!fds[1].revents) continue;
    const bool more = ReadAll(socket_.get(), [this](std::string_view bytes) {
      lines_.Append(bytes);
      while (const auto line = lines_.Next()) {
        try {
          TakeFrame(protocol::ParseJson(line->text, kFrameNesting));
        } catch (const std::exception& error) {
          Log(LogLevel::kError, std::string("the fork server sent what is no frame: ") + error.what());
        }
      }
    });
    if (!more) Gone();
  }
}

void ForkServer::TakeFrame(const Json& frame) {
  const std::string name = TextOf(frame, "frame");
  const std::lock_guard lock(mutex_);
  if (name == "ready") {
    ready_ = frame;
  } else if (name == "checked") {
    checked_ = frame;
  } else if (name == "forked" || name == "ended") {
    const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
      return name == "ended" ? rank->pid() == frame.at("pid").get<pid_t>()
                             : rank->pid() == 0 && rank->rank() == frame.at("rank").get<int>();
    });
    if (found == ranks_.end()) return;
    if (name == "forked" && frame.contains("pid")) {
      const std::lock_guard of_rank((*found)->mutex_);
      (*found)->pid_ = frame.at("pid").get<pid_t>();
      return;
    }
    std::string how = TextOf(frame, "error");
    if (name == "ended") {
      how = base::DescribeStatus(frame.at("status").get<int>());
      if (const int left = frame.value("killed", 0); left > 0)
        how += ", and left " + std::to_string(left) + (left == 1 ? " process" : " processes");
    }
    (*found)->Close(std::move(how));
    ranks_.erase(found);
  }
  changed_.notify_all();
}

// The kernel knows how a rank ends before it has closed what the rank had open, which takes the driver of a
// GPU 0.1 s. Processes that are left behind are counted by the fork server, when it has reaped the rank.
void ForkServer::TellEnd(ForkedRank& rank) {
  const pid_t pid = rank.pid();
  std::set<int> left = ChildProcesses(std::to_string(pid));
  left.merge(ChildProcesses(std::to_string(pid_)));             // which adopts them
  const std::optional<int> status = StatusOfEnding(pid, pid_);  // last: it has not been reaped before
  {
    const std::lock_guard lock(mutex_);
    for (const auto& each : ranks_) left.erase(each->pid());
  }
  if (status && left.empty()) rank.TellEnd(base::DescribeStatus(*status));
}

void ForkServer::Gone() {
  std::string how = "has ended";
  bool ready = false;
  {
    const std::lock_guard lock(mutex_);
    ready = ready_.has_value();
  }
  // A shared one that was ready is no child of this process, but dies with its parent, which may be one.
  // Before that it may be the parent's end, which cannot be waited for at once.
  const auto limit = Clock::now() + (ready ? std::chrono::seconds(0) : kSharedEndLimit);
  int status = 0;
  pid_t ended = 0;
  while (child_ > 0 && (ended = waitpid(child_, &status, options_.shared ? WNOHANG : 0)) == 0 &&
         Clock::now() < limit)
    poll(nullptr, 0, kRetryMs);
  if (child_ > 0 && ended == child_) {
    // The parent of shared ones ends in order after the last of them: that is not how this one ended.
    if (!options_.shared || !ready || status != 0) how = base::DescribeStatus(status);
    child_ = 0;
  }
  std::vector<std::shared_ptr<ForkedRank>> ranks;
  {
    const std::lock_guard lock(mutex_);
    gone_ = how;
    for (const auto& rank : ranks_) rank->Close("was killed, since the fork server " + how);
    ranks.swap(ranks_);
    changed_.notify_all();
  }
  // They die a moment after it. Of one that does not, the names stay.
  const auto end = Clock::now() + kSharedEndLimit;
  for (const auto& rank : ranks) {
    const pid_t pid = rank->pid();
    const auto over = [pid] { return StateOf(pid) == 'Z' || StateOf(pid) == 'X'; };
    while (pid > 0 && !over() && Clock::now() < end) poll(nullptr, 0, kRetryMs);
    if (pid > 0 && over())
      RemoveSharedMemory({std::to_string(pid), std::to_string(rank->port_)}, rank->since_);
  }
}

std::string ForkServer::VisibleDevices(BackendChoice backend, int ranks) {
  const bool on_host = backend == BackendChoice::kHost;
  return on_host ? "" : NarrowDevices(std::getenv("CUDA_VISIBLE_DEVICES"), ranks);
}

std::pair<UniqueFd, int> ForkServer::Listen(const std::string& host) {
  UniqueFd listener = OrThrow(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof(address);
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1 || bind(listener.get(), raw, size) != 0 ||
      listen(listener.get(), 1024) != 0 || getsockname(listener.get(), raw, &size) != 0)
    throw std::system_error(errno, std::generic_category(), "a port on " + host);
  return {std::move(listener), ntohs(address.sin_port)};
}

std::shared_ptr<ForkedRank> ForkServer::MakeRank(const Seats& seats, int number) {
  auto rank = std::make_shared<ForkedRank>(number, options_.most_output);
  auto [ours, theirs] = MakeSockets();
  auto [output, write_output] = MakePipe();
  auto [stacks, write_stacks] = MakePipe();
  const UniqueFd page = OrThrow(memfd_create("cppool rank", MFD_CLOEXEC), "memfd_create");
  if (ftruncate(page.get(), kPageSize) != 0)
    throw std::system_error(errno, std::generic_category(), "ftruncate");
  void* const mapped = mmap(nullptr, kPageSize, PROT_READ, MAP_SHARED, page.get(), 0);
  if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  rank->page_ = static_cast<const unsigned char*>(mapped);
  rank->socket_ = std::move(ours);
  rank->output_ = std::move(output);
  rank->stacks_ = std::move(stacks);
  rank->port_ = seats.port;
  clock_gettime(CLOCK_REALTIME_COARSE, &rank->since_);
  {
    const std::lock_guard lock(mutex_);
    ranks_.push_back(rank);
  }
  std::vector<int> descriptors = {theirs.get(), page.get(), write_output.get(), write_stacks.get()};
  if (number == 0) descriptors.push_back(seats.listener);
  Send({{"frame", "fork"},
        {"rank", number},
        {"size", seats.size},
        {"local_rank", number - seats.first},
        {"local_size", seats.ranks},
        {"node", seats.node},
        {"host", seats.host},
        {"port", seats.port},
        {"backend", seats.backend}},
       descriptors);
  return rank;
}

RankServer::Ranks ForkServer::Start(const Seats& seats) {
  {
    const std::lock_guard lock(mutex_);
    if (!gone_.empty()) throw StartError("the fork server " + gone_, FailureKind::kInternal);
  }
  Ranks ranks;
  try {
    for (int i = 0; i < seats.ranks; ++i) ranks.push_back(MakeRank(seats, seats.first + i));
  } catch (const std::system_error& error) {
    wake_.Set();
    Fail(ranks, seats.first + static_cast<int>(ranks.size()), error.what(), FailureKind::kInternal);
  }
  wake_.Set();
  return ranks;
}

RankServer::World ForkServer::Fork(int size, const std::string& backend, Clock::time_point deadline) {
  Seats seats{.size = size, .ranks = size, .backend = backend, .host = "127.0.0.1"};
  UniqueFd listener;
  try {
    std::tie(listener, seats.port) = Listen(seats.host);
  } catch (const std::system_error& error) {
    throw StartError(error.what(), FailureKind::kInternal);
  }
  seats.listener = listener.get();
  return WaitReady(Start(seats), deadline);
}

RankServer::Look ForkServer::LookAt(RankProcess& process, bool stacks, Clock::time_point limit) {
  auto& rank = static_cast<ForkedRank&>(process);
  Look look;
  look.place = rank.Where();  // before a signal, which may wake it
  if (auto told = rank.AskStacks(limit)) {
    look.answered = true;
    look.stacks = std::move(*told);
    return look;
  }
  look.state = DescribeState(rank.pid());
  if (stacks) {
    Kill(rank, kStacksSignal);
    look.text = rank.WaitForStacks(Clock::now() + kSignalLimit);
  }
  return look;
}

std::vector<std::string> ForkServer::Changed(Clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    checked_.reset();
  }
  Send({{"frame", "check"}});
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return checked_ || !gone_.empty(); });
  std::vector<std::string> changed;
  if (checked_)
    for (const Json& file : checked_->value("changed", Json::array())) changed.push_back(file);
  if (!checked_) changed.push_back("the fork server " + (gone_.empty() ? "does not answer" : gone_));
  return changed;
}

void ForkServer::Kill(const ForkedRank& rank, int signal) {
  if (const pid_t pid = rank.pid(); pid > 0) Send({{"frame", "kill"}, {"pid", pid}, {"signal", signal}});
}

}  // namespace cppool::daemon
