// Questions that may never be answered, each on a thread of its own.
#pragma once

#include <pthread.h>

#include <algorithm>
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

// Questions by number, of which each is asked by one thread at most: one that is not answered yet is not
// asked again, and who asks it waits for the same answer. Thread-safe.
template <typename Result>
class Questions {
 public:
  explicit Questions(std::size_t count) : asked_(count) {}

  // Calls function(0), ..., function(count - 1), each on a thread of its own, and returns the results that
  // are there at `until`. Threads that have not finished are left running, and may outlive this.
  std::vector<std::optional<Result>> Ask(const std::function<Result(std::size_t)>& function,
                                         std::chrono::steady_clock::time_point until) {
    std::unique_lock lock(shared_->mutex);
    for (std::size_t i = 0; i < asked_.size(); ++i)
      if (!asked_[i] || asked_[i]->back) asked_[i] = Start(function, i);
    const std::vector<std::shared_ptr<Question>> asked = asked_;
    shared_->changed.wait_until(lock, until, [&] {
      return std::ranges::all_of(asked, [](const auto& question) { return question->back; });
    });
    std::vector<std::optional<Result>> results;
    for (const auto& question : asked) results.push_back(question->result);
    return results;
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
  };
  struct Question {
    std::optional<Result> result;
    bool back = false;  // with a result or without one
  };

  std::shared_ptr<Question> Start(const std::function<Result(std::size_t)>& function, std::size_t i) const {
    auto question = std::make_shared<Question>();
    try {
      std::thread([shared = shared_, question, function, i] {
        pthread_setname_np(pthread_self(), "snapshot");
        std::optional<Result> result;
        try {
          result = function(i);
        } catch (const std::exception&) {  // no result
        }
        const std::lock_guard lock(shared->mutex);
        question->result = std::move(result);
        question->back = true;
        shared->changed.notify_all();
      }).detach();
    } catch (const std::exception&) {  // no thread, no result
      question->back = true;
    }
    return question;
  }

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::vector<std::shared_ptr<Question>> asked_;  // the latest of each number; null: none yet
};

// As Questions::Ask, once.
template <typename Result>
std::vector<std::optional<Result>> AskAll(std::size_t count,
                                          const std::function<Result(std::size_t)>& function,
                                          std::chrono::steady_clock::time_point until) {
  return Questions<Result>(count).Ask(function, until);
}

}  // namespace cppool::daemon
