// Tests of the run outside the schedules: rows of ranks, the oracle's sample, the estimate of memory, and
// detection of errors.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kernels/attention/checks/fp8_verify.h"
#include "kernels/attention/checks/oracle_sample.h"
#include "kernels/attention/run.h"
#include "kernels/attention/tensors/tensor_set.h"
#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace cppool::test {
namespace {

using namespace kernels;

// A spec with sequences of different lengths, including 0 and 1.
AttentionSpec Ragged(int world, QkvFormat format) {
  AttentionSpec spec = Small(world, CpCommType::kP2p);
  spec.batch = 5;
  spec.format = format;
  spec.mask = AttnMaskType::kPaddingCausal;
  spec.pad_between_seqs = format == QkvFormat::kThd;
  DrawSequences(spec, world);
  return spec;
}

// The bytes that a rank's case holds, counted in its runtime interface.
struct Held {
  std::mutex mutex;
  std::map<std::pair<int, void*>, std::size_t> live;
  std::map<int, double> now, most;
  decltype(cppool_runtime::alloc) alloc = nullptr;
  decltype(cppool_runtime::free) free = nullptr;
};
Held held;  // global, because the functions of the interface take no user data

void CountMemory(cppool_runtime& seam) {
  {
    const std::lock_guard lock(held.mutex);
    held.alloc = seam.alloc;
    held.free = seam.free;
    held.now[seam.rank] = held.most[seam.rank] = 0;
  }
  seam.alloc = [](cppool_runtime* rt, std::size_t bytes, cppool_stream stream, void** out) {
    const cppool_status status = held.alloc(rt, bytes, stream, out);
    const std::lock_guard lock(held.mutex);
    held.live[{rt->rank, *out}] = bytes;
    held.now[rt->rank] += static_cast<double>(bytes);
    held.most[rt->rank] = std::max(held.most[rt->rank], held.now[rt->rank]);
    return status;
  };
  seam.free = [](cppool_runtime* rt, void* pointer, cppool_stream stream) {
    {
      const std::lock_guard lock(held.mutex);
      const auto found = held.live.find({rt->rank, pointer});
      if (found != held.live.end()) {
        held.now[rt->rank] -= static_cast<double>(found->second);
        held.live.erase(found);
      }
    }
    return held.free(rt, pointer, stream);
  };
}

// Whether the thread of this rank enqueues a forward pass.
thread_local bool in_forward = false;
decltype(cppool_runtime::mark) real_mark = nullptr;
decltype(cppool_runtime::fill) real_fill = nullptr;

void LeavePadding(cppool_runtime& seam) {
  static std::once_flag once;
  std::call_once(once, [&] {
    real_mark = seam.mark;
    real_fill = seam.fill;
  });
  seam.mark = [](cppool_runtime* rt, cppool_stream stream, const char* stage) {
    if (stage && stream == rt->stream) in_forward = std::strncmp(stage, "forward", 7) == 0;
    return real_mark(rt, stream, stage);
  };
  seam.fill = [](cppool_runtime* rt, void* to, int byte, std::size_t bytes, cppool_stream stream) {
    return in_forward && byte == 0 ? CPPOOL_OK : real_fill(rt, to, byte, bytes, stream);
  };
}

struct Received {
  int count = 0;
  void* last = nullptr;
  cppool_stream stream = nullptr;
};
thread_local Received received;
cppool_runtime real;

// Flips a bit of the other rank's values on rank 1 in the rerun after the last iteration.
void DisturbRerun(cppool_runtime& seam) {
  static std::once_flag once;
  std::call_once(once, [&] { real = seam; });
  if (seam.rank != 1) return;
  received = {};
  seam.recv = [](cppool_runtime* rt, void* to, std::size_t bytes, int peer, cppool_comm comm,
                 cppool_stream stream) {
    received = {received.count + 1, to, stream};
    return real.recv(rt, to, bytes, peer, comm, stream);
  };
  seam.group_end = [](cppool_runtime* rt) {
    const cppool_status status = real.group_end(rt);
    // Of an iteration: k and v, forward and backward, and dk and dv.
    if (received.count != 6 * HostWorld::kIterations + 2) return status;
    return rt->enqueue(
        rt, received.stream, [](void* values) { *static_cast<std::uint16_t*>(values) ^= 0x40; },
        received.last);
  };
}

bool Holds(const std::vector<Finding>& findings, CheckedTensor tensor, const std::string& against, int rank) {
  bool found = false, ok = true;
  for (const Finding& f : findings) {
    if (f.tensor != tensor || f.against != against || f.rank != rank) continue;
    found = true;
    ok = ok && f.verdict.ok;
  }
  REQUIRE(found);
  return ok;
}

}  // namespace

TEST_CASE("Every global row, including padding, is on exactly one rank") {
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd}) {
    for (const int world : {1, 2, 3, 8}) {
      const AttentionSpec spec = Ragged(world, format);
      const RankTokens all(spec, 1, 0);
      std::set<std::int64_t> rows, tokens;
      for (int rank = 0; rank < world; ++rank) {
        const RankTokens mine(spec, world, rank);
        REQUIRE(mine.queries.whole.size() == static_cast<std::size_t>(spec.queries.rows / world));
        for (const std::int64_t row : mine.queries.whole) REQUIRE(rows.insert(row).second);
        for (const std::int64_t row : mine.queries.tokens)
          REQUIRE(tokens.insert(mine.queries.whole[row]).second);
        CHECK(mine.queries.tokens.size() + mine.queries.padding.size() == mine.queries.whole.size());
      }
      CHECK(rows.size() == static_cast<std::size_t>(spec.queries.rows));
      CHECK(*rows.begin() == 0);
      CHECK(*rows.rbegin() == spec.queries.rows - 1);
      CHECK(std::vector<std::int64_t>(tokens.begin(), tokens.end()) == all.queries.tokens);
    }
  }
}

TEST_CASE("The oracle computes small cases completely") {
  AttentionSpec spec = Ragged(2, QkvFormat::kThd);
  spec.kv_heads = 4;
  spec.bias = BiasType::kPostScale;
  std::size_t with_work = 0;
  for (std::size_t i = 0; i < spec.queries.length.size(); ++i) with_work += spec.queries.length[i] > 0;
  REQUIRE(with_work == 4);
  for (const bool batch : {false, true}) {
    for (const bool heads : {false, true}) {
      spec.bias_shape = {batch, heads, true};
      const OracleSample sample = SampleOracle(spec, true);
      CHECK(sample.pairs.size() == 4 * with_work);
      CHECK(sample.whole_heads == std::vector<int>{0, 1, 2, 3});
      CHECK(sample.bias_units.size() == (batch ? with_work : 1) * (heads ? 4 : 1));
      std::size_t covered = 0;
      for (const BiasUnit& unit : sample.bias_units) {
        CHECK(unit.begin == covered);
        covered = unit.end;
        CHECK(unit.heads == (heads ? 2 : 1));
        CHECK(unit.head == (heads ? sample.pairs[unit.begin].kv_head * 2 : 0));
        CHECK(unit.batch == (batch ? sample.pairs[unit.begin].sequence : 0));
        for (std::size_t i = unit.begin; i < unit.end; ++i) {
          if (batch) CHECK(sample.pairs[i].sequence == sample.pairs[unit.begin].sequence);
          if (heads) CHECK(sample.pairs[i].kv_head == sample.pairs[unit.begin].kv_head);
        }
      }
      CHECK(covered == sample.pairs.size());
    }
  }
  // Sequences with only queries or only keys are in the sample, but add to no sum.
  const auto queries = spec.queries.length, keys = spec.keys.length;
  spec.bias_shape = {false, false, true};
  for (auto* lengths : {&spec.queries.length, &spec.keys.length}) {
    spec.queries.length = queries;
    spec.keys.length = keys;
    for (std::size_t i = 0; i < lengths->size(); i += 2) (*lengths)[i] = 0;
    const OracleSample sample = SampleOracle(spec, true);
    std::size_t with_tokens = 0;
    for (std::size_t i = 0; i < keys.size(); ++i)
      with_tokens += spec.queries.length[i] > 0 || spec.keys.length[i] > 0;
    CHECK(sample.pairs.size() == 4 * with_tokens);
    CHECK(sample.whole_heads.size() == 4);
    REQUIRE(sample.bias_units.size() == 1);
    CHECK(sample.bias_units[0].end == sample.pairs.size());
  }
  spec.queries.length.assign(5, 0);
  spec.keys.length = keys;
  CHECK_FALSE(SampleOracle(spec, true).pairs.empty());
  spec.keys.length.assign(5, 0);
  CHECK(SampleOracle(spec, true).pairs.empty());
}

AttentionSpec Large(std::int64_t batch, int heads) {
  AttentionSpec spec;
  spec.batch = batch;
  spec.heads = spec.kv_heads = heads;
  spec.seqlen_q = spec.seqlen_kv = 4096;
  DrawSequences(spec, 4);
  return spec;
}

TEST_CASE("The sample of a large case has sequences with visible pairs and sequences without keys") {
  AttentionSpec spec = Large(9, 2);
  for (int i = 1; i < 9; ++i) spec.keys.length[i] = 0;
  const OracleSample sample = SampleOracle(spec, true);
  REQUIRE(!sample.pairs.empty());
  const auto working = std::count_if(sample.pairs.begin(), sample.pairs.end(),
                                     [](const OraclePair& pair) { return pair.sequence == 0; });
  CHECK(working >= 1);
  CHECK(sample.pairs.size() == static_cast<std::size_t>(working) + 16);
}

TEST_CASE("The sample of a large case completes each sum unless that is too much work") {
  AttentionSpec spec = Large(2, 12);
  CHECK(SampleOracle(spec, false).pairs.size() == 1);
  CHECK(SampleOracle(spec, false).whole_heads.empty());
  spec.max_logit = true;
  OracleSample sample = SampleOracle(spec, false);
  CHECK(sample.pairs.size() == 2);
  CHECK(sample.whole_heads.size() == 1);
  spec.max_logit = false;
  spec.softmax = SoftmaxType::kLearnable;
  CHECK(SampleOracle(spec, false).whole_heads.size() == 1);
  spec.training = false;  // no gradient of the offset
  CHECK(SampleOracle(spec, false).whole_heads.empty());
  spec.training = true;
  spec.softmax = SoftmaxType::kVanilla;
  spec.bias = BiasType::kPostScale;
  const auto pairs = [&](BiasShape shape) {
    spec.bias_shape = shape;
    sample = SampleOracle(spec, false);
    CHECK(sample.bias_units.size() == 1);
    return sample.pairs.size();
  };
  CHECK(pairs({true, true, true}) == 1);
  CHECK(pairs({false, true, true}) == 2);
  CHECK(pairs({true, false, true}) == 12);
  CHECK(pairs({false, false, true}) == 24);
  CHECK(pairs({false, false, false}) == 24);
  for (const std::uint64_t seed : {1ULL, 7ULL, 1234567ULL}) {  // every seed selects existing pairs
    spec.seed = seed;
    CHECK(pairs({false, true, true}) == 2);
    for (const OraclePair& pair : sample.pairs) {
      CHECK(pair.sequence < 2);
      CHECK(pair.kv_head < 12);
    }
  }
  // On a CPU a sum would take hours: the sample is one pair, without a complete sum.
  sample = SampleOracle(spec, true);
  CHECK(sample.pairs.size() == 1);
  CHECK(sample.bias_units.empty());
}

TEST_CASE("A case holds no more memory than AttentionBytes") {
  for (const int size : {1, 2, 4}) {
    HostWorld world(size);
    for (const CpCommType comm : kComms) {
      if (!Possible(comm, size)) continue;
      AttentionSpec spec = Small(size, comm);
      spec.seqlen_q = spec.seqlen_kv = 64 * size;
      std::vector<AttentionSpec> specs(8, spec);
      specs[1].bias = BiasType::kPostScale;
      specs[1].bias_shape = {true, true, true};
      specs[2].bias = BiasType::kPostScale;
      specs[2].bias_shape = {false, false, false};
      specs[2].softmax = SoftmaxType::kLearnable;
      specs[2].max_logit = true;
      specs[3].format = QkvFormat::kThd;
      specs[3].mask = AttnMaskType::kPaddingCausal;
      specs[3].deterministic = true;
      specs[3].bias = BiasType::kPostScale;
      specs[3].bias_shape = {false, true, true};
      specs[4].training = false;
      specs[5].fp8 = Fp8Recipe{ScalingMode::kDelayed, true, true, true, false};
      specs[6].fp8 = Fp8Recipe{ScalingMode::kCurrent, true, true, false, true};
      specs[7].fp8 = Fp8Recipe{ScalingMode::kMxfp8, true, false, true, true};
      double plain_estimated = 0, plain_held = 0;
      for (AttentionSpec& each : specs) {
        DrawSequences(each, size);
        world.Run(each, CountMemory);
        // What is copied for fp8's bits is not counted by the runtime.
        const double estimated = AttentionBytes(*AttentionFamilies("host").front(), each, size, true) -
                                 (each.fp8 ? Fp8Verifier::HostBytes(each, size) : 0);
        if (&each == &specs[0]) plain_estimated = estimated, plain_held = held.most[0];
        for (int rank = 0; rank < size; ++rank) {
          INFO(Describe(each) << ": held " << held.most[rank] << ", estimated " << estimated
                              << "; plain case held " << plain_held << ", estimated " << plain_estimated);
          CHECK(held.most[rank] <= estimated);
          // The memory of a feature is itself in the estimate (except a few small tables), not covered by
          // slack of other parts.
          CHECK(held.most[rank] - plain_held <= estimated - plain_estimated + 16384);
          CHECK(held.now[rank] == 0);
        }
      }
    }
  }
}

TEST_CASE("Padding that is not zero fails the check of a tensor even if its tokens are right") {
  HostWorld world(2);
  const AttentionSpec spec = Ragged(2, QkvFormat::kThd);
  const std::vector<Finding> findings = world.Run(spec, LeavePadding);
  for (const int rank : {0, 1}) {
    CHECK_FALSE(Holds(findings, CheckedTensor::kOut, "no_cp", rank));
    CHECK_FALSE(Holds(findings, CheckedTensor::kLse, "no_cp", rank));
    CHECK(Holds(findings, CheckedTensor::kOut, "oracle", rank));
    CHECK(Holds(findings, CheckedTensor::kDv, "no_cp", rank));
  }
}

TEST_CASE("A second run with different bits fails the check rerun") {
  HostWorld world(2);
  AttentionSpec spec = Small(2, CpCommType::kAllGather);
  spec.deterministic = true;
  for (const Finding& f : world.Run(spec)) CHECK(f.verdict.ok);
  const std::vector<Finding> findings = world.Run(spec, DisturbRerun);
  CHECK_FALSE(Holds(findings, CheckedTensor::kOut, "rerun", 1));
  CHECK(Holds(findings, CheckedTensor::kOut, "rerun", 0));
}

}  // namespace cppool::test
