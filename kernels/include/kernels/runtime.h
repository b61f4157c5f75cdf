// The seam (cppool/runtime.h) with owners and exceptions, for schedules and cases in C++. Everything here
// belongs to one rank and its thread.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/error.h"
#include "kernels/group_shape.h"

namespace cppool::kernels {

// Throws the failed call's error: its status, its text and its culprit.
inline void Check(cppool_runtime* rt, cppool_status status) {
  if (status == CPPOOL_OK) return;
  const cppool_failure* failure = rt->last_failure(rt);
  throw RuntimeError(status, failure->text, failure->culprit);
}

// A stream of its own, destroyed with the owner.
class Stream {
 public:
  explicit Stream(cppool_runtime* rt) : rt_(rt) { Check(rt, rt->stream_create(rt, &stream_)); }
  ~Stream() { rt_->stream_destroy(rt_, stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cppool_stream get() const { return stream_; }

 private:
  cppool_runtime* rt_;
  cppool_stream stream_ = nullptr;
};

class Event {
 public:
  explicit Event(cppool_runtime* rt) : rt_(rt) { Check(rt, rt->event_create(rt, &event_)); }
  ~Event() {
    if (event_) rt_->event_destroy(rt_, event_);
  }
  Event(Event&& other) noexcept : rt_(other.rt_), event_(std::exchange(other.event_, nullptr)) {}
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  Event& operator=(Event&&) = delete;
  void Record(cppool_stream stream) { Check(rt_, rt_->event_record(rt_, event_, stream)); }
  void Wait(cppool_stream stream) const { Check(rt_, rt_->stream_wait(rt_, stream, event_)); }

 private:
  cppool_runtime* rt_;
  cppool_event event_ = nullptr;
};

// Device memory, allocated and released in the order of one stream. Its use on other streams must be ordered
// by events on both sides. While an exception unwinds, those events may not have been recorded: memory is
// then left to the end of the case, which comes after all of the rank's work.
class Buffer {
 public:
  Buffer() = default;
  Buffer(cppool_runtime* rt, std::size_t bytes, cppool_stream stream)
      : rt_(rt), bytes_(bytes), stream_(stream) {
    Check(rt, rt->alloc(rt, bytes, stream, &data_));
  }
  ~Buffer() {
    if (std::uncaught_exceptions() == 0) Reset();
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      Reset();
      rt_ = other.rt_;
      bytes_ = std::exchange(other.bytes_, 0);
      stream_ = other.stream_;
      data_ = std::exchange(other.data_, nullptr);
    }
    return *this;
  }
  void Reset() {
    if (data_) rt_->free(rt_, std::exchange(data_, nullptr), stream_);
    bytes_ = 0;
  }
  template <typename T = void>
  T* get() const {
    return static_cast<T*>(data_);
  }
  std::byte* at(std::size_t offset) const { return static_cast<std::byte*>(data_) + offset; }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  cppool_runtime* rt_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  cppool_stream stream_ = nullptr;
};

// A communicator of the world; owned by the runtime.
struct Group {
  cppool_comm comm = nullptr;
  int rank = 0;
  int size = 1;
};

inline Group GetGroup(cppool_runtime* rt, cppool_group which) {
  Group group;
  Check(rt, rt->group(rt, which, &group.comm, &group.rank, &group.size));
  return group;
}
// All ranks call it with the same shapes in the same order: see group_of.
inline Group GetGroup(cppool_runtime* rt, GroupShape shape) {
  Group group;
  Check(rt, rt->group_of(rt, shape.size, shape.stride, &group.comm, &group.rank, &group.size));
  return group;
}

// The communicator of the same ranks that moves data by copies between devices, whatever the transport. comm
// is NULL where there is none: on the host, and where the devices do not reach each other. The rank alone
// makes it, at once.
Group GetCopyGroup(cppool_runtime* rt, GroupShape shape);

// send and recv between construction and End() run together.
class GroupedCalls {
 public:
  explicit GroupedCalls(cppool_runtime* rt) : rt_(rt) { Check(rt, rt->group_start(rt)); }
  ~GroupedCalls() {
    if (rt_)
      rt_->group_end(
          rt_);  // an exception unwinds: the group is closed, and a second error would hide the first
  }
  GroupedCalls(const GroupedCalls&) = delete;
  GroupedCalls& operator=(const GroupedCalls&) = delete;
  void End() {
    cppool_runtime* rt = std::exchange(rt_, nullptr);
    Check(rt, rt->group_end(rt));
  }

 private:
  cppool_runtime* rt_;
};

// Marks a stage on a stream for as long as it lives.
class Stage {
 public:
  Stage(cppool_runtime* rt, cppool_stream stream, const std::string& name) : rt_(rt), stream_(stream) {
    Check(rt, rt->mark(rt, stream, name.c_str()));
  }
  ~Stage() { rt_->mark(rt_, stream_, nullptr); }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

 private:
  cppool_runtime* rt_;
  cppool_stream stream_;
};

// Host runtime only: runs `work` on the stream. What it throws is reported when the stream is synchronised.
void Enqueue(cppool_runtime* rt, cppool_stream stream, std::function<void()> work);

}  // namespace cppool::kernels
