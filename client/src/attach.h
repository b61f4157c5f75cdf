// A server of pools (`cppool serve`) as its clients see it: where it listens, and the first line of a
// connection, which says what pool is wanted. protocol/README.md has its members.
#pragma once

#include <sys/un.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include <cppool/pool.h>

namespace cppool::client {

// What a server can do, by name: a client says in `needs` what it relies on, and the server names what it
// lacks. A name is never taken away or given another meaning.
inline constexpr std::string_view kServerFeatures[] = {"attach", "ps", "stop", "turn"};

// Returns the path of the socket: `attach` itself when it has a slash; of "default" cppool.sock in
// $XDG_RUNTIME_DIR, else in /tmp/cppool-UID. Throws std::invalid_argument for another word.
std::string SocketPath(const std::string& attach);
// Throws std::invalid_argument for a path that is too long for a socket.
sockaddr_un SocketAddress(const std::string& path);
// Makes /tmp/cppool-UID if `path` is a socket in it.
void MakeSocketFolder(const std::string& path);
// Throws std::runtime_error when the folder of a socket in /tmp is not this user's alone. A folder that is
// not there is in order.
void CheckSocketFolder(const std::string& path);

// Whether the variable of the environment is a part of a pool's identity.
bool IsOfPool(std::string_view name);

struct Attachment {
  PoolOptions pool;      // what its daemon is started with
  std::string identity;  // clients with the same text share a pool
  std::string folder;    // relative paths in requests are relative to it
  std::string sentinel;
  std::chrono::milliseconds queue_limit{0};
};
// The line of a client with these options, without an id.
Json AttachLine(const PoolOptions& options);
// `launch`: where the client names no launcher. Throws std::invalid_argument that says what is wrong, or
// which features the server lacks.
Attachment ReadAttachLine(const Json& line, const std::optional<std::string>& launch);

}  // namespace cppool::client
