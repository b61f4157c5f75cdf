// A file descriptor with an owner: the ends of the pipes that the lines travel through. Header-only. The
// daemon and the client use it, and neither may link the other.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace cppool::base {

// Closes the descriptor when it is destroyed. Not thread-safe.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd), inode_(Inode(fd)) {}  // -1: none
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), inode_(other.inode_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    fd_ = std::exchange(other.fd_, -1);
    inode_ = other.inode_;
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }  // -1: none
  explicit operator bool() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  // For a forked child. Another owner in the child may have closed the number and opened another file under
  // it: closes it only if it is still the same file.
  void ResetInherited() {
    if (fd_ >= 0 && Inode(fd_) == inode_) close(fd_);
    fd_ = -1;
  }

 private:
  static ino_t Inode(int fd) {
    struct stat status;
    return fd >= 0 && fstat(fd, &status) == 0 ? status.st_ino : 0;
  }

  int fd_ = -1;
  ino_t inode_ = 0;
};

// Takes `fd`; returns a descriptor above 2 for it. A harness may have closed 0 to 2, and a child's own
// streams replace them. None for -1. Throws std::system_error.
inline UniqueFd AboveStandard(int fd) {
  UniqueFd owned(fd);
  if (fd < 0 || fd > 2) return owned;
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (moved < 0) throw std::system_error(errno, std::generic_category(), "fcntl");
  return UniqueFd(moved);
}

}  // namespace cppool::base
