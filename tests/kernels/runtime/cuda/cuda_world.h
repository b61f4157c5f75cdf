// A world of CUDA ranks for tests, created through the module like in the daemon.
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

// Throws std::runtime_error unless `holds`. For the threads of ranks, where Catch2's assertions may not be
// used. `what` describes the expectation.
void Expect(bool holds, const std::string& what);

class CudaWorld {
 public:
  // Opens all ranks, each on its own thread. Throws the first exception of a rank.
  explicit CudaWorld(int size, Transport transport = Transport::kAuto);
  ~CudaWorld();

  // Runs `body` on the threads of all ranks at the same time. Throws the first exception of a rank.
  void Run(const std::function<void(RankRuntime&)>& body);
  // Like Run, between BeginCase and EndCase. Returns the stage times of rank 0. A rank that throws aborts the
  // world.
  StageTimes RunCase(const std::function<void(cppool_runtime*)>& body);

  Backend& backend() { return *backend_; }
  RankRuntime& rank(int rank) { return *ranks_[rank]; }

 private:
  void End();
  void OnAllThreads(const std::function<void(int)>& task);
  void Loop(int rank);

  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<RankRuntime>> ranks_;  // each is created and destroyed on its own thread
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(int)> task_;
  int round_ = 0;
  int running_ = 0;
  bool ending_ = false;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

// The text of the error that EndCase throws; "" if it throws none.
std::string ErrorOfEnd(RankRuntime& rank);

// Whether there are `count` devices. If not, prints a warning that the test is skipped.
bool HaveDevices(int count);

// Blocks a stream until Open, at the latest until the destructor.
class Gate {
 public:
  ~Gate() { Open(); }
  void Hold(cppool_runtime* rt, cppool_stream stream);
  void Open() { *open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

// Copies to and from device memory; both wait for the main stream.
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

// device.cu: loads the kernel of EnqueueDelay on this thread's device. Otherwise CUDA loads it at its first
// launch and waits for the device, which a test may have blocked.
void LoadDelay();
// device.cu: occupies the stream for this time, measured by the device's clock.
void EnqueueDelay(cppool_stream stream, double milliseconds);
// device.cu: whether the stream's work is done.
bool IsIdle(cppool_stream stream);

}  // namespace cppool::kernels::test
