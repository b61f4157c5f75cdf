#include "client/server/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "base/poll_timeout.h"
#include "client/src/attach.h"
#include "client/src/connection.h"
#include "client/src/daemon.h"
#include "protocol/json_text.h"

extern char** environ;

namespace cppool::server {
namespace {

constexpr int kMostClients = 256;  // each has two threads

[[noreturn]] void Fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

std::string RefusalLine(const std::string& why) {
  return protocol::JsonText({{"ok", false}, {"error", why}}) + "\n";
}

// `launched`: the server has a launcher, and so the address that agents connect to.
void ForgetEnvironmentOfPools(bool launched) {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const auto name = text.substr(0, text.find('='));
    if (client::IsOfPool(name) && !(launched && name == "CPPOOL_HEAD_ADDRESS")) names.emplace_back(name);
  }
  for (const std::string& name : names) unsetenv(name.c_str());
}

}  // namespace

Server::Server(std::string path, std::chrono::milliseconds idle_exit, std::optional<std::string> launch)
    : path_(std::move(path)), idle_exit_(idle_exit), launch_(std::move(launch)), pools_(idle_exit) {
  const sockaddr_un address = client::SocketAddress(path_);
  client::MakeSocketFolder(path_);
  client::CheckSocketFolder(path_);
  ForgetEnvironmentOfPools(launch_.has_value());
  // Whoever has the lock is the server. It ends with its process, however that ends, and its file stays:
  // removing it would let two processes lock two files of one name.
  const std::string lock = path_ + ".lock";
  lock_ = base::AboveStandard(open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock_) Fail("cannot open " + lock);
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    char pid[16] = {};
    const ssize_t count = pread(lock_.get(), pid, sizeof pid - 1, 0);
    throw std::runtime_error(
        "a server runs at " + path_ + " already" +
        (count > 0 ? " (pid " + std::string(pid, static_cast<std::size_t>(count)) + ")" : "") +
        ": see `cppool ps`, or end it with `cppool stop`");
  }
  const std::string pid = std::to_string(getpid());
  if (ftruncate(lock_.get(), 0) != 0 || pwrite(lock_.get(), pid.data(), pid.size(), 0) < 0)
    Fail("cannot write " + lock);
  struct stat status;
  if (lstat(path_.c_str(), &status) == 0) {
    if (!S_ISSOCK(status.st_mode)) throw std::runtime_error(path_ + " is there and is no socket");
    unlink(path_.c_str());  // of a server that crashed
  }
  socket_ = base::AboveStandard(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) Fail("cannot make a socket");
  if (bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    Fail("cannot listen at " + path_);
  if (chmod(path_.c_str(), 0600) != 0 || listen(socket_.get(), kMostClients) != 0)
    Fail("cannot listen at " + path_);
}

Server::~Server() {
  if (socket_) unlink(path_.c_str());
}

void Server::Stop() {
  stopping_ = true;
  wake_.Set();
}

std::string Server::Run() {
  std::string why = "it was stopped";
  auto idle_since = Clock::now();
  while (!stopping_) {
    Reap(false);
    int wait = -1;
    if (!clients_.empty()) {
      idle_since = Clock::now();
    } else if (idle_exit_.count() > 0) {
      wait = base::PollTimeout(idle_since + idle_exit_);
      if (wait == 0) {
        why = "no client was connected for " + client::Seconds(idle_exit_);
        break;
      }
    }
    pollfd fds[2] = {{socket_.get(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
    if (poll(fds, 2, wait) < 0) continue;
    if (fds[1].revents != 0) wake_.Clear();
    if (fds[0].revents != 0) Accept();
  }
  stopping_ = true;
  unlink(path_.c_str());  // while it has the lock
  socket_.Reset();
  pools_.Wake();
  Reap(true);
  pools_.Stop();
  return why;
}

void Server::Accept() {
  base::UniqueFd socket(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) poll(nullptr, 0, 100);  // until some end
    return;
  }
  ucred user{};
  socklen_t size = sizeof user;
  std::string refusal;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &user, &size) != 0 || user.uid != geteuid())
    refusal = "this server is of user " + std::to_string(geteuid()) + " alone, and its client is user " +
              std::to_string(user.uid);
  if (clients_.size() >= kMostClients)
    refusal = "this server has " + std::to_string(kMostClients) + " clients, and takes no more";
  try {
    if (refusal.empty()) {
      auto session = std::make_unique<Session>(*this, std::move(socket), user.pid);
      Client& client = clients_.emplace_back();
      client.session = std::move(session);
      client.thread = std::thread([this, &client] {
        client.session->Serve();
        client.ended = true;
        wake_.Set();
      });
      return;
    }
  } catch (const std::system_error& error) {
    if (!clients_.empty() && !clients_.back().thread.joinable()) clients_.pop_back();
    refusal = std::string("this server can take no more clients: ") + error.what();
  }
  const std::string line = RefusalLine(refusal);
  if (socket) std::ignore = send(socket.get(), line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Server::Reap(bool all) {
  if (all)
    for (Client& client : clients_) client.session->Wake();
  for (auto client = clients_.begin(); client != clients_.end();) {
    if (!all && !client->ended) {
      ++client;
      continue;
    }
    client->thread.join();
    client = clients_.erase(client);
  }
}

Json Server::Describe() {
  return {{"pid", getpid()},
          {"socket", path_},
          {"features", client::kServerFeatures},
          {"uptime_s", std::chrono::duration<double>(Clock::now() - started_).count()},
          {"pools", pools_.Describe()}};
}

}  // namespace cppool::server
