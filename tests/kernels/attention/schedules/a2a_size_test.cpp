// a2a+p2p with all-to-all groups of several sizes: the results are right, and the groups are those of the
// parameter.
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

struct Division {
  int world, a2a_size;
};
// Ring size x a2a_size: 2 x 2; 3 x 2 and 2 x 3; 4 x 2 and 2 x 4.
const std::vector<Division> kDivisions = {{4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}};

AttentionSpec Case(const Division& division) {
  AttentionSpec spec = Small(division.world, CpCommType::kA2aP2p);
  spec.a2a_size = division.a2a_size;
  spec.heads = spec.kv_heads = 12;
  spec.seqlen_q = spec.seqlen_kv = 4 * division.world;
  return spec;
}

}  // namespace

TEST_CASE("a2a_size: key/value heads are divided evenly, unevenly or replicated") {
  const Division division = GENERATE(from_range(kDivisions));
  HostWorld world(division.world);
  for (const auto& [heads, kv_heads] : {std::pair{12, 12}, {12, 6}, {12, 4}, {12, 3}, {12, 2}, {12, 1}}) {
    for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
      AttentionSpec spec = Case(division);
      spec.heads = heads;
      spec.kv_heads = kv_heads;
      spec.format = format;
      INFO("a2a_size " << division.a2a_size);
      world.RequireAllHold(spec);
    }
  }
}

TEST_CASE("a2a_size: results are right with masks, packed sequences, biases and offsets") {
  const Division division = GENERATE(from_range(kDivisions));
  HostWorld world(division.world);
  const auto check = [&](auto vary) {
    AttentionSpec spec = Case(division);
    spec.kv_heads = 3;  // some are replicated, and ranks have different numbers of them
    vary(spec);
    INFO("a2a_size " << division.a2a_size);
    world.RequireAllHold(spec);
  };
  const std::int64_t unit = 2 * division.world;
  check([&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kCausalBottomRight;
    spec.seqlen_q = 3 * unit;
    spec.seqlen_kv = 5 * unit;
    spec.window_left = 7;
    spec.dim_qk = 192;
    spec.dim_v = 128;
  });
  check([&](AttentionSpec& spec) {
    spec.format = QkvFormat::kThd;
    spec.pad_between_seqs = true;
    spec.batch = 5;
    spec.mask = AttnMaskType::kPaddingCausal;
    spec.softmax = SoftmaxType::kLearnable;
    spec.max_logit = true;
  });
  check([&](AttentionSpec& spec) {
    spec.mask = AttnMaskType::kNoMask;
    spec.bias = BiasType::kPostScale;
    spec.bias_shape = {true, true, true};
  });
  check([&](AttentionSpec& spec) {
    spec.bias = BiasType::kPostScale;
    spec.bias_shape = {false, false, false};
    spec.dtypes = TensorDtypes(Dtype::kFp16);
  });
  check([&](AttentionSpec& spec) {
    spec.bias = BiasType::kAlibi;
    spec.deterministic = true;
  });
  check([&](AttentionSpec& spec) {
    spec.training = false;
    spec.softmax = SoftmaxType::kOffByOne;
  });
}

TEST_CASE("a2a_size: adjacent ranks form an all-to-all group, and a ring has one rank of each group") {
  const Division division = GENERATE(from_range(kDivisions));
  HostWorld world(division.world);
  static std::mutex mutex;
  static cppool_runtime original;
  static std::map<int, std::set<std::pair<int, int>>> asked;  // size and stride of the groups, by rank
  static std::map<int, std::set<std::string>> stages;
  asked.clear();
  stages.clear();
  AttentionSpec spec = Case(division);
  spec.mask = AttnMaskType::kNoMask;  // so that every ring position attends to every block
  const auto findings = world.Run(spec, [](cppool_runtime& seam) {
    const std::lock_guard lock(mutex);
    original = seam;
    seam.group_of = [](cppool_runtime* rt, int size, int stride, cppool_comm* out, int* rank,
                       int* group_size) {
      {
        const std::lock_guard note(mutex);
        asked[rt->rank].insert({size, stride});
      }
      return original.group_of(rt, size, stride, out, rank, group_size);
    };
    seam.mark = [](cppool_runtime* rt, cppool_stream stream, const char* stage) {
      if (stage) {
        const std::lock_guard note(mutex);
        stages[rt->rank].insert(stage);
      }
      return original.mark(rt, stream, stage);
    };
  });
  for (const Finding& f : findings) CHECK(f.verdict.ok);
  const int ring_size = division.world / division.a2a_size;
  for (int rank = 0; rank < division.world; ++rank) {
    CAPTURE(division.world, division.a2a_size, rank);
    CHECK(asked[rank] ==
          std::set<std::pair<int, int>>{{division.a2a_size, 1}, {ring_size, division.a2a_size}});
    const std::string of = " of " + std::to_string(ring_size);
    for (int step = 1; step <= ring_size; ++step)
      CHECK(stages[rank].count("forward/a2a+p2p step " + std::to_string(step) + of) == 1);
  }
}

TEST_CASE("a2a_size: one world runs cases of several sizes one after another") {
  HostWorld world(8);
  for (int round = 0; round < 2; ++round) {
    for (const int a2a_size : {4, 2}) {
      INFO("round " << round << ", a2a_size " << a2a_size);
      world.RequireAllHold(Case({8, a2a_size}));
    }
  }
}
