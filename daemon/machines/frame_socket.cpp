#include "daemon/machines/frame_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "base/poll_timeout.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

using protocol::Json;

constexpr std::size_t kMostFrame = std::size_t{64} << 20;  // a report with many samples and stacks
constexpr int kFrameNesting = 70;                          // results have up to 60, in a report
constexpr const char* kEnded = "its connection ended";

std::string Silent() {
  return "nothing came from it for " + std::to_string(FrameSocket::kSilence.count()) + " s";
}

Json ParseFrame(const protocol::LineReader::Line& line) {
  if (line.overlong) throw std::runtime_error("it sent a frame that is too long");
  Json frame = protocol::ParseJson(line.text, kFrameNesting);
  const auto name = frame.is_object() ? frame.find("frame") : frame.end();
  if (name == frame.end() || !name->is_string()) throw std::runtime_error("it sent what is no frame");
  return frame;
}

std::string NameOf(const sockaddr_storage& address, socklen_t size) {
  std::array<char, NI_MAXHOST> host{};
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host.data(), host.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0)
    return "";
  return host.data();
}

}  // namespace

FrameSocket::FrameSocket(base::UniqueFd socket) : socket_(std::move(socket)), lines_(kMostFrame) {
  const int on = 1;
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

FrameSocket::~FrameSocket() {
  Shut();
  stop_.Set();
  if (reader_.joinable()) reader_.join();
  if (beater_.joinable()) beater_.join();
}

bool FrameSocket::Append() {
  std::array<char, 1 << 16> buffer;
  ssize_t count = 0;
  do {
    count = recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
  if (count == 0) return false;
  unknown_ += static_cast<std::size_t>(count);
  heard_ = Clock::now();
  lines_.Append({buffer.data(), static_cast<std::size_t>(count)});
  return true;
}

Json FrameSocket::Next(Clock::time_point limit) {
  for (;;) {
    const auto line = lines_.Next();
    // Behind the last frame of a handshake longer ones may have come at once.
    if (line ? line->text.size() > kMostUnknown : unknown_ > kMostUnknown)
      throw std::runtime_error("it sent too much");
    if (line) return ParseFrame(*line);
    pollfd ready = {socket_.get(), POLLIN, 0};
    if (poll(&ready, 1, base::PollTimeout(limit)) == 0) throw std::runtime_error("it sent nothing in time");
    if (!Append()) throw std::runtime_error("it closed the connection");
  }
}

void FrameSocket::Start(Events events) {
  events_ = std::move(events);
  reader_ = std::thread([this] { Read(); });
}

void FrameSocket::BeginBeats() {
  beater_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "heartbeat");
    pollfd stop = {stop_.fd(), POLLIN, 0};
    while (poll(&stop, 1, static_cast<int>(std::chrono::milliseconds(kBeat).count())) == 0)
      if (!Send({{"frame", "beat"}})) return;
  });
}

void FrameSocket::CheckAlive() {
  if (!Append()) throw std::runtime_error(kEnded);
  if (heard_ + kSilence < Clock::now()) throw std::runtime_error(Silent());
}

void FrameSocket::Read() {
  pthread_setname_np(pthread_self(), "frames");
  std::string why;
  try {
    for (bool more = true; more;) {
      while (const auto line = lines_.Next()) {
        Json frame = ParseFrame(*line);
        if (frame.at("frame") != "beat") events_.take(std::move(frame));
      }
      pollfd ready = {socket_.get(), POLLIN, 0};
      if (poll(&ready, 1, static_cast<int>(std::chrono::milliseconds(kSilence).count())) == 0)
        throw std::runtime_error(Silent());
      more = Append();
    }
    why = kEnded;
  } catch (const std::exception& error) {
    why = error.what();
  }
  Shut();
  events_.gone(why);
}

bool FrameSocket::Send(const Json& frame) {
  const std::string line = protocol::JsonText(frame) + "\n";
  const std::lock_guard lock(sending_);
  auto limit = Clock::now() + kSilence;
  for (std::string_view rest = line; !rest.empty();) {
    const ssize_t sent = send(socket_.get(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      rest.remove_prefix(static_cast<std::size_t>(sent));
      limit = Clock::now() + kSilence;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd ready = {socket_.get(), POLLOUT, 0};
      if (poll(&ready, 1, base::PollTimeout(limit)) == 0) {
        Shut();  // half a frame must not be followed by another one
        return false;
      }
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void FrameSocket::Shut() { shutdown(socket_.get(), SHUT_RDWR); }

std::string FrameSocket::own_address() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  return getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0 ? NameOf(address, size)
                                                                                       : "";
}

std::string FrameSocket::peer_address() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  return getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0 ? NameOf(address, size)
                                                                                       : "";
}

base::UniqueFd ConnectTo(const std::string& host, const std::string& port,
                         std::chrono::steady_clock::time_point limit) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0)
    throw StartError("--agent " + host + ":" + port + ": " + gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  std::string why = "no address";
  for (const addrinfo* each = found; each; each = each->ai_next) {
    base::UniqueFd socket(::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = 0;
    if (!socket || (connect(socket.get(), each->ai_addr, each->ai_addrlen) != 0 && errno != EINPROGRESS)) {
      error = errno;
    } else {
      pollfd ready = {socket.get(), POLLOUT, 0};
      socklen_t size = sizeof(error);
      if (poll(&ready, 1, base::PollTimeout(limit)) <= 0)
        error = ETIMEDOUT;
      else
        getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) return socket;
    why = std::strerror(error);
  }
  throw StartError(
      "the head at " + host + ":" + port + " cannot be reached: " + why +
      "; it listens until all agents have come (does the launcher start too many?), at the address that "
      "CPPOOL_HEAD_ADDRESS names there");
}

}  // namespace cppool::daemon
