// The owners of cppool/case_helpers.h, which includes it: memory, streams, events, stages and work of the
// host, and the errors of the runtime's calls as exceptions.
//
// All of them belong to one rank and its thread. While an exception unwinds, work that uses the memory may be
// under way on any stream: owners then release nothing, and the daemon releases what is left after the case.
#pragma once

#include <cppool/case.h>

#include <cstddef>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace cppool::cases {

// A failure with the status that `run` or `validate` returns for it.
class Error : public std::runtime_error {
 public:
  Error(cppool_status status, const std::string& detail, int culprit = CPPOOL_CULPRIT_SELF)
      : std::runtime_error(detail), status_(status), culprit_(culprit) {}
  cppool_status status() const { return status_; }
  int culprit() const { return culprit_; }  // as cppool_failure has it

 private:
  cppool_status status_;
  int culprit_;
};

// Throws the runtime's error text when a call of it has failed.
inline void Check(cppool_runtime* rt, cppool_status status) {
  if (status == CPPOOL_OK) return;
  const cppool_failure* failure = rt->last_failure(rt);
  throw Error(status, failure->text, failure->culprit);
}

class NoCopy {
 protected:
  NoCopy() = default;
  NoCopy(const NoCopy&) = delete;
  NoCopy& operator=(const NoCopy&) = delete;
};

class Stream : NoCopy {
 public:
  explicit Stream(cppool_runtime* rt) : rt_(rt) { Check(rt, rt->stream_create(rt, &stream_)); }
  ~Stream() { rt_->stream_destroy(rt_, stream_); }  // goes when its work is done
  cppool_stream get() const { return stream_; }

 private:
  cppool_runtime* rt_;
  cppool_stream stream_ = nullptr;
};

class Event : NoCopy {
 public:
  explicit Event(cppool_runtime* rt) : rt_(rt) { Check(rt, rt->event_create(rt, &event_)); }
  ~Event() { rt_->event_destroy(rt_, event_); }
  void Record(cppool_stream stream) { Check(rt_, rt_->event_record(rt_, event_, stream)); }
  void Wait(cppool_stream stream) const {
    Check(rt_, rt_->stream_wait(rt_, stream, event_));
  }  // later work on this stream waits

 private:
  cppool_runtime* rt_;
  cppool_event event_ = nullptr;
};

// Work enqueued on the main stream, or on `stream`, while it lives belongs to this stage.
class Stage : NoCopy {
 public:
  Stage(cppool_runtime* rt, const char* name, cppool_stream stream = nullptr)
      : rt_(rt), stream_(stream ? stream : rt->stream) {
    Check(rt, rt->mark(rt, stream_, name));
  }
  ~Stage() { rt_->mark(rt_, stream_, nullptr); }

 private:
  cppool_runtime* rt_;
  cppool_stream stream_;
};

// `count` elements of device memory (ordinary memory on the host runtime), allocated and released in the
// order of one stream, the main one unless another is given. What they hold at first is undefined.
template <typename T>
class DeviceBuffer : NoCopy {
 public:
  DeviceBuffer(cppool_runtime* rt, std::size_t count, cppool_stream stream = nullptr)
      : rt_(rt), count_(count), stream_(stream ? stream : rt->stream) {
    void* data = nullptr;
    Check(rt, rt->alloc(rt, bytes(), stream_, &data));
    data_ = static_cast<T*>(data);
  }
  ~DeviceBuffer() {
    if (std::uncaught_exceptions() == 0) rt_->free(rt_, data_, stream_);
  }
  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }
  // All elements, from or to memory of the host or of the device, in the stream's order.
  void CopyFrom(const T* from) { Check(rt_, rt_->copy(rt_, data_, from, bytes(), stream_)); }
  void CopyTo(T* to) const { Check(rt_, rt_->copy(rt_, to, data_, bytes(), stream_)); }

 private:
  cppool_runtime* rt_;
  std::size_t count_;
  cppool_stream stream_;
  T* data_ = nullptr;
};

// `count` elements of host memory that copies reach asynchronously. Its end waits for the main stream.
template <typename T>
class HostBuffer : NoCopy {
 public:
  HostBuffer(cppool_runtime* rt, std::size_t count) : rt_(rt), count_(count) {
    void* data = nullptr;
    Check(rt, rt->alloc_host(rt, count * sizeof(T), &data));
    data_ = static_cast<T*>(data);
  }
  ~HostBuffer() {
    if (std::uncaught_exceptions() != 0) return;
    rt_->stream_synchronize(rt_, rt_->stream);
    rt_->free_host(rt_, data_);
  }
  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) const { return data_[i]; }

 private:
  cppool_runtime* rt_;
  std::size_t count_;
  T* data_ = nullptr;
};

// A function of no arguments that streams call, in their order: work of the host, whose captures live in
// memory that outlasts the calls. Its end waits for the main stream.
template <typename Function>
class HostWork {
  static_assert(std::is_trivially_destructible_v<Function>,
                "captures are pointers and numbers: nothing destroys them");

 public:
  HostWork(cppool_runtime* rt, const Function& function) : rt_(rt), function_(rt, 1) {
    new (function_.data()) Function(function);
  }
  void Enqueue(cppool_stream stream = nullptr) const {
    const auto call = [](void* self) { (*static_cast<Function*>(self))(); };
    Check(rt_, rt_->enqueue(rt_, stream ? stream : rt_->stream, call, function_.data()));
  }

 private:
  cppool_runtime* rt_;
  HostBuffer<Function> function_;
};

}  // namespace cppool::cases
