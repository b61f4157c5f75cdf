// cppoold_planted says at its start which bug it has, and refuses an unknown one as it does an unknown
// option.
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "tests/planted/planted_bug.h"

namespace {

[[gnu::constructor]] void SayPlantedBug() {
  try {
    if (const char* bug = cppool::kernels::PlantedBugName())
      std::fprintf(stderr, "cppoold: a bug is planted: %s\n", bug);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cppoold: %s\n", error.what());
    _exit(2);
  }
}

}  // namespace
