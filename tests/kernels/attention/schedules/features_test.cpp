// Every feature of the matrix with every schedule: packed and padded sequences, masks, windows, biases,
// softmax offsets, max_logit, alone and together.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

// bshd, sbhd, and thd with and without padding between sequences.
struct Packing {
  QkvFormat format;
  bool pads;
};
constexpr Packing kPackings[] = {
    {QkvFormat::kBshd, false}, {QkvFormat::kSbhd, false}, {QkvFormat::kThd, false}, {QkvFormat::kThd, true}};

constexpr BiasShape kBiasShapes[] = {{false, true, true},     // 1hss
                                     {false, false, true},    // 11ss
                                     {true, false, true},     // b1ss
                                     {true, true, true},      // bhss
                                     {false, false, false}};  // 111s

AttentionSpec Case(int world, CpCommType comm, const Packing& packing = kPackings[0]) {
  AttentionSpec spec = Small(world, comm);
  spec.heads = world == 6 ? 6 : 8;
  spec.kv_heads = spec.heads / 2;
  spec.format = packing.format;
  spec.pad_between_seqs = packing.pads;
  if (spec.format == QkvFormat::kThd) {
    spec.batch = 5;  // the drawn lengths include 0 and 1
    spec.mask = AttnMaskType::kPaddingCausal;
  }
  return spec;
}

// Runs the case of each schedule after `vary` has changed it.
void WithEverySchedule(HostWorld& world, const Packing& packing,
                       const std::function<void(AttentionSpec&)>& vary) {
  for (const CpCommType comm : kComms) {
    if (!Possible(comm, world.size())) continue;
    AttentionSpec spec = Case(world.size(), comm, packing);
    vary(spec);
    world.RequireAllHold(spec);
  }
}

void Unequal(AttentionSpec& spec, int world, std::int64_t queries, std::int64_t keys) {
  spec.seqlen_q = queries * 2 * world;
  spec.seqlen_kv = keys * 2 * world;
}

void Bias(AttentionSpec& spec, BiasShape shape) {
  spec.bias = BiasType::kPostScale;
  spec.bias_shape = shape;
}

}  // namespace

TEST_CASE("packed sequences, masks of padding and windows with every schedule") {
  HostWorld world(GENERATE(2, 4));
  for (const Packing& packing : kPackings) {
    for (const AttnMaskType mask : {AttnMaskType::kPadding, AttnMaskType::kPaddingCausal}) {
      WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
        spec.batch = 4;
        spec.mask = mask;
      });
      WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
        spec.mask = mask;
        spec.window_left = 3;
        spec.window_right = 2;
        spec.seed = 7;
      });
    }
    // Lengths of queries and keys are drawn independently: some sequences are empty on one side, and some
    // queries see no key.
    for (const AttnMaskType mask :
         {AttnMaskType::kPadding, AttnMaskType::kPaddingCausal, AttnMaskType::kPaddingCausalBottomRight}) {
      WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
        spec.batch = 5;
        spec.mask = mask;
        Unequal(spec, world.size(), 7, 4);
      });
    }
  }
}

TEST_CASE("every shape of bias and its gradient with every schedule") {
  HostWorld world(GENERATE(2, 4));
  for (const Packing& packing : kPackings) {
    for (const BiasShape& shape : kBiasShapes) {
      WithEverySchedule(world, packing, [&](AttentionSpec& spec) { Bias(spec, shape); });
    }
  }
  for (const BiasShape& shape : kBiasShapes) {  // without a mask, with unequal lengths
    WithEverySchedule(world, kPackings[0], [&](AttentionSpec& spec) {
      Bias(spec, shape);
      spec.mask = AttnMaskType::kNoMask;
      Unequal(spec, world.size(), 3, 5);
    });
  }
}

TEST_CASE("ALiBi with every schedule") {
  HostWorld world(GENERATE(2, 4));
  for (const Packing& packing : kPackings) {
    for (const AttnMaskType mask :
         {AttnMaskType::kPadding, AttnMaskType::kPaddingCausal, AttnMaskType::kPaddingCausalBottomRight}) {
      WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
        spec.bias = BiasType::kAlibi;
        spec.mask = mask;
        if (mask != AttnMaskType::kPadding) Unequal(spec, world.size(), 3, 5);
      });
    }
  }
}

TEST_CASE("softmax offsets and max_logit with every schedule") {
  HostWorld world(GENERATE(2, 4));
  for (const Packing& packing : kPackings) {
    for (const SoftmaxType softmax :
         {SoftmaxType::kVanilla, SoftmaxType::kOffByOne, SoftmaxType::kLearnable}) {
      WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
        spec.softmax = softmax;
        spec.max_logit = true;
      });
    }
  }
}

TEST_CASE("all features together with every schedule") {
  HostWorld world(GENERATE(2, 4, 6, 8));
  for (const Packing& packing : kPackings) {
    WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
      Bias(spec, {true, true, true});
      spec.mask = AttnMaskType::kPaddingCausal;
      spec.softmax = SoftmaxType::kLearnable;
      spec.max_logit = true;
      spec.deterministic = true;
      spec.window_left = 5;
      spec.dtypes = TensorDtypes(Dtype::kFp16);
      spec.dim_qk = 128;
    });
    WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
      Bias(spec, {false, false, false});
      spec.mask = AttnMaskType::kPaddingCausalBottomRight;
      spec.softmax = SoftmaxType::kOffByOne;
      spec.max_logit = true;
      spec.kv_heads = 1;  // replicated in schedules that exchange heads
      Unequal(spec, world.size(), 3, 5);
    });
  }
}

TEST_CASE("random delays do not change results") {
  HostWorld world(4);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    world.Perturb(seed);
    for (const Packing& packing : kPackings) {
      WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
        Bias(spec, {false, true, true});
        spec.softmax = SoftmaxType::kLearnable;
        spec.max_logit = true;
      });
    }
  }
}

TEST_CASE("forward only, with all features of the forward pass") {
  HostWorld world(4);
  WithEverySchedule(world, kPackings[3], [&](AttentionSpec& spec) {
    Bias(spec, {false, true, true});
    spec.softmax = SoftmaxType::kLearnable;
    spec.max_logit = true;
    spec.training = false;
  });
}

TEST_CASE("queries that see no key, and ranks without a token") {
  HostWorld world(4);
  // Bottom-right: with more queries than keys, the first queries see no key.
  for (const Packing& packing : kPackings) {
    WithEverySchedule(world, packing, [&](AttentionSpec& spec) {
      spec.mask = packing.format == QkvFormat::kThd ? AttnMaskType::kPaddingCausalBottomRight
                                                    : AttnMaskType::kCausalBottomRight;
      spec.softmax = SoftmaxType::kLearnable;
      spec.max_logit = true;
      Bias(spec, {false, false, true});
      Unequal(spec, world.size(), 9, 2);
    });
  }
  // First one token in total, so that three ranks hold only padding; then a sequence with queries but no
  // keys.
  WithEverySchedule(world, {QkvFormat::kThd, true}, [&](AttentionSpec& spec) {
    spec.batch = 2;
    spec.queries = spec.keys = {{0, 1}, {0, 8}, 2 * spec.seqlen_q};
    spec.softmax = SoftmaxType::kLearnable;
  });
  WithEverySchedule(world, {QkvFormat::kThd, true}, [&](AttentionSpec& spec) {
    spec.batch = 2;
    spec.queries = {{9, 5}, {16, 8}, 2 * spec.seqlen_q};
    spec.keys = {{0, 5}, {0, 8}, 2 * spec.seqlen_q};
    Bias(spec, {false, true, true});
    spec.max_logit = true;
  });
}
