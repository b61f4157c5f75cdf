#include <unistd.h>

#include <exception>
#include <iostream>

#include "command.h"

int main(int argc, char** argv) {
  try {
    cppool::command::Streams streams{std::cout, std::cerr, isatty(STDERR_FILENO) == 1};
    return cppool::command::Main({argv + 1, argv + argc}, streams);
  } catch (const std::exception& error) {
    std::cerr << "cppool: " << error.what() << "\n";
    return cppool::command::kFailure;
  }
}
