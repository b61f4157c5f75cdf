// A backend whose failures the test chooses. Its streams run work immediately, and it has the communication
// that a probe needs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/error.h"

namespace cppool::test {

// What the ranks of a fake world share, and what a test sets and reads.
struct FakeWorld {
  std::mutex mutex;
  std::condition_variable changed;
  std::string aborted;             // the reason; empty: not aborted
  std::vector<std::string> calls;  // guarded by `mutex`: a trim may run after a request is answered
  std::vector<int> finished;       // ranks that ended a case in order
  bool released = false;

  // Set before the world is used.
  int ordinal = -1;  // of the device that all ranks share; -1: they have none
  int rank_that_cannot_open = -1;
  int rank_that_cannot_begin = -1;
  int rank_that_cannot_end = -1;
  bool recovers = true;
  // What is wrong with `unsound_rank` in a probe after a failure.
  enum class Unsound { kNothing, kSum, kMessage, kStaleMessage, kCommunicator, kHangs };
  std::atomic<Unsound> unsound{Unsound::kNothing};
  int unsound_rank = -1;
  // The runtime's last failure, on every rank.
  cppool_failure failure{sizeof(cppool_failure), CPPOOL_INTERNAL, CPPOOL_CULPRIT_SELF,
                         "the runtime's last error"};
  std::atomic<std::size_t> free_bytes{std::size_t{1} << 30};
  std::atomic<std::size_t> pooled_bytes{0};  // are free once a rank has trimmed
  std::atomic<bool> device_lost{false};      // calls that use the device throw from then on
  std::atomic<std::size_t> left_behind{0};   // allocations that a case leaves on each rank

  std::function<void()> on_end;                            // called when rank 0 ends a case
  std::function<void(int rank)> on_progress;               // called when a rank's progress is read
  std::function<void(int rank, int index)> on_iteration;   // called when a rank begins one
  kernels::RankTrace trace;                                // of every rank
  std::map<int, int> groups_open;                          // by rank
  std::function<kernels::StageSamples(int rank)> samples;  // the times of the iterations so far; empty: none

  // Communication: the inputs of the ranks that have joined an all-reduce, and messages.
  std::vector<const std::int32_t*> joined;
  std::size_t reduced = 0;
  std::size_t sums = 0;
  std::map<std::pair<int, int>, std::deque<std::vector<std::int32_t>>> messages;
  std::vector<std::int32_t> last_message;       // of `unsound_rank`, while nothing was wrong
  std::vector<std::unique_ptr<char[]>> memory;  // all allocations

  void Log(std::string call) {
    const std::lock_guard lock(mutex);
    calls.push_back(std::move(call));
  }
  void ForgetCalls() {
    const std::lock_guard lock(mutex);
    calls.clear();
  }
  // Like a collective that no other rank joins: waits until the world is aborted, then throws.
  void WaitForAbort() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !aborted.empty(); });
    throw kernels::RuntimeError(CPPOOL_NCCL, "released: " + aborted);
  }
  // Waits for Release; an abort does not end it.
  void WaitForRelease() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return released; });
  }
  bool Released() {
    const std::lock_guard lock(mutex);
    return released;
  }
  void Release() {
    const std::lock_guard lock(mutex);
    released = true;
    changed.notify_all();
  }
};

class FakeRank : public kernels::RankRuntime {
 public:
  FakeRank(std::shared_ptr<FakeWorld> world, int rank, int world_size)
      : place_(world_size), world_(std::move(world)) {
    seam_.abi = CPPOOL_RUNTIME_ABI;
    seam_.struct_size = sizeof(seam_);
    seam_.backend = "host";
    seam_.rank = rank;
    seam_.world_size = world_size;
    seam_.device = -1;
    seam_.self = world_.get();
    seam_.last_error = [](cppool_runtime* rt) { return WorldOf(*rt).failure.text; };
    seam_.last_failure = [](cppool_runtime* rt) -> const cppool_failure* { return &WorldOf(*rt).failure; };
    AddCommunication();
  }
  cppool_runtime* seam() override { return &seam_; }
  const kernels::Place& place() const override { return place_; }
  kernels::Group CopyGroup(kernels::GroupShape) override { return {}; }
  std::optional<std::string> WhyNoRing() const override { return "a fake"; }
  kernels::Arrivals StartRing(kernels::RingTransfers, cppool_comm, cppool_stream) override { return {}; }
  std::optional<std::string> FailedInStage() const override { return std::nullopt; }
  void BeginCase() override {
    Log("begin");
    if (seam_.rank == world_->rank_that_cannot_begin)
      throw kernels::RuntimeError(CPPOOL_CUDA, "no clean state");
  }
  void Perturb(std::uint64_t seed) override { Log("perturb " + std::to_string(seed)); }
  void BeginTrace(std::size_t limit) override { Log("trace " + std::to_string(limit)); }
  kernels::RankTrace TakeTrace() override {
    Log("take trace");
    return world_->trace;
  }
  void Break(kernels::DeviceFault, void*, cppool_stream) override { Log("break"); }
  void BeginIteration(int index) override {
    Log("iteration " + std::to_string(index));
    if (world_->on_iteration) world_->on_iteration(seam_.rank, index);
  }
  void KeepUp() override {}
  void EndIterations() override { Log("end iterations"); }
  kernels::StageSamples Samples() override {
    Log("samples");
    return world_->samples ? world_->samples(seam_.rank) : kernels::StageSamples{};
  }
  void Cancel(const std::string& why) override { Log("cancel: " + why); }
  bool InGroup() const override {
    const std::lock_guard lock(world_->mutex);
    return world_->groups_open[seam_.rank] > 0;
  }
  std::vector<kernels::GroupShape> Groups() const override { return {{seam_.world_size, 1}}; }
  kernels::StageTimes EndCase() override {
    Log("end");
    if (world_->on_end && seam_.rank == 0) world_->on_end();
    if (seam_.rank == world_->rank_that_cannot_end)
      throw kernels::RuntimeError(CPPOOL_CUDA, "the work failed");
    if (Meets(seam_, FakeWorld::Unsound::kCommunicator))
      throw kernels::RuntimeError(CPPOOL_NCCL, "a communicator failed", kernels::RuntimeError::kElsewhere);
    // Rank r takes r + 1 times as long.
    return {{"forward", 2.0 * (seam_.rank + 1)}};
  }
  void Trim() override {
    Log("trim");
    world_->free_bytes += world_->pooled_bytes.exchange(0);
    AskDevice();
  }
  kernels::MemoryInfo Memory() const override {
    AskDevice();
    return {world_->pooled_bytes, world_->free_bytes + world_->pooled_bytes, world_->left_behind};
  }
  kernels::LiveMemory Live() const override {
    return {world_->left_behind, 100 * world_->left_behind, 10 * world_->left_behind};
  }
  bool HasRoom(double bytes) const override {
    AskDevice();
    return bytes <= static_cast<double>(world_->free_bytes + world_->pooled_bytes);
  }
  std::vector<kernels::StreamProgress> Progress() const override {
    if (world_->on_progress) world_->on_progress(seam_.rank);
    std::vector<kernels::StreamProgress> streams(2);
    streams[0].stream = "main";
    streams[0].stage = "p2p step 2 of 4";
    streams[0].seconds = 1.5;
    streams[0].idle = false;
    streams[1].stream = "stream 1";
    return streams;
  }

 private:
  using Rt = cppool_runtime;
  using S = cppool_stream;
  using C = cppool_comm;

  void AskDevice() const {
    if (world_->device_lost) throw kernels::RuntimeError(CPPOOL_CUDA, "the device is lost");
  }
  void Log(const std::string& call) { world_->Log(std::to_string(seam_.rank) + " " + call); }
  static FakeWorld& WorldOf(const Rt& rt) { return *static_cast<FakeWorld*>(rt.self); }
  static bool Meets(const Rt& rt, FakeWorld::Unsound what) {
    return WorldOf(rt).unsound == what && WorldOf(rt).unsound_rank == rt.rank;
  }

  static void AddGroup(const Rt& rt, int depth) {
    const std::lock_guard lock(WorldOf(rt).mutex);
    WorldOf(rt).groups_open[rt.rank] += depth;
  }

  // int32 sums and messages on the world communicator, complete when the call returns.
  void AddCommunication() {
    seam_.alloc = [](Rt* rt, std::size_t bytes, S, void** out) { return rt->alloc_host(rt, bytes, out); };
    seam_.free = [](Rt*, void*, S) { return CPPOOL_OK; };
    seam_.alloc_host = [](Rt* rt, std::size_t bytes, void** out) {
      const std::lock_guard lock(WorldOf(*rt).mutex);
      return *out = WorldOf(*rt).memory.emplace_back(std::make_unique<char[]>(bytes)).get(), CPPOOL_OK;
    };
    seam_.copy = [](Rt*, void* to, const void* from, std::size_t bytes, S) {
      return std::memcpy(to, from, bytes), CPPOOL_OK;
    };
    seam_.fill = [](Rt*, void* to, int byte, std::size_t bytes, S) {
      return std::memset(to, byte, bytes), CPPOOL_OK;
    };
    seam_.stream_synchronize = [](Rt*, S) { return CPPOOL_OK; };
    seam_.group = [](Rt* rt, cppool_group which, C* out, int* rank, int* size) {
      *out = which == CPPOOL_WORLD ? reinterpret_cast<C>(rt) : nullptr;
      return *rank = rt->rank, *size = rt->world_size, CPPOOL_OK;
    };
    seam_.group_of = [](Rt* rt, int size, int stride, C* out, int* rank, int* group_size) {
      if (size != rt->world_size || stride != 1) return CPPOOL_INTERNAL;
      *out = reinterpret_cast<C>(rt);
      return *rank = rt->rank, *group_size = size, CPPOOL_OK;
    };
    seam_.group_start = [](Rt* rt) { return AddGroup(*rt, 1), CPPOOL_OK; };
    seam_.group_end = [](Rt* rt) { return AddGroup(*rt, -1), CPPOOL_OK; };
    seam_.send = [](Rt* rt, const void* data, std::size_t bytes, int peer, C, S) {
      FakeWorld& world = WorldOf(*rt);
      const auto* ints = static_cast<const std::int32_t*>(data);
      std::vector<std::int32_t> message(ints, ints + bytes / sizeof(*ints));
      if (Meets(*rt, FakeWorld::Unsound::kMessage)) message.back() ^= 1;
      const std::lock_guard lock(world.mutex);
      if (Meets(*rt, FakeWorld::Unsound::kStaleMessage)) message = world.last_message;
      if (rt->rank == world.unsound_rank && world.unsound == FakeWorld::Unsound::kNothing)
        world.last_message = message;
      world.messages[{rt->rank, peer}].push_back(std::move(message));
      world.changed.notify_all();
      return CPPOOL_OK;
    };
    seam_.recv = [](Rt* rt, void* data, std::size_t bytes, int peer, C, S) {
      FakeWorld& world = WorldOf(*rt);
      std::unique_lock lock(world.mutex);
      auto& messages = world.messages[{peer, rt->rank}];
      world.changed.wait(lock, [&] { return !messages.empty() || world.released; });
      if (messages.empty()) return CPPOOL_INTERNAL;
      std::memcpy(data, messages.front().data(), bytes);
      messages.pop_front();
      return CPPOOL_OK;
    };
    seam_.all_reduce = [](Rt* rt, const void* in, void* out, std::size_t count, cppool_dtype, cppool_reduce,
                          C, S) {
      FakeWorld& world = WorldOf(*rt);
      if (Meets(*rt, FakeWorld::Unsound::kHangs)) return world.WaitForRelease(), CPPOOL_INTERNAL;
      std::unique_lock lock(world.mutex);
      world.joined.push_back(static_cast<const std::int32_t*>(in));
      world.changed.notify_all();
      const auto size = static_cast<std::size_t>(rt->world_size);
      world.changed.wait(lock, [&] { return world.joined.size() == size || world.released; });
      if (world.released) return CPPOOL_INTERNAL;
      for (std::size_t i = 0; i < count; ++i) {
        std::int32_t sum = 0;
        for (const std::int32_t* one : world.joined) sum += one[i];
        static_cast<std::int32_t*>(out)[i] = sum;
      }
      if (Meets(*rt, FakeWorld::Unsound::kSum)) ++static_cast<std::int32_t*>(out)[count / 2];
      // A rank returns only when all have read the inputs, so that no input is freed early and no rank joins
      // the next sum early.
      if (++world.reduced == size) world.joined.clear(), world.reduced = 0, ++world.sums;
      const auto sums = world.sums;
      world.changed.notify_all();
      if (world.reduced) world.changed.wait(lock, [&] { return world.sums != sums || world.released; });
      return CPPOOL_OK;
    };
  }

  const kernels::Place place_;
  std::shared_ptr<FakeWorld> world_;
  cppool_runtime seam_{};
};

class FakeBackend : public kernels::Backend {
 public:
  FakeBackend(std::shared_ptr<FakeWorld> world, int world_size)
      : world_(std::move(world)), place_(world_size) {}
  std::string name() const override { return "host"; }
  std::string transport() const override { return "host"; }
  const kernels::Place& place() const override { return place_; }
  std::unique_ptr<kernels::RankRuntime> OpenRank(int rank) override {
    if (rank == world_->rank_that_cannot_open) throw kernels::RuntimeError(CPPOOL_CUDA, "the device is gone");
    if (world_->rank_that_cannot_open >= 0) world_->WaitForAbort();
    return std::make_unique<FakeRank>(world_, rank, place_.world_size);
  }
  std::vector<kernels::DeviceInfo> Devices() const override {
    return std::vector<kernels::DeviceInfo>(static_cast<std::size_t>(place_.ranks),
                                            {"a fake", "", world_->ordinal, "", std::size_t{1} << 30});
  }
  std::vector<std::pair<std::string, double>> InitTimes() const override { return {{"start", 1.0}}; }
  void Profile(bool begin) override {
    if (begin) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // no rank may go on meanwhile
    const std::lock_guard lock(world_->mutex);
    world_->calls.emplace_back(begin ? "profile" : "end of profile");
  }
  void Abort(const std::string& reason) override {
    const std::lock_guard lock(world_->mutex);
    world_->aborted = reason;
    world_->calls.emplace_back("abort");
    world_->changed.notify_all();
  }
  void Finished(int rank) override {
    const std::lock_guard lock(world_->mutex);
    world_->finished.push_back(rank);
  }
  void Recover(std::chrono::milliseconds) override {
    const std::lock_guard lock(world_->mutex);
    world_->calls.emplace_back("recover");
    if (!world_->recovers) throw kernels::RuntimeError(CPPOOL_NCCL, "it cannot start anew");
    world_->aborted.clear();
    world_->groups_open.clear();
  }

 private:
  std::shared_ptr<FakeWorld> world_;
  const kernels::Place place_;
};

}  // namespace cppool::test
