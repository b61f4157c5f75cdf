// Header-only.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <tuple>

#include "base/unique_fd.h"

namespace cppool::base {

// What a thread in poll(2) is woken by. Throws std::system_error when there is no descriptor left.
class Event {
 public:
  Event() : fd_(AboveStandard(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
    if (!fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
  }

  int fd() const { return fd_.get(); }
  // Makes the descriptor readable until it is cleared. Any thread, or a signal handler.
  void Set() const {
    const std::uint64_t one = 1;
    std::ignore = write(fd(), &one, sizeof one);
  }
  void Clear() const {
    std::uint64_t ignored = 0;
    std::ignore = read(fd(), &ignored, sizeof ignored);
  }

 private:
  const UniqueFd fd_;
};

}  // namespace cppool::base
