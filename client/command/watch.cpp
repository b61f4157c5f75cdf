#include "client/command/watch.h"

#include <poll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <filesystem>
#include <system_error>

#include "base/poll_timeout.h"
#include "client/src/process.h"

namespace cppool::command {
namespace {

namespace fs = std::filesystem;
using client::Clock;

constexpr std::chrono::milliseconds kQuiet{50};
constexpr std::chrono::seconds kLongest{2};  // that a file which is saved again and again is waited for
constexpr int kMostLinks = 40;               // as the kernel follows

// Not base::FileClock, which may be behind what is saved before: then a save would count twice.
std::int64_t Now() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

// A file that was just made is being written: its save comes later.
bool IsNewFile(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1;
}

}  // namespace

FileWatch::FileWatch() : events_(inotify_init1(IN_CLOEXEC | IN_NONBLOCK)), looked_(Now()) {
  if (!events_) throw std::system_error(errno, std::generic_category(), "inotify");
}

void FileWatch::Add(const std::vector<std::string>& files) {
  for (const std::string& file : files) {
    if (files_.count(file) != 0) continue;
    Follow(file);
    const auto& identity = files_[file] = base::IdentityIfThere(file);
    if (identity && identity->changed_ns > looked_ && missed_.empty()) missed_ = file;
  }
}

// A watch of the file itself would end with it when an editor replaces it.
void FileWatch::Follow(const std::string& file) {
  const fs::path path = fs::absolute(file).relative_path();
  std::deque<fs::path> left(path.begin(), path.end());
  fs::path at = "/";
  for (int links = 0; !left.empty() && links <= kMostLinks;) {
    const fs::path name = left.front();
    left.pop_front();
    if (name.empty() || name == ".") continue;
    if (name == "..") {
      at = at.parent_path();
      continue;
    }
    const int number =
        inotify_add_watch(events_.get(), at.c_str(), IN_CLOSE_WRITE | IN_CREATE | IN_MOVED_TO | IN_ONLYDIR);
    if (number >= 0) {
      folders_[number] = at.string();
      on_way_[{number, name.string()}].insert(file);
    } else if (errno == ENOENT || errno == ENOTDIR) {
      return;
    } else if (errno != EACCES || left.empty()) {  // without a right to list the folders above it is no less
      throw std::system_error(errno, std::generic_category(), "watching " + at.string());
    }
    std::error_code no_link;
    const fs::path target = fs::read_symlink(at / name, no_link);
    if (no_link) {
      at /= name;
      continue;
    }
    ++links;
    if (target.is_absolute()) at = "/";
    const fs::path relative = target.relative_path();
    left.insert(left.begin(), relative.begin(), relative.end());
  }
}

bool FileWatch::WasSaved(const std::string& file) {
  const auto identity = base::IdentityIfThere(file);
  if (!identity || identity == files_.at(file)) return false;
  files_[file] = identity;
  return true;
}

std::set<std::string> FileWatch::OnTheWay(int folder, const std::string& name, bool made) const {
  const auto found = on_way_.find({folder, name});
  if (found == on_way_.end() || (made && IsNewFile(folders_.at(folder) + "/" + name))) return {};
  return found->second;
}

std::string FileWatch::ReadSaved() {
  alignas(inotify_event) char buffer[16384];
  const ssize_t count = read(events_.get(), buffer, sizeof buffer);
  std::set<std::string> touched;
  for (ssize_t at = 0; at < count;) {
    inotify_event event;
    std::memcpy(&event, buffer + at, sizeof event);
    const char* name = buffer + at + sizeof event;
    at += static_cast<ssize_t>(sizeof event + event.len);
    if ((event.mask & IN_Q_OVERFLOW) != 0)
      for (const auto& [file, identity] : files_) touched.insert(file);
    if (event.len > 0) touched.merge(OnTheWay(event.wd, name, (event.mask & IN_CREATE) != 0));
  }
  std::string saved;
  for (const std::string& file : touched) {
    Follow(file);
    if (WasSaved(file) && saved.empty()) saved = file;
  }
  return saved;
}

std::string FileWatch::Wait(int stop) {
  std::string first = std::exchange(missed_, "");
  const auto never = Clock::time_point::max();
  auto quiet = first.empty() ? never : Clock::now() + kQuiet;
  auto latest = first.empty() ? never : Clock::now() + kLongest;
  while (Clock::now() < std::min(quiet, latest)) {
    pollfd fds[2] = {{events_.get(), POLLIN, 0}, {stop, POLLIN, 0}};
    const int timeout = first.empty() ? -1 : base::PollTimeout(std::min(quiet, latest));
    if (poll(fds, 2, timeout) <= 0) continue;  // the time has passed, or it was interrupted
    if (fds[1].revents != 0) {
      missed_ = first;
      return "";
    }
    const std::string saved = ReadSaved();
    if (saved.empty()) continue;
    quiet = Clock::now() + kQuiet;
    if (!first.empty()) continue;
    first = saved;
    latest = Clock::now() + kLongest;
  }
  looked_ = Now();
  return first;
}

}  // namespace cppool::command
