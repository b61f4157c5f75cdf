// Questions that may never be answered, each on a thread of its own.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace cppool::daemon {

// Calls function(0), ..., function(count - 1), each on a thread of its own, and returns the results that are
// there at `until`. Threads that have not finished are left running: the process is about to end.
template <typename Result>
std::vector<std::optional<Result>> AskAll(std::size_t count, std::function<Result(std::size_t)> function,
                                          std::chrono::steady_clock::time_point until) {
  struct Answers {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::optional<Result>> all;
    std::size_t back = 0;
  };
  const auto answers = std::make_shared<Answers>();
  answers->all.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    try {
      std::thread([answers, function, i] {
        pthread_setname_np(pthread_self(), "snapshot");
        std::optional<Result> result;
        try {
          result = function(i);
        } catch (const std::exception&) {  // no result
        }
        const std::lock_guard lock(answers->mutex);
        answers->all[i] = std::move(result);
        ++answers->back;
        answers->changed.notify_all();
      }).detach();
    } catch (const std::exception&) {  // no thread, no result
      const std::lock_guard lock(answers->mutex);
      ++answers->back;
    }
  }
  std::unique_lock lock(answers->mutex);
  answers->changed.wait_until(lock, until, [&] { return answers->back == count; });
  return answers->all;
}

}  // namespace cppool::daemon
