// The host backends of several processes, in one: their links are queues of this process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/backend.h"

namespace cppool::test {

// Between the processes of a world: what one sends to another is taken there on a thread of its own.
class Wires {
 public:
  explicit Wires(int processes) {
    for (int i = 0; i < processes * processes; ++i) wires_.push_back(std::make_shared<Wire>());
    processes_ = processes;
  }
  std::unique_ptr<kernels::HostLink> LinkOf(int process) { return std::make_unique<Link>(*this, process); }

 private:
  using Bytes = kernels::HostLink::Bytes;
  struct Wire {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Bytes> queue;
    bool end = false;
  };
  std::shared_ptr<Wire> At(int from, int to) {
    return wires_[static_cast<std::size_t>(from * processes_ + to)];
  }

  class Link final : public kernels::HostLink {
   public:
    Link(Wires& wires, int process) {
      for (int other = 0; other < wires.processes_; ++other) {
        out_.push_back(wires.At(process, other));
        in_.push_back(wires.At(other, process));
      }
    }
    ~Link() override {
      for (const auto& wire : in_) {
        const std::lock_guard lock(wire->mutex);
        wire->end = true;
        wire->changed.notify_all();
      }
      for (std::thread& thread : threads_) thread.join();
    }
    std::string name() const override { return "wires"; }
    void Start(Events events) override {
      for (std::size_t other = 0; other < in_.size(); ++other) {
        threads_.emplace_back([wire = in_[other], other, events] {
          for (;;) {
            std::unique_lock lock(wire->mutex);
            wire->changed.wait(lock, [&] { return wire->end || !wire->queue.empty(); });
            if (wire->end) return;
            Bytes bytes = std::move(wire->queue.front());
            wire->queue.pop_front();
            lock.unlock();
            events.take(static_cast<int>(other), std::move(bytes));
          }
        });
      }
    }
    void Send(int process, Bytes message) override {
      const auto& wire = out_[static_cast<std::size_t>(process)];
      const std::lock_guard lock(wire->mutex);
      wire->queue.push_back(std::move(message));
      wire->changed.notify_all();
    }

   private:
    std::vector<std::shared_ptr<Wire>> out_, in_;
    std::vector<std::thread> threads_;
  };

  int processes_ = 0;
  std::vector<std::shared_ptr<Wire>> wires_;
};

class SplitBackend final : public kernels::Backend {
 public:
  SplitBackend(int size, int processes) : place_(size), ranks_(size / processes), wires_(processes) {
    for (int process = 0; process < processes; ++process) {
      const kernels::Place place(size, process * ranks_, ranks_);
      parts_.push_back(
          kernels::CreateHostBackend(place, kernels::CreateHostTransport(place, wires_.LinkOf(process))));
    }
  }
  std::string name() const override { return "host"; }
  std::string transport() const override { return parts_.front()->transport(); }
  const kernels::Place& place() const override { return place_; }
  std::unique_ptr<kernels::RankRuntime> OpenRank(int rank) override { return PartOf(rank).OpenRank(rank); }
  std::vector<kernels::DeviceInfo> Devices() const override {
    return std::vector<kernels::DeviceInfo>(static_cast<std::size_t>(place_.ranks),
                                            parts_.front()->Devices().front());
  }
  std::vector<std::pair<std::string, double>> InitTimes() const override {
    return parts_.front()->InitTimes();
  }
  void Profile(bool) override {}
  // As the daemon does: every process is told the first reason, after a moment in which letters arrive.
  void Abort(const std::string& reason) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason;
    for (const auto& part : parts_) part->Abort(reason_);
  }
  void Finished(int rank) override { PartOf(rank).Finished(rank); }
  void Recover(std::chrono::milliseconds limit) override {
    reason_.clear();
    for (const auto& part : parts_) part->Recover(limit);
  }

 private:
  kernels::Backend& PartOf(int rank) { return *parts_[static_cast<std::size_t>(rank / ranks_)]; }

  const kernels::Place place_;
  const int ranks_;  // of a process
  Wires wires_;
  std::mutex mutex_;
  std::string reason_;
  std::vector<std::unique_ptr<kernels::Backend>> parts_;
};

// Of as many processes, at most `processes`, as divide the world.
inline std::unique_ptr<kernels::Backend> MakeSplitBackend(int size, int processes) {
  while (size > 0 && processes > 1 && size % processes != 0) --processes;
  if (size < 1 || size > 64 || processes == 1) return kernels::CreateHostBackend(size);
  return std::make_unique<SplitBackend>(size, processes);
}

}  // namespace cppool::test
