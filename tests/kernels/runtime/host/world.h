// A host world for tests with one thread per rank, as in the daemon. With CPPOOL_TEST_PROCESSES, its ranks
// are those of as many processes as divide the world, which exchange letters.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime.h"
#ifdef CPPOOL_TEST_PROCESSES
#include "tests/kernels/runtime/host/split_backend.h"
#endif

namespace cppool::test {

// Throws unless `holds`. For the threads of ranks, where Catch2's macros may not be used.
inline void Require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

class World {
 public:
  explicit World(int size) : backend_(MakeBackend(size)), ranks_(static_cast<std::size_t>(size)) {
    ForEachRank([&](int rank) { ranks_[static_cast<std::size_t>(rank)] = backend_->OpenRank(rank); });
  }

  kernels::Backend& backend() { return *backend_; }
  kernels::RankRuntime& rank(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

  // Runs `body` on every rank's thread and returns the error of each ("" if there is none).
  std::vector<std::string> Errors(const std::function<void(cppool_runtime*)>& body) {
    std::vector<std::string> errors(ranks_.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          body(ranks_[i]->seam());
        } catch (const std::exception& e) {
          errors[i] = e.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  // Runs one case like the daemon: the first rank that fails aborts the world. Returns the error of each
  // rank.
  std::vector<std::string> CaseErrors(const std::function<void(cppool_runtime*)>& body) {
    std::atomic<bool> failed{false};
    auto errors = Errors([&](cppool_runtime* rt) {
      std::string error;
      const auto attempt = [&](const std::function<void()>& part) {
        try {
          part();
        } catch (const std::exception& e) {
          if (error.empty()) error = e.what();
          failed = true;
          backend_->Abort(error);
        }
      };
      rank(rt->rank).BeginCase();
      attempt([&] { body(rt); });
      attempt([&] { rank(rt->rank).EndCase(); });
      if (!error.empty()) throw std::runtime_error(error);
    });
    if (failed) backend_->Recover(std::chrono::seconds(30));
    return errors;
  }

  // Runs one case and throws the first error of a rank.
  void Case(const std::function<void(cppool_runtime*)>& body) {
    for (const std::string& error : CaseErrors(body)) {
      if (!error.empty()) throw std::runtime_error(error);
    }
  }

 private:
  static std::unique_ptr<kernels::Backend> MakeBackend(int size) {
#ifdef CPPOOL_TEST_PROCESSES
    return MakeSplitBackend(size, CPPOOL_TEST_PROCESSES);
#else
    return kernels::CreateHostBackend(size);
#endif
  }

  void ForEachRank(const std::function<void(int)>& body) {
    std::vector<std::exception_ptr> errors(ranks_.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          body(static_cast<int>(i));
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<kernels::RankRuntime>> ranks_;
};

// Blocks work until Open, so that work enqueued after it cannot run before.
class Latch {
 public:
  void Open() { open_.store(true, std::memory_order_release); }
  void Wait() const {
    while (!open_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

 private:
  std::atomic<bool> open_{false};
};

inline void Sync(cppool_runtime* rt, cppool_stream stream = nullptr) {
  kernels::Check(rt, rt->stream_synchronize(rt, stream ? stream : rt->stream));
}

}  // namespace cppool::test
