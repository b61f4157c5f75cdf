#include "daemon/fork_template.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>
#include <vector>

#include "base/hmac.h"
#include "daemon/process.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

using base::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr int kMostDaemons = 64, kJoinAgainMs = 2;

UniqueFd StreamSocket(int flags) {
  UniqueFd made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
  if (!made) throw std::system_error(errno, std::generic_category(), "socket");
  return made;
}

// The same for all that may share what the command starts. It tells nothing of the environment's values.
std::string SharedName(const base::SpawnCommand& command) {
  const std::string parent = std::to_string(getppid());
  std::error_code none;
  std::vector<std::string> parts = {std::to_string(geteuid()),
                                    parent,
                                    StartTime(parent),
                                    command.path,
                                    std::filesystem::read_symlink("/proc/self/ns/pid", none),
                                    std::filesystem::current_path(none)};
  parts.insert(parts.end(), command.arguments.begin(), command.arguments.end());
  std::map<std::string, std::string> environment;
  const auto add = [&](const std::string& variable) {
    environment[variable.substr(0, variable.find('='))] = variable;
  };
  for (char** variable = environ; *variable != nullptr; ++variable) add(*variable);
  for (const std::string& variable : command.environment) add(variable);
  environment.erase("PYTEST_CURRENT_TEST");  // the server does, too
  for (const auto& [name, variable] : environment) parts.push_back(variable);
  std::string text;
  for (const std::string& part : parts) text += std::to_string(part.size()) + ":" + part;
  return "cppool-ranks-" + base::Sha256(text);
}

}  // namespace

std::pair<UniqueFd, pid_t> JoinTemplate(const base::SpawnCommand& command, Clock::time_point deadline) {
  sockaddr_un address{};  // abstract: it is gone with the socket, and there is one in a network namespace
  address.sun_family = AF_UNIX;
  const std::string name = SharedName(command);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const auto* const raw = reinterpret_cast<const sockaddr*>(&address);
  for (;; poll(nullptr, 0, kJoinAgainMs)) {
    UniqueFd listener = StreamSocket(0);
    if (bind(listener.get(), raw, size) == 0) {
      if (listen(listener.get(), kMostDaemons) != 0)
        throw std::system_error(errno, std::generic_category(), "listen");
    } else if (errno == EADDRINUSE) {
      listener.Reset();
    } else {
      throw std::system_error(errno, std::generic_category(), "bind");
    }
    UniqueFd socket = StreamSocket(SOCK_NONBLOCK);
    // Another daemon may have bound it and not listen yet, or what has listened ends.
    if (connect(socket.get(), raw, size) == 0) {
      ucred user{};
      socklen_t length = sizeof user;
      if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &user, &length) != 0 || user.uid != geteuid())
        throw std::system_error(EADDRINUSE, std::generic_category(), "another user's process listens");
      const pid_t started = listener ? base::Spawn(command, listener.get(), STDERR_FILENO, STDERR_FILENO) : 0;
      return {std::move(socket), started};
    }
    if (Clock::now() >= deadline) throw StartError(command.path + " was not ready in time");
  }
}

void ReapTemplates(pid_t more) {
  static std::mutex mutex;
  static std::vector<pid_t> children;
  const std::lock_guard lock(mutex);
  if (more > 0) children.push_back(more);
  std::erase_if(children, [](pid_t child) { return waitpid(child, nullptr, WNOHANG) != 0; });
}

}  // namespace cppool::daemon
