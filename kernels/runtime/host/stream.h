// A stream of the host runtime: a queue without locks, and a thread that runs its items in order.
//
// One thread (the rank's) pushes. Pushing orders the pusher before the work, and not the work before the
// pusher: only Synchronize() makes the stream's results visible to the rank's thread, so that two streams are
// never ordered through the thread that feeds both.
#pragma once

#include <cppool/runtime.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "kernels/error.h"
#include "kernels/runtime/common/trace_recorder.h"
#include "kernels/runtime/common/wake_up.h"
#include "kernels/runtime/host/wait.h"

namespace cppool::kernels::host {

// The first failure of a rank's enqueued work. Like a CUDA error it is sticky, for all streams of the rank,
// until the case ends.
class Failure {
 public:
  bool set() const { return set_.load(std::memory_order_relaxed); }
  void Record(const RuntimeError& error);  // any thread; later failures are dropped
  void Throw() const;                      // RuntimeError when set
  void Clear();

 private:
  std::atomic<bool> set_{false};
  mutable std::mutex mutex_;  // taken only once something has failed
  std::optional<RuntimeError> error_;
};

// One call of `mark`. Lives as long as the case.
struct Mark {
  Mark(const std::string* stage_text, int stream_index, int iteration_tag, TraceRecorder::Change slices)
      : stage(stage_text), stream(stream_index), iteration(iteration_tag), traced(slices) {}

  const std::string* const stage;           // NULL: ends the last one
  const int stream;                         // index of the stream in this case; 0 is the main one
  const int iteration;                      // see HostRank
  const TraceRecorder::Change traced;       // its slices in a trace
  std::atomic<std::int64_t> reached_ns{0};  // monotonic clock; 0: not reached yet
};

// One record of an event: the order between two streams that the event makes. Lives as long as the case, so
// that it needs no reference count, which would order the streams that drop it.
struct EventRecord {
  explicit EventRecord(int stream_index) : stream(stream_index) {}
  const int stream;  // index of the stream in this case
  std::atomic<bool> open{false};
  WakeUp wake_up;

  void Open() {
    open.store(true, std::memory_order_release);
    wake_up.Notify();
  }
  void Wait() {
    wake_up.Wait([this] { return open.load(std::memory_order_relaxed); });
    (void)open.load(std::memory_order_acquire);
  }
};

class HostStream {
 public:
  enum class Run {
    kUnlessFailed,  // work: skipped once the rank has failed
    kAlways,        // releases, and what other streams wait for; must not throw
  };

  // `on_failure` is called on the stream's thread after `failure` was set.
  HostStream(const std::string& thread_name, Failure& failure, std::function<void()> on_failure);
  ~HostStream();  // runs the queued items, then joins
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  void Push(Run run, std::function<void()> work);  // the rank's thread
  void Synchronize();  // the rank's thread: returns when everything pushed has run or was skipped
  bool Idle() const;   // any thread: everything pushed has run, and is visible to the caller
  bool Done() const;  // the rank's thread: the same, but without making anything visible or ordering anything

  // The stream's name in this case, and how far its marks are. `index` and `name` change only under the
  // rank's progress lock.
  int index = 0;
  std::string name;
  std::atomic<std::uint64_t> marks_pushed{0};
  std::atomic<std::uint64_t> marks_reached{0};
  std::atomic<const Mark*> last_stage{nullptr};  // the last mark reached that began a stage
  std::atomic<bool> in_stage{false};
  void ForgetMarks();  // when idle

  WaitNote waits;
  int thread() const { return thread_id_; }  // its id; any thread

 private:
  struct Item {
    std::atomic<Item*> next{nullptr};
    Run run = Run::kAlways;
    std::function<void()> work;
  };
  void Link(Item* item);
  void RunItem(Item& item);
  void Loop();

  Failure& failure_;
  std::function<void()> on_failure_;
  std::unique_ptr<Item> stop_ =
      std::make_unique<Item>();              // ends the thread; made here, so that ending needs no memory
  Item* tail_;                               // the pusher's
  alignas(64) Item* head_;                   // the stream's: the item before the next one
  WakeUp wake_up_;                           // notified after a push
  std::atomic<std::uint64_t> pushed_{0};     // written by the pusher
  std::atomic<std::uint64_t> completed_{0};  // written by the stream
  WakeUp done_;                              // notified after an item
  int thread_id_ = 0;
  std::thread thread_;
};

}  // namespace cppool::kernels::host
