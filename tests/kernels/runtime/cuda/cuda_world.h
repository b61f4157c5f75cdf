// A world of CUDA ranks for tests, opened through the module as the daemon does it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime.h"

namespace cppool::kernels::test {

// Throws std::runtime_error: for ranks' threads, where Catch's assertions may not be used.
void Expect(bool holds, const std::string& what);

class CudaWorld {
 public:
  // Opens all ranks, each on a thread of its own. Throws what the first one threw.
  explicit CudaWorld(int size, Transport transport = Transport::kAuto);
  ~CudaWorld();

  // Runs `body` on every rank's thread at once, and throws what the first one threw.
  void Run(const std::function<void(RankRuntime&)>& body);
  // The same between BeginCase and EndCase; the stages' times of rank 0. A rank that throws aborts the world.
  StageTimes RunCase(const std::function<void(cppool_runtime*)>& body);

  Backend& backend() { return *backend_; }
  RankRuntime& rank(int rank) { return *ranks_[rank]; }

 private:
  void End();
  void OnAllThreads(const std::function<void(int)>& task);
  void Loop(int rank);

  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<RankRuntime>> ranks_;  // each is made and destroyed on its thread
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(int)> task_;
  int round_ = 0;
  int running_ = 0;
  bool ending_ = false;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

// What EndCase throws; "" when nothing.
std::string ErrorOfEnd(RankRuntime& rank);

// True where there are `count` devices; else says that the test is passed over.
bool HaveDevices(int count);

// Holds a stream up until it is opened, at the latest by its end.
class Gate {
 public:
  ~Gate() { Open(); }
  void Hold(cppool_runtime* rt, cppool_stream stream);
  void Open() { *open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

// Device memory with `values`, and what is in device memory: each waits for the main stream.
template <typename T>
Buffer ToDevice(cppool_runtime* rt, const std::vector<T>& values) {
  Buffer buffer(rt, values.size() * sizeof(T), rt->stream);
  Check(rt, rt->copy(rt, buffer.get(), values.data(), buffer.bytes(), rt->stream));
  Check(rt, rt->stream_synchronize(rt, rt->stream));
  return buffer;
}

template <typename T>
std::vector<T> ToHost(cppool_runtime* rt, const Buffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  Check(rt, rt->copy(rt, values.data(), buffer.get(), buffer.bytes(), rt->stream));
  Check(rt, rt->stream_synchronize(rt, rt->stream));
  return values;
}

// device.cu: loads the kernel below on this thread's device: CUDA would do so at its first launch, and wait for
// the device meanwhile, which a test may hold up.
void LoadDelay();
// device.cu: occupies the stream for this long, by the device's clock.
void EnqueueDelay(cppool_stream stream, double milliseconds);
// device.cu: whether the stream's work is done.
bool IsIdle(cppool_stream stream);

}  // namespace cppool::kernels::test
