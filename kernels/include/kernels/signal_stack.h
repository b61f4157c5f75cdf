// A stack for the signal handlers of one thread. Without it an overflow of the thread's own stack ends the
// process before a handler can say where.
#pragma once

namespace cppool::kernels {

// Made and destroyed by its thread. A thread that has such a stack already, a sanitizer's, keeps it; where
// there is no memory it gets none.
class SignalStack {
 public:
  SignalStack();
  ~SignalStack();
  SignalStack(const SignalStack&) = delete;
  SignalStack& operator=(const SignalStack&) = delete;

 private:
  void* memory_ = nullptr;  // the stack, above a page that cannot be accessed
};

}  // namespace cppool::kernels
