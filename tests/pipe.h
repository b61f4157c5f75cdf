// A pipe whose ends close by themselves.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include "base/unique_fd.h"
#include "tests/catch.h"

namespace cppool::test {

struct Pipe {
  base::UniqueFd read_end, write_end;
  Pipe() {
    int fds[2];
    REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
    read_end = base::UniqueFd(fds[0]);
    write_end = base::UniqueFd(fds[1]);
  }
};

}  // namespace cppool::test
