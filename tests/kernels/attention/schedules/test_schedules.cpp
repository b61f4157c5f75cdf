// Every schedule on the host runtime, each output on every rank checked against the same kernels without CP and the fp64 oracle.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "kernels/attention/run.h"
#include "kernels/attention/schedule.h"
#include "kernels/backend.h"
#include "kernels/error.h"

namespace {

using namespace cppool::kernels;

struct Finding {
  int rank;
  CheckedTensor tensor;
  std::string against;
  Verdict verdict;
};

// A world of host ranks that runs cases one after another, as the daemon does.
class HostWorld {
 public:
  explicit HostWorld(int size) : backend_(CreateHostBackend(size)), ranks_(size) {
    OnEveryRank([&](int r) { ranks_[r] = backend_->OpenRank(r); });
  }

  // Alters the seam that a rank's case is given; for faults.
  using Alter = std::function<void(cppool_runtime&)>;

  std::vector<Finding> Run(const AttentionSpec& spec, const Alter& alter = {}) {
    std::mutex mutex;
    std::vector<Finding> findings;
    OnEveryRank([&](int r) {
      Report report(*ranks_[r], [&](const Finding& f) {
        const std::lock_guard lock(mutex);
        findings.push_back(f);
        findings.back().rank = r;
      });
      ranks_[r]->BeginCase();
      cppool_runtime seam = *ranks_[r]->seam();
      if (alter) alter(seam);
      RunAttention(&seam, spec, true, report);
      const StageTimes times = ranks_[r]->EndCase();
      for (const char* stage : {"forward", "backward"}) {
        const bool timed =
            std::any_of(times.begin(), times.end(), [&](const auto& t) { return t.first == stage; });
        if (timed != (spec.training || stage[0] == 'f'))
          throw RuntimeError(CPPOOL_INTERNAL, std::string("wrong stages: ") + stage);
      }
      if (ranks_[r]->Memory().live_allocations != 0)
        throw RuntimeError(CPPOOL_INTERNAL, "the case left memory behind");
    });
    return findings;
  }

 private:
  class Report : public AttentionReport {
   public:
    Report(RankRuntime& rank, std::function<void(const Finding&)> found)
        : rank_(rank), found_(std::move(found)) {}
    bool NextIteration() override {
      if (++iteration_ == 2) rank_.EndIterations();
      if (iteration_ >= 2) return false;
      rank_.BeginIteration(iteration_);
      return true;
    }
    void Work(const std::string&, double flops) override {
      if (!(flops > 0)) throw RuntimeError(CPPOOL_INTERNAL, "no work");
    }
    void Check(CheckedTensor tensor, const std::string& against, const Verdict& verdict) override {
      found_({0, tensor, against, verdict});
    }

   private:
    RankRuntime& rank_;
    std::function<void(const Finding&)> found_;
    int iteration_ = -1;
  };

  void OnEveryRank(const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::exception_ptr first;
    for (int r = 0; r < backend_->world_size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          work(r);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
          backend_->Abort("rank " + std::to_string(r) + " failed");
        }
      });
    }
    for (std::thread& t : threads) t.join();
    if (first) std::rethrow_exception(first);
  }

  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<RankRuntime>> ranks_;
};

std::string Describe(const Finding& f) {
  return "rank " + std::to_string(f.rank) + " " + NameOf(f.tensor) + " against " + f.against +
         ": max_abs_err " + std::to_string(f.verdict.max_abs_err) + ", rel_err " +
         std::to_string(f.verdict.rel_err) + ", tolerance " + std::to_string(f.verdict.tolerance);
}

void RequireAllHold(HostWorld& world, int size, const AttentionSpec& spec) {
  const std::vector<Finding> findings = world.Run(spec);
  const std::size_t tensors = spec.training ? 5 : 2;
  REQUIRE(findings.size() == 2 * tensors * size);
  for (const Finding& f : findings) {
    INFO(Describe(f));
    CHECK(f.verdict.ok);
  }
}

struct Heads {
  int heads, kv_heads;
};
struct Dims {
  int qk, v;
};

constexpr Dims kDims[] = {{64, 64}, {128, 128}, {192, 128}, {128, 64}, {256, 256}};
constexpr Heads kHeads[] = {{8, 8}, {8, 2}, {8, 1}};  // MHA, GQA, MQA
constexpr CpCommType kComms[] = {CpCommType::kP2p, CpCommType::kAllGather, CpCommType::kA2a,
                                 CpCommType::kA2aP2p};

std::string Name(CpCommType comm) {
  switch (comm) {
    case CpCommType::kP2p:
      return "p2p";
    case CpCommType::kAllGather:
      return "all_gather";
    case CpCommType::kA2a:
      return "a2a";
    case CpCommType::kA2aP2p:
      return "a2a+p2p";
  }
  return "?";
}

bool Possible(CpCommType comm, int world) {
  return comm != CpCommType::kA2aP2p || (world >= 4 && world % 2 == 0);
}

AttentionSpec Small(int world, CpCommType comm) {
  AttentionSpec spec;
  spec.batch = 2;
  spec.seqlen_q = spec.seqlen_kv = 8 * world;
  spec.heads = 8;
  spec.kv_heads = 8;
  spec.dim_qk = spec.dim_v = 64;
  spec.comm = comm;
  spec.scale = 0.125;
  return spec;
}

void RunEveryCombination(int size) {
  HostWorld world(size);
  for (CpCommType comm : kComms) {
    if (!Possible(comm, size)) continue;
    for (QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
      for (AttnMaskType mask : {AttnMaskType::kNoMask, AttnMaskType::kCausal}) {
        for (const Heads& heads : kHeads) {
          for (const Dims& dims : kDims) {
            for (Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
              AttentionSpec spec = Small(size, comm);
              spec.format = format;
              spec.mask = mask;
              spec.heads = heads.heads;
              spec.kv_heads = heads.kv_heads;
              spec.dim_qk = dims.qk;
              spec.dim_v = dims.v;
              spec.dtype = dtype;
              spec.seqlen_q = spec.seqlen_kv = 4 * size;
              INFO("W=" << size << " " << Name(comm) << " format " << static_cast<int>(format) << " mask "
                        << static_cast<int>(mask) << " heads " << heads.heads << "/" << heads.kv_heads
                        << " dims " << dims.qk << "/" << dims.v << " dtype " << static_cast<int>(dtype));
              RequireAllHold(world, size, spec);
            }
          }
        }
      }
    }
  }
}

}  // namespace

// Every schedule, format, mask, head sharing, head dim and dtype.
TEST_CASE("every combination on 1 rank") { RunEveryCombination(1); }
TEST_CASE("every combination on 2 ranks") { RunEveryCombination(2); }
TEST_CASE("every combination on 4 ranks") { RunEveryCombination(4); }
TEST_CASE("every combination on 8 ranks") { RunEveryCombination(8); }

TEST_CASE("unequal lengths, windows and bottom-right masks with every schedule") {
  const int size = GENERATE(2, 4, 6);
  HostWorld world(size);
  struct Shape {
    std::int64_t q, kv;
    AttnMaskType mask;
    std::int64_t left, right;
  };
  const std::int64_t unit = 2 * size;
  const Shape shapes[] = {
      {4 * unit, 9 * unit, AttnMaskType::kNoMask, -1, -1},
      {9 * unit, 4 * unit, AttnMaskType::kNoMask, -1, -1},
      {4 * unit, 9 * unit, AttnMaskType::kCausal, -1, 0},
      {9 * unit, 4 * unit, AttnMaskType::kCausal, -1, 0},
      {4 * unit, 9 * unit, AttnMaskType::kCausalBottomRight, -1, 0},
      {9 * unit, 4 * unit, AttnMaskType::kCausalBottomRight, -1, 0},  // the first rows see no key at all
      {16 * unit, 16 * unit, AttnMaskType::kCausal, 5, 0},
      {8 * unit, 8 * unit, AttnMaskType::kNoMask, 3, 7},
      {4 * unit, 9 * unit, AttnMaskType::kNoMask, 6, 2},
      {9 * unit, 4 * unit, AttnMaskType::kCausalBottomRight, 4, 0},
      {64 * unit, 64 * unit, AttnMaskType::kCausal, -1, 0},
  };
  for (CpCommType comm : kComms) {
    if (!Possible(comm, size)) continue;
    for (const Shape& shape : shapes) {
      AttentionSpec spec = Small(size, comm);
      spec.heads = 6 * (size == 4 ? 2 : 1);
      spec.kv_heads = 2;
      spec.seqlen_q = shape.q;
      spec.seqlen_kv = shape.kv;
      spec.mask = shape.mask;
      spec.window_left = shape.left;
      spec.window_right = shape.right;
      spec.seed = 99;
      INFO("W=" << size << " " << Name(comm) << " lengths " << shape.q << "/" << shape.kv << " mask "
                << static_cast<int>(shape.mask) << " window " << shape.left << "," << shape.right);
      RequireAllHold(world, size, spec);
    }
  }
}

TEST_CASE(
    "heads that do not line up with the ranks: key/value heads are replicated and their gradients summed") {
  HostWorld world(4);
  for (CpCommType comm : {CpCommType::kA2a, CpCommType::kA2aP2p}) {
    for (const Heads& heads :
         {Heads{12, 6}, Heads{12, 2}, Heads{12, 3}, Heads{12, 1}, Heads{4, 4}, Heads{20, 5}}) {
      for (QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
        AttentionSpec spec = Small(4, comm);
        spec.format = format;
        spec.heads = heads.heads;
        spec.kv_heads = heads.kv_heads;
        spec.batch = 3;
        INFO(Name(comm) << " heads " << heads.heads << "/" << heads.kv_heads);
        RequireAllHold(world, 4, spec);
      }
    }
  }
}

TEST_CASE("forward only") {
  HostWorld world(4);
  for (CpCommType comm : kComms) {
    AttentionSpec spec = Small(4, comm);
    spec.training = false;
    INFO(Name(comm));
    RequireAllHold(world, 4, spec);
  }
}

TEST_CASE("a case run again gives the same bits, so the same errors") {
  HostWorld world(2);
  const AttentionSpec spec = Small(2, CpCommType::kP2p);
  const auto first = world.Run(spec);
  const auto second = world.Run(spec);
  std::multiset<std::pair<int, double>> a, b;
  for (const Finding& f : first) a.insert({f.rank, f.verdict.max_abs_err});
  for (const Finding& f : second) b.insert({f.rank, f.verdict.max_abs_err});
  CHECK(a == b);
}

TEST_CASE("data lost on the way is caught on every schedule") {
  const int size = 4;
  HostWorld world(size);
  static std::vector<std::byte> garbage(1 << 22, std::byte{0x3c});
  for (CpCommType comm : kComms) {
    const auto findings = world.Run(Small(size, comm), [](cppool_runtime& seam) {
      if (seam.rank != 2) return;
      // Rank 2 sends, or contributes to a gather, what it does not have.
      static auto send = seam.send;
      static auto all_gather = seam.all_gather;
      seam.send = [](cppool_runtime* rt, const void*, std::size_t bytes, int peer, cppool_comm comm,
                     cppool_stream stream) { return send(rt, garbage.data(), bytes, peer, comm, stream); };
      seam.all_gather = [](cppool_runtime* rt, const void*, void* out, std::size_t bytes, cppool_comm comm,
                           cppool_stream stream) {
        return all_gather(rt, garbage.data(), out, bytes, comm, stream);
      };
    });
    INFO(Name(comm));
    std::set<CheckedTensor> failed;
    for (const Finding& f : findings) {
      if (!f.verdict.ok) failed.insert(f.tensor);
    }
    CHECK(failed.count(CheckedTensor::kOut) == 1);
    CHECK(failed.count(CheckedTensor::kDq) == 1);
    CHECK(failed.count(CheckedTensor::kDk) == 1);
  }
}
