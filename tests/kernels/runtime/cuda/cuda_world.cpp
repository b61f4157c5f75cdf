#include "tests/kernels/runtime/cuda/cuda_world.h"

#include <stdexcept>

#include "tests/catch.h"

namespace cppool::kernels::test {

void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("does not hold: " + what);
}

std::string ErrorOfEnd(RankRuntime& rank) {
  try {
    rank.EndCase();
  } catch (const RuntimeError& error) {
    return error.what();
  }
  return "";
}

bool HaveDevices(int count) {
  const int devices = CountCudaDevices();
  if (devices >= count) return true;
  WARN("skipped: the test needs " << count << " CUDA devices, and there are " << devices);
  return false;
}

void Gate::Hold(cppool_runtime* rt, cppool_stream stream) {
  using Flag = std::shared_ptr<std::atomic<bool>>;
  const auto wait = [](void* argument) {
    const std::unique_ptr<Flag> flag(static_cast<Flag*>(argument));
    while (!(*flag)->load()) std::this_thread::yield();
  };
  Check(rt, rt->enqueue(rt, stream, wait, new Flag(open_)));
}

CudaWorld::CudaWorld(int size, Transport transport)
    : backend_(CreateCudaBackend(size, transport)), ranks_(size) {
  for (int rank = 0; rank < size; ++rank) threads_.emplace_back([this, rank] { Loop(rank); });
  try {
    OnAllThreads([this](int rank) {
      ranks_[rank] = backend_->OpenRank(rank);
      LoadDelay();
    });
  } catch (...) {
    End();
    throw;
  }
}

CudaWorld::~CudaWorld() { End(); }

void CudaWorld::End() {
  OnAllThreads([this](int rank) { ranks_[rank].reset(); });
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CudaWorld::Loop(int rank) {
  int done = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || round_ != done; });
    if (ending_) return;
    done = round_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      task_(rank);
    } catch (...) {
      failure = std::current_exception();
      if (threads_.size() > 1)
        backend_->Abort("a rank of the test failed");  // other ranks may wait for this one
    }
    lock.lock();
    if (failure && !failure_) failure_ = failure;
    if (--running_ == 0) changed_.notify_all();
  }
}

void CudaWorld::OnAllThreads(const std::function<void(int)>& task) {
  std::unique_lock lock(mutex_);
  task_ = task;
  failure_ = nullptr;
  running_ = static_cast<int>(threads_.size());
  ++round_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return running_ == 0; });  // ctest's timeout ends a test that hangs
  if (failure_) std::rethrow_exception(failure_);
}

void CudaWorld::Run(const std::function<void(RankRuntime&)>& body) {
  OnAllThreads([&](int rank) { body(*ranks_[rank]); });
}

StageTimes CudaWorld::RunCase(const std::function<void(cppool_runtime*)>& body) {
  StageTimes times;
  OnAllThreads([&](int rank) {
    RankRuntime& runtime = *ranks_[rank];
    runtime.BeginCase();
    body(runtime.seam());
    StageTimes mine = runtime.EndCase();
    if (rank == 0) times = std::move(mine);
  });
  return times;
}

}  // namespace cppool::kernels::test
