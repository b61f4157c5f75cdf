#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include <climits>
#include <memory>
#include <utility>

#include <cppool/pool.h>
#include "client/src/shell.h"

extern "C" [[gnu::weak]] const char cppool_own_daemon[];  // cppool/pool.h, in the program

namespace cppool {

namespace {

std::string FolderOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

std::string Program() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  return length <= 0 ? "" : std::string(path, static_cast<std::size_t>(length));
}

// Returns the shared library that this code is in; empty when it is in the program itself.
std::string Library() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&Program), &info) == 0 || info.dli_fname == nullptr) return "";
  const std::unique_ptr<char, decltype(&free)> real(realpath(info.dli_fname, nullptr), &free);
  const std::string path = info.dli_fname;
  return path.starts_with('/') && real && real.get() != Program() ? path : "";
}

}  // namespace

std::string FindDaemon(const PoolOptions& options) {
  if (!options.daemon.empty()) return options.daemon;
  if (const char* path = getenv("CPPOOL_DAEMON"); path != nullptr && *path != '\0') return path;
  std::vector<std::string> folders;
  if (const std::string library = Library(); !library.empty())
    for (const char* programs : {"/../bin", "/" CPPOOL_LIBRARY_TO_PROGRAMS})
      folders.push_back(FolderOf(library) + programs);
  if (const std::string program = Program(); !program.empty())
    folders.insert(folders.end(), {FolderOf(program), FolderOf(program) + "/../bin"});
  if (cppool_own_daemon != nullptr) folders.push_back(FolderOf(cppool_own_daemon));
  for (std::string& folder : client::SearchPath()) folders.push_back(std::move(folder));
  folders.emplace_back(CPPOOL_INSTALL_BINDIR);
  for (const std::string& folder : folders)
    if (client::IsProgram(folder + "/cppoold")) return folder + "/cppoold";
  return "";
}

}  // namespace cppool
