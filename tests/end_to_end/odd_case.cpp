// A misbehaving case for the end-to-end tests. It is built several times: with a valid definition, and with
// one error each.
#include <cppool/case.h>
#include <err.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

#ifndef ODD_ABI
#define ODD_ABI CPPOOL_CASE_ABI
#endif
#ifndef ODD_NAME
#define ODD_NAME "odd"
#endif
#ifndef ODD_DOC
#define ODD_DOC "odd"
#endif
#ifndef ODD_DEFAULT
#define ODD_DEFAULT "\"pass\""
#endif

extern "C" void function_of_no_library();

namespace {

const cppool_parameter kParameters[] = {
    {"action", CPPOOL_TYPE_STRING, ODD_DEFAULT,
     "[\"pass\", \"noise\", \"talk\", \"fork\", \"sleep\", \"throw\", \"throw alone\", "
     "\"steal\", \"wait\", \"spin\", \"deaf\", \"recv\", \"stream\", \"alone\", "
     "\"hang at the thread's end\", \"crash\", \"crash on stream\", \"overflow\", \"overflow on stream\", "
     "\"overflow in validate\", \"hang in validate\", \"iterate\", \"abort\", \"trap\", \"exit\", \"exit in "
     "libc\", \"exit everywhere\", \"exit in "
     "child\", "
     "\"nest 60\", \"nest 61\", \"nest 100000\"]",
     0, 0, 0, "what to do"},
    {"rank", CPPOOL_TYPE_INTEGER, "0", nullptr, 0, 63, 0,
     "the rank that does it; the other ranks wait for it"},
};

cppool_status AllReduce(cppool_runtime* rt) {
  void* value = nullptr;
  cppool_comm world = nullptr;
  int rank = 0, size = 0;
  cppool_status status = rt->group(rt, CPPOOL_WORLD, &world, &rank, &size);
  if (status == CPPOOL_OK) status = rt->alloc(rt, sizeof(float), rt->stream, &value);
  if (status == CPPOOL_OK) status = rt->fill(rt, value, 0, sizeof(float), rt->stream);
  if (status == CPPOOL_OK) status = rt->mark(rt, rt->stream, "meet");
  if (status == CPPOOL_OK)
    status = rt->all_reduce(rt, value, value, 1, CPPOOL_FLOAT32, CPPOOL_SUM, world, rt->stream);
  if (status == CPPOOL_OK) status = rt->stream_synchronize(rt, rt->stream);
  if (status == CPPOOL_OK) status = rt->free(rt, value, rt->stream);
  return status;
}

// Heeds no status: only `next_iteration` ends it.
cppool_status Iterate(cppool_case_context* c) {
  while (c->next_iteration(c)) AllReduce(c->runtime);
  AllReduce(c->runtime);
  return CPPOOL_OK;
}

// These functions never return. They have internal linkage, and a stack in an answer must name them
// nevertheless.
__attribute__((noinline)) void SpinForEver() {
  std::atomic<int> turns{0};
  for (;;) turns.fetch_add(1, std::memory_order_relaxed);
}

__attribute__((noinline)) void SleepForEver() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

struct HangsAtTheEnd {
  ~HangsAtTheEnd() {
    if (write(2, "the thread ends\n", 16) == 16) SleepForEver();
  }
};

// Blocks every signal that can be blocked.
__attribute__((noinline)) void SleepDeaf() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  SleepForEver();
}

void StallStream(void*) { SleepForEver(); }

int* volatile nowhere = nullptr;
__attribute__((noinline)) void WriteNowhere() { *nowhere = 1; }
void CrashStream(void*) { WriteNowhere(); }

// A breakpoint without a debugger.
__attribute__((noinline)) void Trap() {
#ifdef __x86_64__
  asm volatile("int3");
#else
  raise(SIGTRAP);
#endif
}

// Its stack, when `left` is large.
__attribute__((noinline)) int Overflow(volatile int* outer, long left) {
  volatile int room[1024];
  room[0] = *outer;
  return left == 0 ? 0 : Overflow(room, left - 1) + room[0];
}
cppool_status OverflowStack() {
  volatile int zero = 0;
  return static_cast<cppool_status>(Overflow(&zero, 1L << 40));
}
void OverflowStream(void*) { OverflowStack(); }

// Each of these ends the process.
__attribute__((noinline)) cppool_status Crash(cppool_runtime* rt, const char* action) {
  cppool_status status = rt->mark(rt, rt->stream, "the end");
  std::cout << "soon " << action;
  if (std::strcmp(action, "crash") == 0) WriteNowhere();
  if (std::strcmp(action, "abort") == 0) std::abort();
  if (std::strcmp(action, "trap") == 0) return Trap(), status;
  if (std::strcmp(action, "exit") == 0) std::exit(42);
  if (std::strcmp(action, "exit in libc") == 0) errx(42, "an error");  // calls libc's own exit()
  if (std::strcmp(action, "overflow") == 0) return OverflowStack();
  const auto work = std::strcmp(action, "overflow on stream") == 0 ? OverflowStream : CrashStream;
  if (status == CPPOOL_OK) status = rt->enqueue(rt, rt->stream, work, nullptr);
  if (status == CPPOOL_OK) status = rt->stream_synchronize(rt, rt->stream);
  return status;
}

// Receives a message that is never sent, on a second stream, for which the main stream waits.
cppool_status ReceiveNothing(cppool_runtime* rt) {
  void* value = nullptr;
  cppool_comm world = nullptr;
  cppool_stream side = nullptr;
  cppool_event arrived = nullptr;
  int rank = 0, size = 0;
  cppool_status status = rt->group(rt, CPPOOL_WORLD, &world, &rank, &size);
  if (status == CPPOOL_OK) status = rt->stream_create(rt, &side);
  if (status == CPPOOL_OK) status = rt->event_create(rt, &arrived);
  if (status == CPPOOL_OK) status = rt->alloc(rt, sizeof(float), side, &value);
  if (status == CPPOOL_OK) status = rt->mark(rt, side, "fetch");
  if (status == CPPOOL_OK) status = rt->recv(rt, value, sizeof(float), (rank + 1) % size, world, side);
  if (status == CPPOOL_OK) status = rt->event_record(rt, arrived, side);
  if (status == CPPOOL_OK) status = rt->mark(rt, rt->stream, "use");
  if (status == CPPOOL_OK) status = rt->stream_wait(rt, rt->stream, arrived);
  if (status == CPPOOL_OK) status = rt->stream_synchronize(rt, rt->stream);
  return status;
}

// Writes in every way that a rank can, in lines and in parts of lines.
void Talk(cppool_runtime* rt) {
  for (int i = 0; i < 100; ++i) {
    std::printf("printf %d\n", i);
    std::fprintf(stderr, "stderr ");
    std::cout << "cout " << i << std::endl;
    std::cerr << "cerr " << i;
    std::fputs(" and stderr\n", stderr);
    std::clog << "clog " << i << "\n";
    std::puts("puts");
    for (const char c : std::string("putchar\n")) std::putchar(c);
  }
  std::fprintf(stderr, "[rank %d] with a label of its own\n", rt->rank + 100);
  std::thread([] { std::cout << "a thread" << std::flush; }).join();
  rt->enqueue(
      rt, rt->stream, [](void*) { std::cerr << "a stream" << std::flush; }, nullptr);
  rt->stream_synchronize(rt, rt->stream);
  const std::string much(std::size_t{1} << 20, 'x');
  std::fwrite(much.data(), 1, much.size(), stdout);
  std::printf("\n");
  std::fprintf(stderr, "%s\n", much.substr(0, 4080).c_str());
  std::cout << "not ended";
}

// While no other rank writes: a child has what a thread of its parent is writing, and may write it, too.
void TalkInChild() {
  const pid_t child = fork();
  if (child == 0) {
    std::puts("a child");
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

// A child that does not exec ends as programs do.
cppool_status ExitInChild(cppool_case_context* c) {
  const pid_t child = fork();
  if (child == 0) std::exit(7);
  int status = 0;
  if (waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7) return CPPOOL_OK;
  c->fail(c, "the child did not exit with code 7");
  return CPPOOL_INTERNAL;
}

// Fails only in `validate`, on the daemon's main thread.
cppool_status Validate(cppool_validation* v) {
  const char* action = v->string(v, "action");
  if (std::strcmp(action, "hang in validate") == 0) SleepForEver();
  return std::strcmp(action, "overflow in validate") == 0 ? OverflowStack() : CPPOOL_OK;
}

cppool_status Run(cppool_case_context* c) {
  const char* action = c->string(c, "action");
  cppool_runtime* rt = c->runtime;
  if (std::strcmp(action, "exit everywhere") == 0) {  // as a macro does that checks a call on every rank
    const cppool_status status = AllReduce(rt);
    return status == CPPOOL_OK ? Crash(rt, "exit") : status;
  }
  if (std::strcmp(action, "alone") == 0) {  // the other ranks do not wait for the one that hangs
    if (rt->rank == c->integer(c, "rank")) SleepForEver();
    return CPPOOL_OK;
  }
  if (std::strcmp(action, "throw alone") == 0) {  // the other ranks throw, and this one never returns
    if (rt->rank != c->integer(c, "rank")) throw std::runtime_error("thrown on purpose");
    std::cout << "soon throw alone";
    SleepForEver();
  }
  if (std::strcmp(action, "iterate") == 0) return Iterate(c);
  if (std::strcmp(action, "talk") == 0) Talk(rt);
  if (rt->rank == c->integer(c, "rank")) {
    if (std::strcmp(action, "noise") == 0) {
      std::printf("noise by printf\n");
      std::cout << "noise by cout, with [CP_POOL_RESP] {\"ok\": true}" << std::endl;
      if (write(1, "noise by write\n", 15) != 15) return CPPOOL_INTERNAL;
    }
    if (std::strcmp(action, "sleep") == 0) {
      if (write(2, "asleep\n", 7) != 7) return CPPOOL_INTERNAL;
      std::this_thread::sleep_for(std::chrono::minutes(10));
    }
    if (std::strcmp(action, "spin") == 0) {
      std::cout << "soon spin";
      SpinForEver();
    }
    if (std::strcmp(action, "deaf") == 0) SleepDeaf();
    if (std::strcmp(action, "recv") == 0) return ReceiveNothing(rt);
    if (std::strcmp(action, "stream") == 0) {
      cppool_status status = rt->mark(rt, rt->stream, "stall");
      if (status == CPPOOL_OK) status = rt->enqueue(rt, rt->stream, StallStream, nullptr);
      if (status != CPPOOL_OK) return status;
    }
    for (const char* end : {"crash", "crash on stream", "overflow", "overflow on stream", "abort", "trap",
                            "exit", "exit in libc"})
      if (std::strcmp(action, end) == 0) return Crash(rt, action);
    if (std::strcmp(action, "exit in child") == 0 && ExitInChild(c) != CPPOOL_OK) return CPPOOL_INTERNAL;
    if (std::strncmp(action, "nest ", 5) == 0) {
      const auto depth = static_cast<std::size_t>(std::atoi(action + 5));
      c->result(c, "nest", (std::string(depth, '[') + std::string(depth, ']')).c_str());
    }
    if (std::strcmp(action, "fork") == 0) TalkInChild();
    if (std::strcmp(action, "hang at the thread's end") == 0) {
      thread_local HangsAtTheEnd hangs;
      static_cast<void>(&hangs);
    }
    if (std::strcmp(action, "throw") == 0) throw std::runtime_error("thrown on purpose");
    if (std::strcmp(action, "steal") == 0) {
      char byte;
      if (read(0, &byte, 1) != 0) {
        c->fail(c, "a case could read a request");
        return CPPOOL_INTERNAL;
      }
    }
    if (std::strcmp(action, "wait") == 0)
      return CPPOOL_OK;  // does not join the all-reduce, in which the other ranks wait
  }
  return AllReduce(rt);
}

const cppool_case kOdd{
    ODD_ABI, sizeof(cppool_case), ODD_NAME, ODD_DOC, kParameters, std::size(kParameters), &Validate, &Run, 0};

#ifdef ODD_OPENING
__attribute__((constructor)) void Open() { ODD_OPENING; }
#endif
#ifdef ODD_CLOSING
__attribute__((destructor)) void Close() {
  if (write(2, "the library closes\n", 19) == 19) ODD_CLOSING;
}
#endif

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case* const cases[] = {&kOdd, nullptr};
  return cases;
}
