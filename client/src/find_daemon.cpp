#include <stdlib.h>
#include <unistd.h>

#include <climits>

#include "cppool/pool.h"

namespace cppool {
namespace {

bool IsProgram(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

std::string ProgramFolder() {
  char path[PATH_MAX];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) return "";
  std::string text(path, static_cast<std::size_t>(length));
  return text.substr(0, text.rfind('/'));
}

}  // namespace

std::string FindDaemon(const PoolOptions& options) {
  if (!options.daemon.empty()) return options.daemon;
  if (const char* path = getenv("CPPOOL_DAEMON"); path != nullptr && *path != '\0') return path;
  std::vector<std::string> folders;
  if (std::string program = ProgramFolder(); !program.empty()) folders = {program, program + "/../bin"};
  folders.emplace_back(CPPOOL_INSTALL_BINDIR);
  const char* path = getenv("PATH");
  std::string_view rest = path != nullptr ? path : "";
  while (!rest.empty()) {
    std::size_t end = rest.find(':');
    folders.emplace_back(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  for (const std::string& folder : folders)
    if (!folder.empty() && IsProgram(folder + "/cppoold")) return folder + "/cppoold";
  return "";
}

}  // namespace cppool
