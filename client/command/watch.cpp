#include "client/command/watch.h"

#include <poll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace cppool::command {
namespace {

namespace fs = std::filesystem;

constexpr int kQuietMs = 50;

std::string Absolute(const std::string& file) { return fs::absolute(file).lexically_normal().string(); }

}  // namespace

FileWatch::FileWatch() : events_(inotify_init1(IN_CLOEXEC | IN_NONBLOCK)) {
  if (!events_) throw std::system_error(errno, std::generic_category(), "inotify");
}

void FileWatch::Add(const std::vector<std::string>& files) {
  for (const std::string& file : files) {
    const fs::path path = Absolute(file);
    if (!files_.emplace(path.string(), file).second) continue;
    // The folder: a watch of the file would end with it when an editor replaces it.
    const std::string folder = path.parent_path().string();
    const int number = inotify_add_watch(events_.get(), folder.c_str(), IN_CLOSE_WRITE | IN_MOVED_TO);
    if (number >= 0) {
      folders_[number] = folder;
    } else if (errno != ENOENT && errno != ENOTDIR) {
      throw std::system_error(errno, std::generic_category(), "watching " + folder);
    }
  }
}

std::string FileWatch::ReadSaved() {
  alignas(inotify_event) char buffer[16384];
  const ssize_t count = read(events_.get(), buffer, sizeof buffer);
  std::string saved;
  for (ssize_t at = 0; at < count;) {
    inotify_event event;
    std::memcpy(&event, buffer + at, sizeof event);
    const char* name = buffer + at + sizeof event;
    at += static_cast<ssize_t>(sizeof event + event.len);
    const auto folder = folders_.find(event.wd);
    if (event.len == 0 || folder == folders_.end()) continue;
    const auto file = files_.find((fs::path(folder->second) / name).string());
    if (file != files_.end() && saved.empty()) saved = file->second;
  }
  return saved;
}

std::string FileWatch::Wait() {
  std::string first;
  for (;;) {
    pollfd fd = {events_.get(), POLLIN, 0};
    const int ready = poll(&fd, 1, first.empty() ? -1 : kQuietMs);
    if (ready == 0) return first;
    if (ready < 0) continue;  // interrupted
    const std::string saved = ReadSaved();
    if (first.empty()) first = saved;
  }
}

}  // namespace cppool::command
