#include "client/src/connection.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/poll_timeout.h"
#include "client/src/attach.h"
#include "client/src/process.h"
#include "protocol/json_text.h"

namespace cppool::client {
namespace {

// For a server to take a connection and to answer its first line, which it does at once.
constexpr std::chrono::milliseconds kGreeting{10000};

// Sends the text, and with its first byte a descriptor.
void SendWith(int socket, const std::string& text, int descriptor) {
  iovec bytes = {const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
  while (bytes.iov_len > 0) {
    const ssize_t count = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::runtime_error(std::string("does not take a request: ") + std::strerror(errno));
    bytes.iov_base = static_cast<char*>(bytes.iov_base) + count;
    bytes.iov_len -= static_cast<std::size_t>(count);
    message.msg_control = nullptr;
    message.msg_controllen = 0;
  }
}

}  // namespace

base::UniqueFd ConnectToServer(const std::string& path, pid_t* pid) {
  const sockaddr_un address = SocketAddress(path);
  CheckSocketFolder(path);
  base::UniqueFd server = base::AboveStandard(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!server) throw std::runtime_error(std::string("socket: ") + std::strerror(errno));
  const timeval limit = {std::chrono::duration_cast<std::chrono::seconds>(kGreeting).count(), 0};
  setsockopt(server.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  while (connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EINTR) continue;
    const std::string why = errno == EAGAIN ? "it takes no connection" : std::strerror(errno);
    throw std::runtime_error("there is no server at " + path + " (" + why +
                             "): start one with `cppool serve`");
  }
  ucred user{};
  socklen_t size = sizeof user;
  if (getsockopt(server.get(), SOL_SOCKET, SO_PEERCRED, &user, &size) != 0)
    throw std::runtime_error("the owner of " + path + " is not known: " + std::strerror(errno));
  if (user.uid != geteuid())
    throw std::runtime_error("the server at " + path + " is of another user (" + std::to_string(user.uid) +
                             ", and this is " + std::to_string(geteuid()) + "): start one of your own");
  *pid = user.pid;
  return server;
}

int OpenPidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

std::string ReadLineFrom(int socket, std::chrono::milliseconds limit) {
  const auto until = Clock::now() + limit;
  std::string line;
  for (char byte = 0;;) {
    pollfd fd = {socket, POLLIN, 0};
    if (poll(&fd, 1, base::PollTimeout(until)) == 0) throw std::runtime_error("did not answer");
    const ssize_t count = recv(socket, &byte, 1, MSG_DONTWAIT);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count <= 0) throw std::runtime_error("closed the connection");
    if (byte == '\n') return line;
    line += byte;
  }
}

std::unique_ptr<Connection> Connection::Open(const PoolOptions& options) {
  std::unique_ptr<Connection> connection(new Connection);
  const std::string path = SocketPath(options.attach);
  connection->socket_ = ConnectToServer(path, &connection->pid_);
  connection->Ask(path, options);
  return connection;
}

void Connection::Ask(const std::string& path, const PoolOptions& options) {
  base::UniqueFd written;
  MakePipe(&errors_, &written);
  const std::string name = "the server at " + path + " (pid " + std::to_string(pid_) + ") ";
  std::string answer;
  try {
    SendWith(input(), protocol::JsonText(AttachLine(options)) + "\n", written.get());
    answer = ReadLineFrom(output(), kGreeting);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(name + error.what());
  }
  const auto text = protocol::StripSentinel(answer, options.sentinel);
  // A refusal may come before the sentinel is known.
  const Json json = Json::parse(text ? *text : answer, nullptr, false);
  if (!json.is_object())
    throw std::runtime_error(name + "is none of cppool: it answered " + protocol::Quoted(answer));
  if (json.value("ok", Json()) != true)
    throw std::runtime_error(name + "refuses this client: " + json.value("error", "it does not say why"));
  if (fcntl(output(), F_SETFL, O_NONBLOCK) != 0)
    throw std::runtime_error(std::string("fcntl: ") + std::strerror(errno));
  pidfd_ = base::AboveStandard(OpenPidfd(pid_));
}

void Connection::CloseInput() {
  if (input() >= 0) shutdown(input(), SHUT_RDWR);
  closed_ = true;  // the pool goes on without this client
}

bool Connection::Ended() {
  char byte;
  const auto none = [](ssize_t count) {
    return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
  };
  if (!closed_) closed_ = none(recv(output(), &byte, 1, MSG_PEEK | MSG_DONTWAIT));
  return closed_;
}

bool Connection::WaitEnd(Clock::time_point until) {
  while (!Ended() && Clock::now() < until) {
    pollfd fd = {output(), POLLRDHUP, 0};
    poll(&fd, 1, base::PollTimeout(until));
  }
  return closed_;
}

bool Connection::Terminate(std::chrono::milliseconds, std::chrono::milliseconds) {
  CloseInput();
  socket_.Reset();
  return true;
}

void Connection::Abandon() {
  for (base::UniqueFd* fd : {&pidfd_, &socket_, &errors_}) fd->ResetInherited();
}

}  // namespace cppool::client
