// A case that leaves state in its process, and fails if earlier cases left certain state: for tests of
// `cppool run --diagnose`.
#include <cppool/case.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

namespace {

const cppool_parameter kParameters[] = {
    {"leave", CPPOOL_TYPE_STRING, "\"\"", nullptr, 0, 0, 0, "letters that are added to the process's trail"},
    {"dread", CPPOOL_TYPE_STRING, "\"!\"", nullptr, 0, 0, 0,
     "fails if the trail has these letters in this order, possibly with others between them"},
    {"only", CPPOOL_TYPE_STRING, "\"\"", nullptr, 0, 0, 0,
     "for each time that it could fail, in any process: x to fail, . to pass; the last letter holds for all "
     "later times"},
    {"log", CPPOOL_TYPE_STRING, "\"\"", nullptr, 0, 0, 0, "the file that counts these times"},
    {"by", CPPOOL_TYPE_STRING, "\"check\"", "[\"check\", \"abort\", \"refusal\"]", 0, 0, 0, "how it fails"},
};

std::string trail;  // rank 0's state, which cases should have restored

bool Holds(const char* letters) {
  for (char letter : trail)
    if (*letters == letter) ++letters;
  return *letters == '\0';
}

bool ThisTime(const std::string& only, const char* log) {
  if (only.empty()) return true;
  std::size_t times = 0;
  if (std::ifstream file(log); file)
    times = static_cast<std::size_t>(std::distance(std::istreambuf_iterator<char>(file), {}));
  std::ofstream(log, std::ios::app) << '.';
  return only[std::min(times, only.size() - 1)] == 'x';
}

cppool_status Run(cppool_case_context* c) {
  if (c->runtime->rank != 0) return CPPOOL_OK;
  const bool fails = Holds(c->string(c, "dread")) && ThisTime(c->string(c, "only"), c->string(c, "log"));
  trail += c->string(c, "leave");
  const char* by = c->string(c, "by");
  if (fails && std::strcmp(by, "abort") == 0) std::abort();
  if (fails && std::strcmp(by, "refusal") == 0) {
    c->fail(c, "the trail has the letters of `dread`");
    return CPPOOL_INTERNAL;
  }
  const cppool_check check{"trail", "nothing", fails ? 1.0 : 0.0, 0, 0, !fails, 0};
  c->check(c, &check);
  return CPPOOL_OK;
}

const cppool_case kPolluting{CPPOOL_CASE_ABI,
                             sizeof(cppool_case),
                             "polluting",
                             "leaves traces",
                             kParameters,
                             std::size(kParameters),
                             nullptr,
                             &Run,
                             0};

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case* const cases[] = {&kPolluting, nullptr};
  return cases;
}
