// Help for cases in C++17: owners of memory, streams and events, errors as exceptions, seeded inputs, comparison, 16-bit numbers.
// Header only, over cppool/case.h; on CUDA too, without including CUDA. For example:
//     static cppool_status Run(cppool_case_context* c) {
//       return cppool::cases::Guard(c, [&] {
//         cppool::cases::DeviceBuffer<float> x(c->runtime, 1024);
//         ...
//         cppool::cases::Report(c, "x", "reference", cppool::cases::Compare(got, wanted, 1024, 1e-3));
//       });
//     }
//
// All of it belongs to one rank and its thread. While an exception unwinds, work that uses the memory may be under way on any stream:
// owners then release nothing, and the daemon releases what is left after the case.
#pragma once

#include <cppool/case.h>
#include <cppool/case_numbers.h>

#include <cstddef>
#include <cstring>
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

// Throws what a failed call of the runtime said.
inline void Check(cppool_runtime* rt, cppool_status status) {
  if (status == CPPOOL_OK) return;
  const cppool_failure* failure = rt->last_failure(rt);
  throw Error(status, failure->text, failure->culprit);
}

// Runs `body` and returns the status of what it throws, with the text as the reason: for `run` and `validate`, which no exception may
// leave.
template <typename Context, typename Body>
cppool_status Guard(Context* c, Body&& body) noexcept {
  try {
    body();
    return CPPOOL_OK;
  } catch (const Error& error) {
    if constexpr (std::is_same_v<Context, cppool_case_context>)
      c->fail_by(c, error.what(), error.culprit());
    else
      c->fail(c, error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    c->fail(c, "no host memory is left");
    return CPPOOL_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    c->fail(c, error.what());
    return CPPOOL_INTERNAL;
  } catch (...) {
    c->fail(c, "something was thrown that is not a std::exception");
    return CPPOOL_INTERNAL;
  }
}

// A case without features. `validate` may be null. Everything lives as long as the library.
template <std::size_t N>
constexpr cppool_case MakeCase(const char* name, const char* doc, const cppool_parameter (&parameters)[N],
                               cppool_status (*validate)(cppool_validation*),
                               cppool_status (*run)(cppool_case_context*)) {
  return {CPPOOL_CASE_ABI, sizeof(cppool_case), name, doc, parameters, N, validate, run, 0};
}

// Of a runtime, or of a cppool_validation.
template <typename Context>
bool OnCuda(const Context* c) {
  return std::strcmp(c->backend, "cuda") == 0;
}

// A communicator, owned by the runtime, and this rank's number in it.
struct Group {
  cppool_comm comm = nullptr;
  int rank = 0;
  int size = 1;
};
inline Group WorldOf(cppool_runtime* rt) {
  Group group;
  Check(rt, rt->group(rt, CPPOOL_WORLD, &group.comm, &group.rank, &group.size));
  return group;
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
  }  // later work on it waits

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

// `count` elements of device memory (ordinary memory on the host runtime), allocated and released in the order of one stream, the
// main one unless another is given. What they hold at first is undefined.
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

inline void Synchronize(cppool_runtime* rt) { Check(rt, rt->stream_synchronize(rt, rt->stream)); }

}  // namespace cppool::cases
