// Every schedule on the host runtime with all shapes, heads and dtypes; each output of every rank is checked
// against the same kernels without CP and against the fp64 oracle. Other masks, biases and softmax types are
// in features_test.cpp.
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

struct Heads {
  int heads, kv_heads;
};
struct Dims {
  int qk, v;
};

constexpr Dims kDims[] = {{64, 64}, {128, 128}, {192, 128}, {128, 64}, {256, 256}};
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16};
constexpr Heads kHeads[] = {{8, 8}, {8, 2}, {8, 1}};  // MHA, GQA, MQA
// Runs every schedule, format, mask and GQA ratio with every head dim and dtype, or, `by_turns`, with one of
// these each, in rotation.
void RunEveryCombination(int size, bool by_turns = false) {
  HostWorld world(size);
  std::size_t turn = 0;
  for (CpCommType comm : kComms) {
    if (!Possible(comm, size)) continue;
    for (QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
      for (AttnMaskType mask : {AttnMaskType::kNoMask, AttnMaskType::kCausal}) {
        for (const Heads& heads : kHeads) {
          AttentionSpec spec = Small(size, comm);
          spec.format = format;
          spec.mask = mask;
          spec.heads = heads.heads;
          spec.kv_heads = heads.kv_heads;
          spec.seqlen_q = spec.seqlen_kv = 4 * size;
          const auto run = [&](const Dims& dims, Dtype dtype) {
            spec.dim_qk = dims.qk;
            spec.dim_v = dims.v;
            spec.dtypes = TensorDtypes(dtype);
            world.RequireAllHold(spec);
          };
          if (by_turns) {
            run(kDims[turn % std::size(kDims)], kDtypes[turn % std::size(kDtypes)]);
            ++turn;
            continue;
          }
          for (const Dims& dims : kDims) {
            for (Dtype dtype : kDtypes) run(dims, dtype);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("every combination on 1 rank") { RunEveryCombination(1); }
TEST_CASE("every combination on 2 ranks") { RunEveryCombination(2); }
TEST_CASE("every combination on 4 ranks") { RunEveryCombination(4); }
TEST_CASE("a sample of the combinations on 8 ranks") { RunEveryCombination(8, true); }

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
      {9 * unit, 4 * unit, AttnMaskType::kCausalBottomRight, -1, 0},  // the first queries see no key
      {16 * unit, 16 * unit, AttnMaskType::kCausal, 5, 0},
      {8 * unit, 8 * unit, AttnMaskType::kNoMask, 3, 7},
      {4 * unit, 9 * unit, AttnMaskType::kNoMask, 6, 2},
      {9 * unit, 4 * unit, AttnMaskType::kCausalBottomRight, 4, 0},
      {32 * unit, 32 * unit, AttnMaskType::kCausal, -1, 0},
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
      world.RequireAllHold(spec);
    }
  }
}

TEST_CASE("if ranks do not divide the key/value heads, heads are replicated and their gradients summed") {
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
        world.RequireAllHold(spec);
      }
    }
  }
}

TEST_CASE("wrong data from one rank fails the checks on every schedule") {
  const int size = 4;
  HostWorld world(size);
  static std::vector<std::byte> garbage(1 << 22, std::byte{0x3c});
  for (CpCommType comm : kComms) {
    const auto findings = world.Run(Small(size, comm), [](cppool_runtime& seam) {
      if (seam.rank != 2) return;
      // Rank 2 sends garbage in messages and gathers.
      static auto send = seam.send;
      static auto all_gather = seam.all_gather;
      seam.send = [](cppool_runtime* rt, const void*, std::size_t bytes, int peer, cppool_comm comm,
                     cppool_stream stream) { return send(rt, garbage.data(), bytes, peer, comm, stream); };
      seam.all_gather = [](cppool_runtime* rt, const void*, void* out, std::size_t bytes, cppool_comm comm,
                           cppool_stream stream) {
        return all_gather(rt, garbage.data(), out, bytes, comm, stream);
      };
    });
    INFO(Describe(Small(size, comm)));
    std::set<CheckedTensor> failed;
    for (const Finding& f : findings) {
      if (!f.verdict.ok) failed.insert(f.tensor);
    }
    CHECK(failed.count(CheckedTensor::kOut) == 1);
    CHECK(failed.count(CheckedTensor::kDq) == 1);
    CHECK(failed.count(CheckedTensor::kDk) == 1);
  }
}
