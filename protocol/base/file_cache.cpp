#include "base/file_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <regex>
#include <system_error>
#include <vector>

#include "base/new_file.h"
#include "base/unique_fd.h"
#include "base/words.h"

namespace cppool::base {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kLargest = std::uint64_t{2} << 30;
constexpr std::int64_t kSettledNs = 2'000'000'000;  // more than the clock of any file system counts in
constexpr std::size_t kMostDigests = 4096;
constexpr std::chrono::minutes kKeptLongEnough{10};
// The std::regex in Entries() has the same characters.
constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+-";
constexpr const char* kOtherFolder = "set CPPOOL_CACHE to a folder that can be written by you alone";

std::int64_t Nanoseconds(const timespec& time) {
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

FileIdentity ToIdentity(const struct stat& status) {
  return {status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
          Nanoseconds(status.st_mtim), Nanoseconds(status.st_ctim)};
}

[[noreturn]] void Refuse(const std::string& path, int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      throw FileError(path + ": there is no such file: check the path");
    case EACCES:
    case EPERM:
      throw FileError(path + ": may not be read: check the permissions of the file and its folders");
    default:
      throw FileError(path + ": cannot be read: " + std::strerror(error));
  }
}

void CheckKind(const std::string& path, const struct stat& status) {
  if (S_ISDIR(status.st_mode)) throw FileError(path + ": is a folder: name a file");
  if (!S_ISREG(status.st_mode)) throw FileError(path + ": is no regular file");
  if (static_cast<std::uint64_t>(status.st_size) > kLargest)
    throw FileError(path + ": has " + std::to_string(status.st_size) + " bytes, more than 2 GiB");
}

// Reads as many bytes as the file had at `status`, or fewer where it is shorter now.
std::string ReadBytes(int fd, const struct stat& status, const std::string& path) {
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t count = read(fd, bytes.data() + have, bytes.size() - have);
    if (count < 0 && errno != EINTR) Refuse(path, errno);
    if (count == 0) break;
    have += count > 0 ? static_cast<std::size_t>(count) : 0;
  }
  bytes.resize(have);
  return bytes;
}

// Makes the folder, and those above it that are missing, for this user alone, whatever the umask is.
bool MakeFolders(const fs::path& folder) {
  if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return true;
  if (errno != ENOENT || !folder.has_relative_path()) return false;
  return MakeFolders(folder.parent_path()) && (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST);
}

bool IsAnothers(const struct stat& status) { return status.st_uid != geteuid() && status.st_uid != 0; }

bool OthersMayChange(const struct stat& status) {
  return IsAnothers(status) || (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
}

enum class Maker { kUser, kCppool };

// In a folder that all may write, such as /tmp, another user's link may lead to a folder that is not meant:
// it is not followed.
int LookAt(const std::string& folder, struct stat* status) {
  struct stat above {};
  const bool shared =
      stat(fs::path(folder).parent_path().c_str(), &above) != 0 || (above.st_mode & S_IWOTH) != 0;
  const bool follows = !shared || (lstat(folder.c_str(), status) == 0 && !IsAnothers(*status));
  return follows ? stat(folder.c_str(), status) : lstat(folder.c_str(), status);
}

// Makes the folder. What keeps it from being used; empty: nothing. In one that cppool makes others lose the
// permission to write.
std::string WhyUnusable(const std::string& folder, Maker maker) {
  if (!MakeFolders(folder)) return folder + " cannot be made: " + std::strerror(errno);
  struct stat status {};
  if (LookAt(folder, &status) != 0) return folder + ": " + std::strerror(errno);
  if (S_ISLNK(status.st_mode))
    return folder + " is another user's symbolic link in a folder that all users can write";
  if (!S_ISDIR(status.st_mode)) return folder + " cannot be made: " + std::strerror(ENOTDIR);
  const mode_t mended = status.st_mode & 07777 & ~static_cast<mode_t>(S_IWGRP | S_IWOTH);
  if (maker == Maker::kCppool && status.st_uid == geteuid() && OthersMayChange(status) &&
      chmod(folder.c_str(), mended) == 0)
    status.st_mode = S_IFDIR | mended;
  if (IsAnothers(status))
    return folder + " belongs to user " + std::to_string(status.st_uid) +
           ", who can change it, and files from it are run";
  if (OthersMayChange(status))
    return folder + " can be changed by other users, and files from it are run (`chmod go-w` ends that)";
  if (access(folder.c_str(), W_OK | X_OK) != 0) return folder + " cannot be written: " + std::strerror(errno);
  return "";
}

// With a slash at its end, lstat would follow the folder's link.
std::string WithoutSlashes(fs::path folder) {
  while (folder.has_relative_path() && (folder.filename().empty() || folder.filename() == "."))
    folder = folder.parent_path();
  return folder.string();
}

const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

struct Entry {
  fs::path path;
  fs::file_time_type used;
  std::uint64_t bytes;
};

// The files that a cache has made: those with names of FileCache::Name, finished or not.
std::vector<Entry> Entries(const std::string& folder) {
  static const std::regex made("[A-Za-z0-9_.+-]*-[0-9a-f]{16}\\.[a-z]+(\\.[0-9a-f]{16}\\.part)?");
  std::vector<Entry> entries;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code gone;
    if (!std::regex_match(at->path().filename().string(), made) ||
        at->symlink_status(gone).type() != fs::file_type::regular)
      continue;
    const auto used = at->last_write_time(gone);
    const auto bytes = gone ? 0 : at->file_size(gone);
    if (!gone) entries.push_back({at->path(), used, bytes});
  }
  return entries;
}

}  // namespace

FileIdentity IdentityOf(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) Refuse(path, errno);
  return ToIdentity(status);
}

std::optional<FileIdentity> IdentityIfThere(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 ? std::optional(ToIdentity(status)) : std::nullopt;
}

std::int64_t FileClock() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return Nanoseconds(now);
}

WholeFile ReadWhole(const std::string& path) {
  const UniqueFd fd(
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO would wait for its writer
  if (!fd) Refuse(path, errno);
  struct stat before {
  }, after{};
  if (fstat(fd.get(), &before) != 0) Refuse(path, errno);
  CheckKind(path, before);
  WholeFile file;
  file.bytes = ReadBytes(fd.get(), before, path);
  if (fstat(fd.get(), &after) != 0) Refuse(path, errno);
  file.identity = ToIdentity(after);
  if (file.bytes.size() < static_cast<std::size_t>(before.st_size) || !(ToIdentity(before) == file.identity))
    throw FileError(path + ": changed while it was read: wait until it has been built, and try again");
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  file.settled = Nanoseconds(now) - file.identity.changed_ns > kSettledNs;
  return file;
}

std::string FileDigests::Known(const std::string& path) const {
  const FileIdentity identity = IdentityOf(path);
  const std::lock_guard lock(mutex_);
  const auto known = known_.find(path);
  return known != known_.end() && known->second.first == identity ? known->second.second : "";
}

FileDigests::Content FileDigests::Read(const std::string& path) {
  WholeFile file = ReadWhole(path);
  std::string digest = digest_(path, file.bytes);
  const std::lock_guard lock(mutex_);
  known_.erase(path);
  if (known_.size() >= kMostDigests) known_.clear();
  if (file.settled) known_.emplace(path, std::pair(file.identity, digest));
  return {std::move(file.bytes), std::move(digest)};
}

std::string FileDigests::Of(const std::string& path) {
  std::string known = Known(path);
  return known.empty() ? Read(path).digest : known;
}

std::string CacheFolder() {
  if (const char* folder = Variable("CPPOOL_CACHE")) {
    const std::string chosen = WithoutSlashes(fs::absolute(folder));
    if (const std::string why = WhyUnusable(chosen, Maker::kUser); !why.empty())
      throw FileError("CPPOOL_CACHE: " + why + ": " + kOtherFolder);
    return chosen;
  }
  std::vector<std::string> folders;
  if (const char* caches = Variable("XDG_CACHE_HOME"); caches && *caches == '/')
    folders.push_back(std::string(caches) + "/cppool");
  if (const char* home = Variable("HOME"); home && *home == '/')
    folders.push_back(std::string(home) + "/.cache/cppool");
  std::error_code ignored;
  folders.push_back((fs::temp_directory_path(ignored) / ("cppool-" + std::to_string(geteuid()))).string());
  std::vector<std::string> reasons;
  for (const std::string& folder : folders) {
    const std::string why = WhyUnusable(folder, Maker::kCppool);
    if (why.empty()) return folder;
    reasons.push_back(why);
  }
  throw FileError("there is no folder for cached files (" + Join(reasons, "; ") + "): " + kOtherFolder);
}

FileCache::FileCache(const std::string& name, Limits limits)
    : folder_(CacheFolder() + "/" + name), limits_(limits) {
  MakeFolder();
}

void FileCache::MakeFolder() const {
  if (const std::string why = WhyUnusable(folder_, Maker::kCppool); !why.empty())
    throw FileError("the cache " + why + ": " + kOtherFolder);
}

std::string FileCache::Name(const std::string& path, const std::string& digest, std::string_view ending) {
  constexpr std::size_t kLongest = 100;
  std::string stem = fs::path(path).stem().string().substr(0, kLongest);
  for (char& c : stem)
    if (kPlain.find(c) == std::string_view::npos) c = '_';
  return stem + "-" + digest + std::string(ending);
}

bool FileCache::Use(const std::string& file) const {
  const std::string path = Path(file);
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && !OthersMayChange(status) &&
         utimensat(AT_FDCWD, path.c_str(), nullptr, 0) == 0;
}

std::optional<std::string> FileCache::Read(const std::string& file) const {
  if (!Use(file)) return std::nullopt;
  const std::string path = Path(file);
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd && errno == ENOENT) return std::nullopt;  // another process has pruned the cache
  struct stat status {};
  if (!fd || fstat(fd.get(), &status) != 0) Refuse(path, errno);
  CheckKind(path, status);
  return ReadBytes(fd.get(), status, path);
}

void FileCache::Write(const std::string& file, std::string_view bytes) const {
  MakeFolder();
  std::string part;
  UniqueFd fd = MakePart(Path(file), 0700, &part);
  const auto fail = [&](int error) {
    unlink(part.c_str());
    throw FileError("the cached file " + Path(file) + " cannot be written: " + std::strerror(error) +
                    ": free space on its disk, or set CPPOOL_CACHE to another folder");
  };
  if (!fd) fail(errno);
  while (!bytes.empty()) {
    const ssize_t count = write(fd.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail(count < 0 ? errno : ENOSPC);
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  if (close(fd.Release()) != 0) fail(errno);  // where a network file system reports that there is no space
  if (rename(part.c_str(), Path(file).c_str()) != 0) fail(errno);
}

void FileCache::Prune() const {
  std::vector<Entry> entries = Entries(folder_);
  std::size_t files = entries.size();
  std::uint64_t bytes = 0;
  for (const Entry& entry : entries) bytes += entry.bytes;
  std::ranges::sort(entries, [](const Entry& a, const Entry& b) { return a.used < b.used; });
  const auto recent = fs::file_time_type::clock::now() - kKeptLongEnough;
  for (const Entry& entry : entries) {
    if ((files <= limits_.files && bytes <= limits_.bytes) || entry.used > recent) return;
    std::error_code error;
    if (!fs::remove(entry.path, error) || error) continue;
    --files;
    bytes -= entry.bytes;
  }
}

}  // namespace cppool::base
