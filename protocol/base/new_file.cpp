#include "base/new_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/file_cache.h"
#include "base/unique_fd.h"

namespace cppool::base {
namespace {

std::string WhatToDo(int error, const std::string& folder) {
  switch (error) {
    case ENOENT:
      if (access(folder.c_str(), F_OK) == 0)
        return "no file can be made in " + folder + ": name one elsewhere";
      return "there is no folder " + folder + ": make it, or name a file elsewhere";
    case ENOTDIR:
      return folder + " is not a folder: name a file elsewhere";
    case ENOSPC:
    case EDQUOT:
      return std::string(std::strerror(error)) + ": make room, or name a file elsewhere";
    case EFBIG:
      return std::string(std::strerror(error)) + ": raise the limit of file sizes (`ulimit -f`)";
    case ENAMETOOLONG:
      return "the name is too long: name a shorter one";
    case EACCES:
    case EPERM:
      return std::string(std::strerror(error)) + ": change the permissions of " + folder +
             ", or name a file elsewhere";
    default:
      return std::string(std::strerror(error)) + ": name a file elsewhere";
  }
}

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

std::string WhyNotWritable(const std::string& path) {
  struct stat status {};
  if (path.ends_with('/') || (stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)))
    return "it is a folder: name a file in it";
  if (status.st_mode != 0 && !S_ISREG(status.st_mode))
    return "it exists and is no regular file: name another one";
  const std::string folder = FolderOf(path);
  if (stat(folder.c_str(), &status) != 0) return WhatToDo(errno, folder);
  if (!S_ISDIR(status.st_mode)) return WhatToDo(ENOTDIR, folder);
  return access(folder.c_str(), W_OK | X_OK) == 0 ? "" : WhatToDo(errno, folder);
}

UniqueFd MakePart(const std::string& path, mode_t mode, std::string* part) {
  for (int tries = 0; tries < 100; ++tries) {
    std::uint64_t random =
        0;  // a process id is not enough: two containers may share a folder and a process id
    if (getrandom(&random, sizeof random, 0) != sizeof random) break;
    char end[32];
    std::snprintf(end, sizeof end, ".%016llx.part", static_cast<unsigned long long>(random));
    *part = path + end;
    UniqueFd fd(open(part->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
    if (fd || errno != EEXIST) return fd;
  }
  return UniqueFd();
}

NewFile::NewFile(const std::string& path) : path_(path) {
  UniqueFd fd = MakePart(path, 0666, &part_);
  if (!fd) Fail(errno);
  out_.reset(fdopen(fd.get(), "wb"));
  if (!out_) {
    const int error = errno;
    std::remove(part_.c_str());
    Fail(error);
  }
  fd.Release();
}

NewFile::~NewFile() {
  if (!committed_) std::remove(part_.c_str());
}

void NewFile::Write(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), out_.get()) < text.size()) Fail(errno);
}

void NewFile::Commit() {
  if (std::fclose(out_.release()) != 0 || std::rename(part_.c_str(), path_.c_str()) != 0) Fail(errno);
  committed_ = true;
}

void NewFile::Fail(int error) const {
  throw FileError(path_ + ": cannot be written: " + WhatToDo(error, FolderOf(path_)));
}

}  // namespace cppool::base
