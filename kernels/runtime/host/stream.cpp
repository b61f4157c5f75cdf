#include "kernels/runtime/host/stream.h"

#include <pthread.h>
#include <time.h>

#include <cfenv>
#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "kernels/float_environment.h"
#include "kernels/signal_stack.h"

namespace cppool::kernels::host {

void Failure::Record(const RuntimeError& error) {
  std::lock_guard lock(mutex_);
  if (set_.load(std::memory_order_relaxed)) return;
  error_ = error;
  set_.store(true, std::memory_order_relaxed);
}

void Failure::Throw() const {
  if (!set()) return;
  std::lock_guard lock(mutex_);
  throw RuntimeError(*error_);
}

void Failure::Clear() {
  std::lock_guard lock(mutex_);
  set_.store(false, std::memory_order_relaxed);
  error_.reset();
}

HostStream::HostStream(const std::string& thread_name, Failure& failure, std::function<void()> on_failure)
    : failure_(failure), on_failure_(std::move(on_failure)), tail_(new Item), head_(tail_) {
  try {
    thread_ = std::thread([this] { Loop(); });
  } catch (const std::system_error& error) {
    delete head_;
    throw RuntimeError(CPPOOL_INTERNAL,
                       std::string("no thread for a stream: ") + error.what() + kThreadLimits);
  } catch (...) {
    delete head_;
    throw;
  }
  // Linux keeps the id in the number of a thread's clock. The thread must not store it itself:
  // ThreadSanitizer sees no races of a thread whose first access is an atomic store.
  clockid_t clock = 0;
  if (pthread_getcpuclockid(thread_.native_handle(), &clock) == 0) thread_id_ = ~(clock >> 3);
  pthread_setname_np(thread_.native_handle(), thread_name.substr(0, 15).c_str());
}

HostStream::~HostStream() {
  Link(stop_.get());
  thread_.join();  // head_ is stop_ now
}

void HostStream::Push(Run run, std::function<void()> work) {
  auto* item = new Item;
  item->run = run;
  item->work = std::move(work);
  pushed_.store(pushed_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  Link(item);
}

void HostStream::Link(Item* item) {
  Item* before = tail_;
  tail_ = item;
  // From here on the stream owns `before` and may delete it.
  before->next.store(item, std::memory_order_release);
  wake_up_.Notify();
}

void HostStream::Synchronize() {
  const std::uint64_t target = pushed_.load(std::memory_order_relaxed);
  done_.Wait([&] { return completed_.load(std::memory_order_relaxed) >= target; });
  (void)completed_.load(std::memory_order_acquire);
}

bool HostStream::Idle() const {
  return completed_.load(std::memory_order_acquire) >= pushed_.load(std::memory_order_relaxed);
}

bool HostStream::Done() const {
  return completed_.load(std::memory_order_relaxed) >= pushed_.load(std::memory_order_relaxed);
}

void HostStream::ForgetMarks() {
  marks_pushed.store(0, std::memory_order_relaxed);
  marks_reached.store(0, std::memory_order_relaxed);
  last_stage.store(nullptr, std::memory_order_relaxed);
  in_stage.store(false, std::memory_order_relaxed);
}

void HostStream::RunItem(Item& item) {
  try {
    const FloatEnvironment kept;
    item.work();
    return;
  } catch (const RuntimeError& e) {
    failure_.Record(e);
  } catch (const std::bad_alloc&) {
    failure_.Record({CPPOOL_OUT_OF_MEMORY, "the work on a stream found no memory"});
  } catch (const std::exception& e) {
    failure_.Record({CPPOOL_INTERNAL, e.what()});
  } catch (...) {
    failure_.Record({CPPOOL_INTERNAL, "the work on a stream threw something that is not a std::exception"});
  }
  on_failure_();
}

void HostStream::Loop() {
  std::fesetenv(FE_DFL_ENV);  // a case may have changed that of the thread which made this one
  const SignalStack signal_stack;
  for (std::uint64_t count = 1;; ++count) {
    wake_up_.Wait([this] { return head_->next.load(std::memory_order_relaxed) != nullptr; });
    Item* item = head_->next.load(std::memory_order_acquire);
    delete head_;
    head_ = item;
    if (item == stop_.get()) return;
    if (item->run == Run::kAlways || !failure_.set()) RunItem(*item);
    item->work = nullptr;  // before the work counts as done: what it held is then released
    completed_.store(count, std::memory_order_release);
    done_.Notify();
  }
}

}  // namespace cppool::kernels::host
