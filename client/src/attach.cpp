#include "client/src/attach.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <utility>

#include "base/file_cache.h"
#include "base/words.h"
#include "client/src/members.h"
#include "client/src/pool_options.h"
#include "client/src/shell.h"

extern char** environ;

namespace cppool::client {
namespace {

constexpr std::string_view kDefault = "default", kSocket = "/cppool.sock";

std::string FolderInTmp() { return "/tmp/cppool-" + std::to_string(geteuid()); }
std::string SocketInTmp() { return FolderInTmp() + std::string(kSocket); }

std::map<std::string, std::string> EnvironmentOfPool() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (name.size() < text.size() && IsOfPool(name)) variables.emplace(name, text.substr(name.size() + 1));
  }
  return variables;
}

// The program as it is now: one that was built again is another one.
std::string StampOf(const std::string& program) {
  const auto identity = base::IdentityIfThere(program);
  if (!identity) return "";
  return std::to_string(identity->device) + " " + std::to_string(identity->inode) + " " +
         std::to_string(identity->bytes) + " " + std::to_string(identity->modified_ns);
}

// The words of a launcher, of which the first one, where it is a relative path, begins with the working
// folder.
std::string WithWholeProgram(const std::string& launch) {
  std::vector<std::string> words;
  try {
    words = base::SplitCommand(launch);
  } catch (const std::invalid_argument&) {  // the daemon says what is wrong
  }
  if (words.empty() || words[0].starts_with('/') || words[0].find('/') == std::string::npos) return launch;
  words[0] = std::filesystem::absolute(words[0]).string();
  return ShellCommand(words);
}

}  // namespace

std::string SocketPath(const std::string& attach) {
  if (attach.find('/') != std::string::npos) return attach;
  if (attach != kDefault)
    throw std::invalid_argument("attach: " + protocol::Quoted(attach) +
                                " is neither \"default\" nor the path of a socket, which has a slash");
  const char* folder = getenv("XDG_RUNTIME_DIR");
  return folder != nullptr && *folder != '\0' ? folder + std::string(kSocket) : SocketInTmp();
}

sockaddr_un SocketAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw std::invalid_argument("the path of the socket has " + std::to_string(path.size()) +
                                " bytes, and the system allows " +
                                std::to_string(sizeof address.sun_path - 1) + ": " + path);
  if (path.find('\0') != std::string::npos)
    throw std::invalid_argument("the path of the socket cannot hold a zero byte");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

void MakeSocketFolder(const std::string& path) {
  if (path == SocketInTmp()) mkdir(FolderInTmp().c_str(), 0700);  // a failure is seen when it is used
}

void CheckSocketFolder(const std::string& path) {
  const std::string folder = FolderInTmp();
  struct stat status;
  if (path != SocketInTmp() || lstat(folder.c_str(), &status) != 0) return;
  if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & 077) != 0)
    throw std::runtime_error(
        folder + " must be a folder of this user (" + std::to_string(geteuid()) +
        ") that nobody else can open (mode 0700): set XDG_RUNTIME_DIR, or name a socket");
}

bool IsOfPool(std::string_view name) {
  // These say where the client finds things, and nothing of its daemon.
  for (const std::string_view other : {"CPPOOL_ATTACH", "CPPOOL_DAEMON", "CPPOOL_PARENT_PID"})
    if (name == other) return false;
  for (const std::string_view prefix : {"CUDA_", "NCCL_", "CPPOOL_"})
    if (name.starts_with(prefix)) return true;
  return name == "LD_LIBRARY_PATH" || name == "PYTHONPATH" || name == "VIRTUAL_ENV";
}

Json AttachLine(const PoolOptions& options) {
  PoolOptions pool = options;
  const auto whole = [](std::string& path) {
    if (!path.empty()) path = std::filesystem::absolute(path).string();
  };
  pool.daemon = FindDaemon(options);
  whole(pool.daemon);
  for (std::string& file : pool.case_files) whole(file);
  if (pool.launch) pool.launch = WithWholeProgram(*pool.launch);
  Json described = ToJson(pool);
  for (const char* of_client : {"sentinel", "attach", "queue_limit_ms", "retries", "idle_exit_ms"})
    described.erase(of_client);
  return {{"op", "attach"},
          {"needs", {"attach"}},
          {"pool", std::move(described)},
          {"environment", EnvironmentOfPool()},
          {"stamp", StampOf(pool.daemon)},
          {"folder", std::filesystem::current_path().string()},
          {"sentinel", options.sentinel},
          {"queue_limit_ms", options.queue_limit.count()}};
}

Attachment ReadAttachLine(const Json& line, const std::optional<std::string>& launch) {
  std::vector<std::string> needs, lacks;
  if (line.contains("needs") && line["needs"].is_array())
    for (const Json& need : line["needs"])
      if (need.is_string()) needs.push_back(need);
  std::copy_if(needs.begin(), needs.end(), std::back_inserter(lacks), [](const std::string& need) {
    return std::ranges::find(kServerFeatures, need) == std::end(kServerFeatures);
  });
  if (!lacks.empty())
    throw std::invalid_argument("this server is older than its client, and has not the features " +
                                base::Join(lacks) + ": end it with `cppool stop` and start another");
  Attachment result;
  std::string op, stamp;
  Json pool = Json::object();
  std::vector<std::pair<std::string, std::string>> environment;
  Members members(line, "\"attach\"");
  members.Take("op", &op);
  members.Take("id", &pool);  // of any type, as in every request
  members.Take("needs", &needs);
  members.Take("environment", &environment);
  members.Take("stamp", &stamp);
  members.Take("folder", &result.folder);
  members.Take("sentinel", &result.sentinel);
  members.Take("queue_limit_ms", &result.queue_limit);
  pool = Json::object();
  members.Take("pool", &pool);
  members.End();
  if (launch && pool.is_object() && pool.value("launch", Json()).is_null()) pool["launch"] = *launch;
  result.pool = PoolOptionsFromJson(pool);
  if (result.sentinel.find('\n') != std::string::npos)
    throw std::invalid_argument("sentinel: an answer is one line");
  if (!result.folder.starts_with("/"))
    throw std::invalid_argument("\"folder\" must be an absolute path: paths in requests are relative to it");
  if (!result.pool.attach.empty()) throw std::invalid_argument("a server attaches to no other one");
  // Limits are of the pool's first client: they make no other pool.
  for (const char* limit : {"start_limit_ms", "grace_ms", "kill_grace_ms"}) pool.erase(limit);
  result.identity = Json{pool, environment, stamp}.dump();
  std::map<std::string, std::string> variables(environment.begin(), environment.end());
  for (const auto& [name, value] : result.pool.environment) variables[name] = value;
  if (!result.pool.devices.empty() && std::ranges::none_of(result.pool.environment, [](const auto& entry) {
        return entry.first == "CUDA_VISIBLE_DEVICES";
      }))
    variables.erase("CUDA_VISIBLE_DEVICES");  // the option `devices` sets it
  result.pool.environment.assign(variables.begin(), variables.end());
  return result;
}

}  // namespace cppool::client
