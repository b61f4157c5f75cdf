#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <sstream>
#include <utility>

#include <cppool/pool.h>
#include "client/src/search_path.h"

namespace cppool {

namespace client {

std::vector<std::string> SearchPath() {
  const char* path = getenv("PATH");
  std::istringstream text(path != nullptr ? path : "");
  std::vector<std::string> folders;
  for (std::string folder; std::getline(text, folder, ':');)
    if (!folder.empty()) folders.push_back(folder);
  return folders;
}

bool IsProgram(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && access(path.c_str(), X_OK) == 0;
}

}  // namespace client

namespace {

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
  for (std::string& folder : client::SearchPath()) folders.push_back(std::move(folder));
  folders.emplace_back(CPPOOL_INSTALL_BINDIR);
  for (const std::string& folder : folders)
    if (client::IsProgram(folder + "/cppoold")) return folder + "/cppoold";
  return "";
}

}  // namespace cppool
