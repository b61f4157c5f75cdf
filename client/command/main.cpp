#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <iostream>

#include "client/command/command.h"

namespace {

// Else the next file to be opened, a report for example, would get the number of a closed standard
// descriptor.
void OpenStandardDescriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);  // takes the lowest that is free
  }
}

}  // namespace

int main(int argc, char** argv) {
  OpenStandardDescriptors();
  // Writing to a closed pipe fails then, which is reported, and the JUnit file is still written.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // the same for a file that grows beyond the limit of `ulimit -f`
  try {
    cppool::command::Streams streams{std::cout, std::cerr, isatty(STDERR_FILENO) == 1};
    if (argc > 0) streams.program = argv[0];
    const int code = cppool::command::Main({argv + std::min(argc, 1), argv + argc}, streams);
    if (std::cout.flush()) return code;
    std::cerr << "cppool: stdout could not be written\n";
    return code == 0 ? cppool::command::kFailure : code;
  } catch (const std::exception& error) {
    std::cerr << "cppool: " << error.what() << "\n";
    return cppool::command::kFailure;
  }
}
