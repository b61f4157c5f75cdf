#include "daemon/rank_threads.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <latch>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/start_error.h"
#include "kernels/error.h"
#include "kernels/signal_stack.h"

namespace cppool::daemon {
namespace {

constexpr std::chrono::seconds kJoinLimit{5};

}  // namespace

struct RankThreads::State {
  std::mutex mutex;
  std::condition_variable job_changed;
  std::condition_variable job_done;
  std::shared_ptr<const Job> job;
  std::uint64_t generation = 0;  // counts jobs
  int busy = 0;                  // threads that have not finished it
  int alive = 0;
  bool stop = false;
  std::vector<std::thread> threads;
  std::vector<pid_t> ids;

  void Loop(int rank) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      job_changed.wait(lock,
                       [&] { return stop || generation != seen; });  // without a limit: between requests
      if (stop) break;
      seen = generation;
      const std::shared_ptr<const Job> current = job;
      lock.unlock();
      (*current)(rank);
      lock.lock();
      if (--busy == 0) job_done.notify_all();
    }
    if (--alive == 0) job_done.notify_all();
  }
};

RankThreads::RankThreads(int count, int first) : state_(std::make_shared<State>()) {
  state_->alive = count;
  state_->ids.resize(static_cast<std::size_t>(count));
  const auto named = std::make_shared<std::latch>(count);
  for (int rank = first; rank < first + count; ++rank) {
    try {
      state_->threads.emplace_back([state = state_, rank, first, named] {
        const kernels::SignalStack signal_stack;
        pthread_setname_np(pthread_self(), ("rank " + std::to_string(rank)).c_str());
        state->ids[static_cast<std::size_t>(rank - first)] = static_cast<pid_t>(syscall(SYS_gettid));
        named->count_down();
        state->Loop(rank);
      });
    } catch (const std::system_error& error) {
      StartError failed(
          "no thread for rank " + std::to_string(rank) + ": " + error.what() + kernels::kThreadLimits,
          protocol::FailureKind::kInternal);
      failed.rank = rank;
      throw failed;
    }
  }
  named->wait();
}

RankThreads::~RankThreads() {
  bool finished = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->stop = true;
    state_->job_changed.notify_all();
    finished = state_->job_done.wait_for(lock, kJoinLimit, [&] { return state_->alive == 0; });
  }
  for (std::thread& thread : state_->threads) {
    if (finished) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

std::vector<pid_t> RankThreads::ids() const { return state_->ids; }

int RankThreads::count() const { return static_cast<int>(state_->threads.size()); }

void RankThreads::Start(Job job) {
  const std::lock_guard lock(state_->mutex);
  state_->job = std::make_shared<const Job>(std::move(job));
  state_->busy = count();
  ++state_->generation;
  state_->job_changed.notify_all();
}

bool RankThreads::WaitUntil(Clock::time_point deadline) {
  std::unique_lock lock(state_->mutex);
  const auto done = [&] { return state_->busy == 0; };
  if (deadline == Clock::time_point::max()) {
    state_->job_done.wait(lock, done);
    return true;
  }
  return state_->job_done.wait_until(lock, deadline, done);
}

}  // namespace cppool::daemon
