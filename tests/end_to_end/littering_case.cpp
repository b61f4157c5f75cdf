// Cases that leave something behind, for the end-to-end tests. The constructor, `validate`, `run` and the
// work of "floats" change the floating-point environment, and fail when they find it changed.
#include <cppool/case.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
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

// What "leaves" can leave. It does so on rank 0.
const cppool_parameter kActions[] = {
    {"action", CPPOOL_TYPE_STRING, "\"nothing\"", nullptr, 0, 0, 0, "what is left"},
    {"mebibytes", CPPOOL_TYPE_INTEGER, "0", nullptr, 0, 1024, 0, "of host memory"},
};

void Linger(std::chrono::milliseconds time) {
  std::thread thread([time] { std::this_thread::sleep_for(time); });
  pthread_setname_np(thread.native_handle(), "lingering");
  thread.detach();
}

// Forks on the thread that calls it. The child does what `in_child` does, and then waits for ever.
pid_t Fork(void (*in_child)()) {
  const pid_t child = fork();
  if (child != 0) return child;
  in_child();
  for (;;) pause();
}

cppool_status RunLeaves(cppool_case_context* c) {
  cppool_runtime* const rt = c->runtime;
  const std::string action = c->string(c, "action");
  cppool_stream streams[4];
  for (cppool_stream& stream : streams)  // on threads of the runtime, which stay
    if (const cppool_status status = rt->stream_create(rt, &stream); status != CPPOOL_OK) return status;
  if (rt->rank != 0) return CPPOOL_OK;
  void* memory = nullptr;
  int ends[2];
  pid_t child = 0;
  const auto fork_in = [](void* pid) { *static_cast<pid_t*>(pid) = Fork([] {}); };
  if (action == "allocations") {
    for (int i = 0; i < 2; ++i) rt->alloc(rt, 1000, rt->stream, &memory);
    rt->alloc_host(rt, 10, &memory);
  }
  if (action == "thread") Linger(std::chrono::hours(1));
  if (action == "short thread") Linger(std::chrono::milliseconds(20));
  if (action == "descriptors" && (open("/dev/null", O_RDONLY) < 0 || pipe(ends) != 0)) return CPPOOL_INTERNAL;
#ifdef _OPENMP
  if (action == "openmp") {  // whose threads stay
    std::atomic<int> threads{0};
#pragma omp parallel num_threads(4)
    ++threads;
    if (threads != 4) return CPPOOL_UNSUPPORTED;
  }
#endif
  if (action == "memory") {
    const auto bytes = static_cast<std::size_t>(c->integer(c, "mebibytes")) << 20;
    std::memset(std::malloc(bytes), 1, bytes);
  }
  if (action == "child") child = Fork([] {});
  if (action == "child of a stream") {
    rt->enqueue(rt, rt->stream, fork_in, &child);
    rt->stream_synchronize(rt, rt->stream);
  }
  if (action == "child that exits") waitpid(Fork([] { std::exit(3); }), nullptr, 0);
  if (action == "child that crashes") waitpid(Fork([] { std::abort(); }), nullptr, 0);
  if (child != 0) c->result(c, "child", std::to_string(child).c_str());
  return CPPOOL_OK;
}

const cppool_case kLeaves{CPPOOL_CASE_ABI, sizeof(cppool_case), "leaves", "", kActions, std::size(kActions),
                          nullptr,         &RunLeaves,          0};

__attribute__((constructor)) void Open() { Change(); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case* const cases[] = {&kFloats, &kLeaves, nullptr};
  Change();
  return cases;
}
