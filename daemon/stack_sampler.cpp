#include "daemon/stack_sampler.h"

#include <execinfo.h>
#include <setjmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

#include "daemon/ask_all.h"
#include "daemon/symbols.h"

namespace cppool::daemon {
namespace {

constexpr std::size_t kThreads = 256;  // per call; further ones get no stack
constexpr int kDeepest = 64;
constexpr std::chrono::milliseconds kSignalLimit{250}, kStackLimit{350};  // for SampleStacksInTime
constexpr int kHandlerFrames = 2;  // the handler, and the kernel's trampoline

int SampleSignal() { return SIGRTMIN + 5; }

// A thread's handler writes this. It is static, since a handler may run long after the wait for it has ended.
struct Slot {
  enum State : int { kAsked, kWalking, kDone, kFaulted };
  std::atomic<int> state{kDone};
  std::atomic<pid_t> thread{0};
  std::atomic<int> round{0};  // the call of SampleStacks: a late answer to an earlier call is dropped
  int count = 0;
  void* frames[kDeepest];
  sigjmp_buf way_out;
};
std::array<Slot, kThreads> slots;
struct sigaction segv_before, bus_before;

pid_t ThisThread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// The signal's value: slot and round.
int ToValue(std::size_t index, int round) { return static_cast<int>(index) | (round << 16); }

extern "C" void OnSample(int, siginfo_t* info, void*) {
  const int error = errno;
  const int value = info->si_value.sival_int;
  Slot& slot = slots[static_cast<std::size_t>(value & 0xffff) % kThreads];
  int expected = Slot::kAsked;
  if (slot.thread.load() == ThisThread() && slot.round.load() == value >> 16 &&
      slot.state.compare_exchange_strong(expected, Slot::kWalking)) {
    if (sigsetjmp(slot.way_out, 1) == 0) {
      slot.count = backtrace(slot.frames, kDeepest);
      slot.state.store(Slot::kDone);
    } else {
      slot.state.store(Slot::kFaulted);
    }
  }
  errno = error;
}

// A damaged stack can make the unwinder access any address.
extern "C" void OnFault(int signal, siginfo_t*, void*) {
  const pid_t thread = ThisThread();
  for (Slot& slot : slots) {
    if (slot.thread.load() == thread && slot.state.load() == Slot::kWalking) siglongjmp(slot.way_out, 1);
  }
  // The instruction faults again, for the handler from before.
  sigaction(signal, signal == SIGSEGV ? &segv_before : &bus_before, nullptr);
}

void GuardTheWalk() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action {};
    action.sa_sigaction = OnFault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &segv_before);
    sigaction(SIGBUS, &action, &bus_before);
  });
}

bool Send(std::size_t index, pid_t thread, int round) {
  siginfo_t info;
  std::memset(&info, 0, sizeof(info));
  info.si_code = SI_QUEUE;
  info.si_pid = getpid();
  info.si_uid = getuid();
  info.si_value.sival_int = ToValue(index, round);
  return syscall(SYS_rt_tgsigqueueinfo, getpid(), thread, SampleSignal(), &info) == 0;
}

std::string ReadTaskFile(pid_t thread, const char* name) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/" + name);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Says why a thread does not answer a signal.
std::string WhySilent(pid_t thread) {
  const std::string status = ReadTaskFile(thread, "status");
  if (status.empty()) return "(no stack: the thread is gone)";
  const auto field = [&](const std::string& name) {
    const auto at = status.find("\n" + name + ":\t");
    return at == std::string::npos
               ? ""
               : status.substr(at + name.size() + 3, status.find('\n', at + 1) - at - name.size() - 3);
  };
  if (field("State").rfind('D', 0) == 0)
    return "(no stack: the thread is in the kernel, in " + ReadTaskFile(thread, "wchan") +
           ", and cannot be interrupted)";
  const auto blocked = std::strtoull(field("SigBlk").c_str(), nullptr, 16);
  if (blocked >> (SampleSignal() - 1) & 1) return "(no stack: the thread blocks the signal that asks for it)";
  return "(no stack: the thread did not answer in time; its state is " + field("State") + ")";
}

// The frames of std:: between the daemon and the case's code, and the daemon's own functions, at which a
// stack is cut.
bool IsMachinery(const std::string& name) {
  return name.rfind("std::_Function_handler<", 0) == 0 || name.rfind("std::function<", 0) == 0 ||
         name.rfind("std::__invoke", 0) == 0;
}
bool IsCaller(const std::string& name) {
  return name.rfind("cppool::daemon::LocalRanks::", 0) == 0 ||
         name.rfind("cppool::kernels::host::HostStream::Loop", 0) == 0 ||
         name.rfind("cppool::kernels::host::HostStream::RunItem", 0) == 0;
}

// Names frames as NameFrames does.
std::vector<std::string> NamesOf(SymbolLookup& symbols, void* const* frames, int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    // All but the first are return addresses, which may already belong to the next function.
    const std::string name = symbols.Describe(reinterpret_cast<std::uintptr_t>(frames[i]) - (i > 0 ? 1 : 0));
    if (IsCaller(name)) break;
    if (!IsMachinery(name)) names.push_back(name);
  }
  return names;
}

}  // namespace

std::vector<std::string> NameFrames(void* const* frames, int count) {
  SymbolLookup symbols;
  return NamesOf(symbols, frames, count);
}

void PrepareStackSampling() {
  static std::once_flag once;
  std::call_once(once, [] {
    void* frames[4];
    backtrace(frames, 4);
    struct sigaction action {};
    action.sa_sigaction = OnSample;
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigaction(SampleSignal(), &action, nullptr);
  });
}

std::vector<std::vector<std::string>> SampleStacks(const std::vector<pid_t>& threads,
                                                   std::chrono::steady_clock::time_point until) {
  static std::mutex mutex;
  static int round = 0;
  const std::lock_guard lock(mutex);
  PrepareStackSampling();
  GuardTheWalk();
  round = (round + 1) & 0x7fff;
  const std::size_t count = std::min(threads.size(), kThreads);
  std::vector<bool> sent(count);
  for (std::size_t i = 0; i < count; ++i) {
    Slot& slot = slots[i];
    if (slot.state.load() == Slot::kWalking) continue;  // a handler of an earlier call is stuck in it
    slot.thread.store(threads[i]);
    slot.round.store(round);
    slot.state.store(Slot::kAsked);
    sent[i] = threads[i] > 0 && Send(i, threads[i], round);
  }
  const auto answered = [&](std::size_t i) { return !sent[i] || slots[i].state.load() >= Slot::kDone; };
  for (std::size_t i = 0; i < count; ++i) {
    while (!answered(i) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::microseconds(200));
  }

  SymbolLookup symbols;
  std::vector<std::vector<std::string>> stacks(threads.size());
  for (std::size_t i = 0; i < threads.size(); ++i) {
    if (i >= count || !sent[i] || slots[i].state.load() < Slot::kDone) {
      stacks[i] = {WhySilent(threads[i])};
      continue;
    }
    const Slot& slot = slots[i];
    if (slot.state.load() == Slot::kFaulted) {
      stacks[i] = {"(no stack: it is damaged)"};
      continue;
    }
    stacks[i] = NamesOf(symbols, slot.frames + kHandlerFrames, slot.count - kHandlerFrames);
    if (stacks[i].empty()) stacks[i] = {"(no stack: it is in the daemon's own code)"};
  }
  return stacks;
}

std::optional<std::vector<std::vector<std::string>>> SampleStacksInTime(
    const std::vector<pid_t>& threads, std::chrono::steady_clock::time_point start) {
  return AskAll<std::vector<std::vector<std::string>>>(
             1, [threads, start](std::size_t) { return SampleStacks(threads, start + kSignalLimit); },
             start + kStackLimit)
      .front();
}

}  // namespace cppool::daemon
