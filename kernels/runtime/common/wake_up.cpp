#include "kernels/runtime/common/wake_up.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace cppool::kernels {

void WakeUp::Pause(int round) {
  // There may be more threads than processors: the thread that is waited for must get to run.
  if (round % 8 == 7) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void WakeUp::Sleep(std::uint32_t seen) {
  // Returns at once when the word has changed since. A spurious return does no harm.
  syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void WakeUp::WakeSleepers() { syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace cppool::kernels
