#include "daemon/shared_memory.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string_view>
#include <tuple>

namespace cppool::daemon {
namespace {

constexpr const char* kFolder = "/dev/shm/";

bool HasOneOf(std::string_view name, const std::set<std::string>& numbers) {
  constexpr const char* kDigits = "0123456789";
  while (true) {
    name.remove_prefix(std::min(name.find_first_of(kDigits), name.size()));
    if (name.empty()) return false;
    const std::size_t length = std::min(name.find_first_not_of(kDigits), name.size());
    if (numbers.count(std::string(name.substr(0, length))) != 0) return true;
    name.remove_prefix(length);
  }
}

}  // namespace

void RemoveSharedMemory(const std::set<std::string>& numbers, const timespec& since) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kFolder), closedir);
  if (!folder) return;
  while (const dirent* const entry = readdir(folder.get())) {
    if (!HasOneOf(entry->d_name, numbers)) continue;
    const std::string path = std::string(kFolder) + entry->d_name;
    struct stat status {};
    if (lstat(path.c_str(), &status) == 0 &&
        std::tie(status.st_ctim.tv_sec, status.st_ctim.tv_nsec) >= std::tie(since.tv_sec, since.tv_nsec))
      unlink(path.c_str());
  }
}

}  // namespace cppool::daemon
