// A file descriptor with an owner.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <utility>

namespace cppool::client {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd), inode_(Inode(fd)) {}
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
  int Release() { return std::exchange(fd_, -1); }
  void Reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  // In a forked child, where the number may have been closed and taken by something else since.
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

}  // namespace cppool::client
