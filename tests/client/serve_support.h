// A server, `cppool serve`, in a process of its own, and clients of it: the library, or lines over a socket.
#pragma once

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <cppool/pool.h>

#include "client/src/attach.h"
#include "tests/child.h"
#include "tests/client/support.h"
#include "tests/files.h"

extern char** environ;

namespace cppool::test {

inline PoolOptions RealOptions() {
  PoolOptions options;
  options.daemon = CPPOOL_TEST_DAEMON;
  options.backend = "host";
  options.log_level = "off";
  options.case_files = {CPPOOL_ODD_CASE};
  return options;
}

class Serve {
 public:
  explicit Serve(const std::vector<std::string>& more = {}) {
    const std::string log = folder_.File("log");
    Start(more);
    CHECK(Eventually([&] { return Has(ReadFile(log), "serves at") || !Alive(pid_); }));
  }
  ~Serve() { Stop(); }
  Serve(const Serve&) = delete;
  Serve& operator=(const Serve&) = delete;

  std::string socket() const { return folder_.File("socket"); }
  std::string Log() const { return ReadFile(folder_.File("log")); }
  pid_t pid() const { return pid_; }
  void Kill(int signal) const { kill(pid_, signal); }
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {CPPOOL_COMMAND, "serve", "--socket", socket()};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, folder_.File("log").c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                     0600);
    REQUIRE(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  // Its exit code, or minus the signal that ended it.
  int Wait() { return AwaitForked(std::exchange(pid_, -1)); }
  void Stop() {
    if (pid_ <= 0) return;
    Kill(SIGTERM);
    Wait();
  }

  // Of the fake daemon.
  PoolOptions Fake(const std::string& start = "") const { return Attached(FakeOptions(start)); }
  // Of the real one, on the host.
  PoolOptions Real(int world_size = 2) const {
    PoolOptions options = RealOptions();
    options.world_size = world_size;
    return Attached(options);
  }
  PoolOptions Attached(PoolOptions options) const {
    options.attach = socket();
    return options;
  }
  Json Ps() const {
    return Json::parse(RunChild(std::string(CPPOOL_COMMAND) + " ps --json --socket " + socket()).output);
  }
  // Waits until a pool runs a request.
  void AwaitRun() const {
    CHECK(Eventually([&] {
      const Json ps = Ps();
      for (const Json& pool : ps.at("pools"))
        if (!pool.at("running").is_null()) return true;
      return false;
    }));
  }

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
};

// A client that is not the library: sends any bytes, and reads lines.
class RawClient {
 public:
  explicit RawClient(const Serve& server) : RawClient(server.socket()) {}
  explicit RawClient(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  }
  ~RawClient() { Close(); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  void EndInput() const { shutdown(fd_, SHUT_WR); }
  // False: the server has closed the connection.
  bool SendBytes(const std::string& bytes) const {
    for (std::size_t sent = 0; sent < bytes.size();) {
      const ssize_t count = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (count < 0) return false;
      sent += static_cast<std::size_t>(count);
    }
    return true;
  }
  bool Send(const Json& request) const { return SendBytes(request.dump() + "\n"); }
  // Nothing: end of file, or a minute has passed.
  std::optional<Json> Read() {
    for (;;) {
      if (const auto end = buffer_.find('\n'); end != std::string::npos) {
        const std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return Json::parse(line);
      }
      pollfd fd = {fd_, POLLIN, 0};
      char bytes[65536];
      if (poll(&fd, 1, 60000) != 1) return std::nullopt;
      const ssize_t count = recv(fd_, bytes, sizeof bytes, 0);
      if (count <= 0) return std::nullopt;
      buffer_.append(bytes, static_cast<std::size_t>(count));
    }
  }
  Json Ask(const Json& request) {
    REQUIRE(Send(request));
    const auto answer = Read();
    REQUIRE(answer);
    return *answer;
  }
  // The first line of a client without a sentinel; its pool is that of Serve::Real().
  static Json Attach(const std::string& folder = "/") {
    Json line = client::AttachLine(RealOptions());
    line["sentinel"] = "";
    line["folder"] = folder;
    return line;
  }

 private:
  int fd_ = -1;
  std::string buffer_;
};

// A run that would take long.
inline RunOptions Long() {
  RunOptions options;
  options.repeat = 10000;
  return options;
}
inline Json Small() { return {{"max_seqlen_q", 64}, {"num_heads", 4}}; }

}  // namespace cppool::test
