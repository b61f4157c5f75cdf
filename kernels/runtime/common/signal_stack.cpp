#include "kernels/signal_stack.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace cppool::kernels {
namespace {

constexpr std::size_t kStack = 64 << 10;

std::size_t Page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

SignalStack::SignalStack() {
  stack_t now{};
  if (sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
  void* const memory =
      mmap(nullptr, Page() + kStack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) return;
  memory_ = memory;
  now = {};
  now.ss_sp = static_cast<char*>(memory) + Page();
  now.ss_size = kStack;
  if (mprotect(now.ss_sp, kStack, PROT_READ | PROT_WRITE) == 0) sigaltstack(&now, nullptr);
}

SignalStack::~SignalStack() {
  if (!memory_) return;
  stack_t none{};
  none.ss_flags = SS_DISABLE;
  sigaltstack(&none, nullptr);
  munmap(memory_, Page() + kStack);
}

}  // namespace cppool::kernels
