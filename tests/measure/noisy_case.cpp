// A case in which rank 0 writes `bytes` bytes to stdout or stderr of the process, as a chatty library does.
#include <cppool/case.h>

#include <cstring>
#include <iterator>

#include "tests/measure/chatter.h"

namespace {

const cppool_parameter kParameters[] = {
    {"stream", CPPOOL_TYPE_STRING, "\"stdout\"", "[\"stdout\", \"stderr\"]", 0, 0, 0, "where to write"},
    {"bytes", CPPOOL_TYPE_INTEGER, "0", nullptr, 0, 1e12, 0, "number of bytes, in lines of 64 bytes"},
    {"blocks", CPPOOL_TYPE_BOOLEAN, "false", nullptr, 0, 0, 0, "a thousand lines per write instead of one"},
};

cppool_status Run(cppool_case_context* c) {
  if (c->runtime->rank != 0) return CPPOOL_OK;
  const int fd = std::strcmp(c->string(c, "stream"), "stdout") == 0 ? 1 : 2;
  cppool_check all{"chatter", "asked", 0, 0, 0, 0, 0};
  all.ok = WriteChatter(fd, c->integer(c, "bytes"), c->boolean(c, "blocks") != 0) ? 1 : 0;
  c->check(c, &all);
  return CPPOOL_OK;
}

const cppool_case kNoisy{CPPOOL_CASE_ABI,
                         sizeof(cppool_case),
                         "noisy",
                         "writes to stdout or stderr while it runs",
                         kParameters,
                         std::size(kParameters),
                         nullptr,
                         &Run,
                         0};

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case* const cases[] = {&kNoisy, nullptr};
  return cases;
}
