// Cases that leave something behind, for the end-to-end tests. The constructor, `validate`, `run` and the work of "floats" change the
// floating-point environment, and fail when they find it changed.
#include <cppool/case.h>
#include <fcntl.h>
#include <unistd.h>

#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <thread>

namespace {

// What is not as it is by default: rounding, traps, numbers below the normal ones.
std::string Changed() {
  std::string changed;
  if (std::fegetround() != FE_TONEAREST) changed += " rounding";
  if (fegetexcept() != 0) changed += " traps";
  volatile double least = std::numeric_limits<double>::denorm_min();
  volatile double sum = least + least;
  if (sum == 0) changed += " subnormal";
  return changed;
}

void Change() {
  std::fesetround(FE_UPWARD);
  feenableexcept(FE_DIVBYZERO);
#ifdef __x86_64__
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);  // FTZ and DAZ
#endif
}

// The environment that was found by each part; empty: the default one.
struct Found {
  std::string run, stream, new_stream;
};

cppool_status Validate(cppool_validation* v) {
  const std::string changed = Changed();
  Change();
  if (changed.empty()) return CPPOOL_OK;
  v->fail(v, ("validate found changed:" + changed).c_str());
  return CPPOOL_INVALID_REQUEST;
}

cppool_status RunFloats(cppool_case_context* c) {
  cppool_runtime* const rt = c->runtime;
  Found found;
  found.run = Changed();
  Change();
  cppool_stream side = nullptr;  // on a new thread, which inherits what this one has
  cppool_status status = rt->stream_create(rt, &side);
  const auto change = [](void* text) {
    *static_cast<std::string*>(text) = Changed();
    Change();
  };
  if (status == CPPOOL_OK) status = rt->enqueue(rt, rt->stream, change, &found.stream);
  if (status == CPPOOL_OK) status = rt->enqueue(rt, side, change, &found.new_stream);
  for (const cppool_stream stream : {rt->stream, side})
    if (status == CPPOOL_OK) status = rt->stream_synchronize(rt, stream);
  const std::string all = found.run + found.stream + found.new_stream;
  if (status != CPPOOL_OK || all.empty()) return status;
  c->fail(c, ("run:" + found.run + "; stream:" + found.stream + "; new stream:" + found.new_stream).c_str());
  return CPPOOL_INTERNAL;
}

const cppool_case kFloats{CPPOOL_CASE_ABI, sizeof(cppool_case), "floats", "", nullptr, 0,
                          &Validate,       &RunFloats,          0};

__attribute__((constructor)) void Open() { Change(); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case* const cases[] = {&kFloats, nullptr};
  Change();
  return cases;
}
