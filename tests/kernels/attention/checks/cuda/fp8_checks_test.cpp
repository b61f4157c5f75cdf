// The checks of fp8 on a GPU beside the host's: the oracle of the quantized problem with its bounds, and the
// comparison of bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/checks/fp8_bits.h"
#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/half.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/check_rank.h"
#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {
namespace {

CheckRank& OnGpu() {
  static CheckRank rank(CreateCudaBackend(1), &MakeCheckKernels);
  return rank;
}
CheckRank& OnHost() {
  static CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  return rank;
}

struct Case {
  bool payloads = true;  // E4M3 and E5M2 with scales; else values in bf16
  bool casts = true;     // a backward pass in fp8
  bool blocks = false;   // of dS
  bool bias = false, offset = false;
  int group = 2, dim_qk = 32, dim_v = 64;
  std::int64_t seqlen_q = 150, seqlen_kv = 201;
  AttnMaskType mask = AttnMaskType::kCausal;
  std::int64_t window_left = -1;
};

constexpr int kKvHeads = 2, kKvHead = 1, kStep = 2;

struct Tensors {
  std::vector<std::uint8_t> q, k, v, dout, q_of_dk, k_of_dq, dout_of_dv;
  std::vector<std::uint16_t> bias;
  std::vector<float> scales, delta, offset;
};

Tensors MakeTensors(const Case& c) {
  std::mt19937 random(23);
  std::normal_distribution<float> normal(0, 1);
  const auto make = [&](std::int64_t rows, int heads, int dim, bool dout) {
    std::vector<std::uint8_t> bytes;
    for (std::int64_t i = 0; i < rows * heads * dim; ++i) {
      const float x = normal(random);
      if (c.payloads) {
        bytes.push_back(dout ? FloatToE5M2(x * 40) : FloatToE4M3(x * 40));
      } else {
        const std::uint16_t bits = FloatToBF16(x);
        bytes.insert(bytes.end(), {static_cast<std::uint8_t>(bits), static_cast<std::uint8_t>(bits >> 8)});
      }
    }
    return bytes;
  };
  const int heads = kKvHeads * c.group;
  const std::int64_t rows_q = c.seqlen_q * kStep, rows_kv = c.seqlen_kv * kStep;
  Tensors t{make(rows_q, heads, c.dim_qk, false),
            make(rows_kv, kKvHeads, c.dim_qk, false),
            make(rows_kv, kKvHeads, c.dim_v, false),
            make(rows_q, heads, c.dim_v, true),
            make(rows_q, heads, c.dim_qk, false),
            make(rows_kv, kKvHeads, c.dim_qk, false),
            make(rows_q, heads, c.dim_v, true),
            {},
            {0.021f, 0.017f, 0.033f, 0.007f},
            {},
            {}};
  t.bias.resize(static_cast<std::size_t>(c.group * c.seqlen_q * c.seqlen_kv));
  for (std::uint16_t& each : t.bias) each = FloatToBF16(normal(random));
  t.delta.resize(static_cast<std::size_t>(rows_q * heads));
  for (float& each : t.delta) each = 0.2f * normal(random);
  t.offset.assign(static_cast<std::size_t>(c.group), 0.4f);
  return t;
}

using Outputs = std::vector<std::pair<std::string, std::vector<double>>>;

// Both passes, each for itself, exact (with bounds) or plain. `shift`: OracleFp8::lse_shift, written by the
// exact ones.
Outputs RunBoth(const CheckRank& rank, const Case& c, const Tensors& t, bool rounded,
                const Buffer& shift = {}) {
  const Buffer q = rank.Upload(t.q), k = rank.Upload(t.k), v = rank.Upload(t.v), dout = rank.Upload(t.dout),
               q_of_dk = rank.Upload(t.q_of_dk), k_of_dq = rank.Upload(t.k_of_dq),
               dout_of_dv = rank.Upload(t.dout_of_dv), bias = rank.Upload(t.bias),
               scales = rank.Upload(t.scales), delta = rank.Upload(t.delta), offset = rank.Upload(t.offset);
  const auto ref = [&](const Buffer& buffer, int scale, bool of_dout = false) {
    if (!c.payloads) return TensorRef{buffer.get(), Dtype::kBf16};
    return TensorRef{buffer.get(), of_dout ? Dtype::kE5M2 : Dtype::kE4M3, scales.get<float>() + scale};
  };
  OracleArgs args;
  args.q = ref(q, 0), args.k = ref(k, 1), args.v = ref(v, 2);
  args.stored = Dtype::kBf16;
  args.q_row = args.kv_row = 1;
  args.q_step = args.kv_step = kStep;
  args.seqlen_q = c.seqlen_q, args.seqlen_kv = c.seqlen_kv;
  args.heads = kKvHeads * c.group, args.head_begin = kKvHead * c.group, args.group = c.group;
  args.kv_heads = kKvHeads, args.kv_head = kKvHead;
  args.dim_qk = c.dim_qk, args.dim_v = c.dim_v;
  args.scale = 0.2;
  args.mask = c.mask, args.window_left = c.window_left;
  args.rounded = rounded;
  if (c.bias) {
    args.bias = {bias.get(), Dtype::kBf16};
    args.bias_head_step = c.seqlen_q * c.seqlen_kv, args.bias_query_step = c.seqlen_kv;
  }
  if (c.offset) args.softmax_offset = offset.get<float>();

  std::vector<std::pair<std::string, Buffer>> results;
  const auto result = [&](const char* name, std::int64_t count) {
    results.emplace_back(name, rank.Upload(std::vector<double>(static_cast<std::size_t>(count), 0.5)));
    return results.back().second.get<double>();
  };
  const std::int64_t vectors = c.seqlen_q * c.group;
  const auto bound = [&](const char* name, std::int64_t count) {
    return rounded ? nullptr : result(name, count);
  };
  OracleArgs forward = args;
  forward.out = result("out", vectors * c.dim_v), forward.lse = result("lse", vectors);
  OracleFp8& of_out = forward.fp8.emplace();
  of_out.p_scale = 448, of_out.out_scale = 30;
  of_out.out_bound = bound("out_bound", vectors * c.dim_v);
  rank.kernels().Oracle(forward, rank.stream());

  args.dout = ref(dout, 3, true);
  args.dq = result("dq", vectors * c.dim_qk), args.dk = result("dk", c.seqlen_kv * c.dim_qk),
  args.dv = result("dv", c.seqlen_kv * c.dim_v);
  if (c.bias) {
    args.dbias = result("dbias", static_cast<std::int64_t>(t.bias.size()));
    args.dbias_head_step = args.bias_head_step, args.dbias_query_step = args.bias_query_step;
  }
  if (c.offset) args.d_softmax_offset = result("d_offset", c.group);
  OracleFp8& fp8 = args.fp8.emplace();
  fp8.delta = delta.get<float>();
  if (c.casts) {
    fp8.p_scale = c.blocks ? 256 : 448, fp8.ds_scale = 300, fp8.gradient_scale = 20, fp8.ds_blocks = c.blocks;
    if (c.blocks) {
      fp8.q_of_dk = ref(q_of_dk, 0), fp8.k_of_dq = ref(k_of_dq, 1);
      fp8.dout_of_dv = ref(dout_of_dv, 3, true);
    }
    fp8.dq_bound = bound("dq_bound", vectors * c.dim_qk);
    fp8.dk_bound = bound("dk_bound", c.seqlen_kv * c.dim_qk);
    fp8.dv_bound = bound("dv_bound", c.seqlen_kv * c.dim_v);
  } else {
    args.q = ref(q_of_dk, 0);  // other operands than those of lse
    fp8.lse = forward.lse, fp8.lse_shift = shift.get<double>();
  }
  rank.kernels().Oracle(args, rank.stream());
  Outputs outputs;
  for (const auto& [name, buffer] : results) outputs.emplace_back(name, rank.Download<double>(buffer));
  return outputs;
}

void ExpectAsOnHost(const Case& c) {
  CAPTURE(c.payloads, c.casts, c.blocks, c.bias, c.offset, c.group, c.dim_qk, c.seqlen_q, c.seqlen_kv,
          static_cast<int>(c.mask), c.window_left);
  const Tensors tensors = MakeTensors(c);
  const std::size_t shifts = static_cast<std::size_t>(c.seqlen_q * c.group) * sizeof(double);
  const Buffer on_gpu = OnGpu().Poisoned(shifts), on_host = OnHost().Poisoned(shifts);
  for (const bool rounded : {false, true}) {
    const Outputs got = RunBoth(OnGpu(), c, tensors, rounded, on_gpu),
                  want = RunBoth(OnHost(), c, tensors, rounded, on_host);
    REQUIRE(got.size() == want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      const auto& [name, expected] = want[i];
      double largest = 0;
      for (const double x : expected) largest = std::max(largest, std::isfinite(x) ? std::abs(x) : 0.0);
      // Sums have another order; a rounding or a cast may rarely fall to the other side.
      std::size_t different = 0;
      for (std::size_t e = 0; e < expected.size(); ++e) {
        const double x = got[i].second[e], y = expected[e];
        if (!(x == y || std::abs(x - y) <= 1e-11 * largest)) ++different;
      }
      CAPTURE(rounded, name, expected.size());
      CHECK(largest > 0);
      CHECK(different * (rounded ? 500 : expected.size() + 1) <= expected.size());
    }
  }
}

}  // namespace

TEST_CASE("the oracle of fp8 agrees with the host's: payloads, values, casts and bounds") {
  if (!HaveDevices(1)) return;
  for (const bool payloads : {true, false}) {
    ExpectAsOnHost({.payloads = payloads});
    ExpectAsOnHost({.payloads = payloads, .blocks = true, .mask = AttnMaskType::kNoMask});
    ExpectAsOnHost({.payloads = payloads, .blocks = true, .bias = true, .offset = true, .group = 1});
    ExpectAsOnHost({.payloads = payloads, .offset = true, .window_left = 40});
    ExpectAsOnHost(
        {.payloads = payloads, .dim_qk = 192, .dim_v = 128, .mask = AttnMaskType::kCausalBottomRight});
  }
  // Backward passes in 16 bits.
  ExpectAsOnHost({.payloads = false, .casts = false, .bias = true});
  ExpectAsOnHost({.payloads = false, .casts = false, .offset = true, .group = 3, .window_left = 40});
  // Few tiles and long sums, which are divided into parts; and a query that is alone.
  ExpectAsOnHost({.blocks = true, .group = 1, .seqlen_q = 700, .seqlen_kv = 1100});
  ExpectAsOnHost({.group = 1, .seqlen_q = 1, .seqlen_kv = 300, .mask = AttnMaskType::kNoMask});
}

TEST_CASE("the oracle of fp8 handles lengths of 0") {
  if (!HaveDevices(1)) return;
  for (Case c : {Case{.seqlen_q = 0}, Case{.seqlen_kv = 0}}) {
    const Tensors tensors = MakeTensors(c);
    const Outputs got = RunBoth(OnGpu(), c, tensors, false), want = RunBoth(OnHost(), c, tensors, false);
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(want[i].first);
      CHECK((got[i].second == want[i].second));
    }
  }
}

// Casts of a plain attention move no result beyond what the exact one says; where a chunk ends, too.
TEST_CASE("the oracle of fp8 in several chunks: plain results lie within the bounds of the exact ones") {
  if (!HaveDevices(1)) return;
  const Case c{.blocks = true,
               .group = 3,
               .dim_qk = 32,
               .dim_v = 32,
               .seqlen_q = 1500,
               .seqlen_kv = 30000,
               .mask = AttnMaskType::kCausalBottomRight};
  const Tensors tensors = MakeTensors(c);
  const Outputs plain = RunBoth(OnGpu(), c, tensors, true), exact = RunBoth(OnGpu(), c, tensors, false);
  const auto of = [](const Outputs& outputs, const std::string& name) {
    return std::find_if(outputs.begin(), outputs.end(), [&](const auto& each) { return each.first == name; })
        ->second;
  };
  for (const std::string name : {"dq", "dk", "dv", "out"}) {
    const std::vector<double> got = of(plain, name), right = of(exact, name),
                              bound = of(exact, name + "_bound");
    std::size_t beyond = 0;
    double nearest = 0;  // of an error to its bound
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double error = std::abs(got[i] - right[i]);
      beyond += error <= bound[i] ? 0 : 1;
      if (error > 0) nearest = std::max(nearest, error / bound[i]);
    }
    CAPTURE(name, nearest);
    CHECK(beyond == 0);
    CHECK(nearest > 0.02);
  }
}

TEST_CASE("a comparison with bounds agrees with the host's") {
  if (!HaveDevices(1)) return;
  std::mt19937 random(31);
  std::normal_distribution<double> normal(0, 1);
  for (const std::int64_t columns : {64, 7}) {
    constexpr std::int64_t kRows = 300;
    std::vector<double> a(static_cast<std::size_t>(kRows * columns)), b(a.size()), bounds(a.size());
    std::vector<std::int64_t> rows;
    for (std::int64_t i = 0; i < kRows; i += 3) rows.push_back(kRows - 1 - i);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = normal(random), b[i] = a[i] + 0.01 * normal(random), bounds[i] = 0.1 + std::abs(normal(random));
    }
    const auto compare = [&](const CheckRank& rank) {
      const Buffer of_a = rank.Upload(a), of_b = rank.Upload(b), of_bounds = rank.Upload(bounds),
                   map = rank.Upload(rows);
      CompareArgs args;
      args.a = {of_a.get(), Dtype::kFp64}, args.b = {of_b.get(), Dtype::kFp64};
      args.a_rows = args.b_rows = map.get<std::int64_t>();
      args.a_stride = args.b_stride = args.columns = columns;
      args.rows = static_cast<std::int64_t>(rows.size());
      args.bound = of_bounds.get<double>();
      return rank.Compare(args);
    };
    const CompareStats got = compare(OnGpu()), want = compare(OnHost());
    CHECK(got.max_of_bound == want.max_of_bound);
    CHECK(got.largest_bound == want.largest_bound);
    CHECK(want.max_of_bound > 0);
  }
}

namespace {

// Payloads and values of [rows, heads, dim] in bf16, some of them wrong.
struct Quantized {
  std::vector<std::uint16_t> input, values;
  std::vector<std::uint8_t> payload, exponents;
  std::vector<std::int64_t> rows, whole;
  std::vector<RowTile> blocks;
};
constexpr std::int64_t kRows = 77;
constexpr int kHeads = 3, kDim = 96;
constexpr float kScale = 37.3f;

Quantized MakeQuantized(bool blocks) {
  std::mt19937 random(41);
  std::normal_distribution<float> normal(0, 2);
  Quantized data;
  const std::size_t count = kRows * kHeads * kDim;
  for (std::size_t i = 0; i < count; ++i) data.input.push_back(FloatToBF16(normal(random)));
  for (std::size_t i = 0; i < 40; ++i) data.input[i * 97] = i % 3 == 0 ? 0 : i % 3 == 1 ? 0x8000 : 0x7fc1;
  data.input[5] = 0x7f80;
  for (std::size_t i = 0; i < count; ++i) {
    const float x = BF16ToFloat(data.input[i]);
    data.payload.push_back(FloatToE4M3(x * (blocks ? 64 : kScale)));
    data.values.push_back(FloatToBF16(E4M3ToFloat(data.payload[i]) * (blocks ? 0x1p-6f : 1 / kScale)));
    if (i % 501 == 0) data.payload[i] ^= 1;
    if (i % 703 == 0) data.values[i] ^= 1;
  }
  data.exponents.assign(count, 121);  // 2^-6
  for (std::int64_t row = 0; row < kRows; row += 2) data.rows.push_back(row);
  for (std::int64_t row = 0; row < kRows; ++row) data.whole.push_back(kRows - 1 - row);
  for (std::int64_t row = 0; row + 40 < kRows; row += 20) data.blocks.push_back({row, 20});
  std::reverse(data.whole.begin(), data.whole.end());
  return data;
}

BitsTally TallyOf(const CheckRank& rank, const BitsCheck& check) {
  void* memory = nullptr;
  Check(rank.rt(), rank.rt()->alloc_host(rank.rt(), sizeof(BitsTally), &memory));
  rank.kernels().CheckBits(check, static_cast<BitsTally*>(memory), rank.stream());
  rank.Synchronize();
  const BitsTally tally = *static_cast<BitsTally*>(memory);
  rank.rt()->free_host(rank.rt(), memory);
  return tally;
}

// Each check of the data, in order.
std::vector<BitsTally> TalliesOf(const CheckRank& rank, const Quantized& data) {
  const Buffer input = rank.Upload(data.input), values = rank.Upload(data.values),
               payload = rank.Upload(data.payload), exponents = rank.Upload(data.exponents),
               rows = rank.Upload(data.rows), whole = rank.Upload(data.whole),
               blocks = rank.Upload(data.blocks);
  std::vector<float> deltas(static_cast<std::size_t>(kRows * kHeads), 0.5f);
  const Buffer delta = rank.Upload(deltas);
  const fp8_bits::Rows some{rows.get<std::int64_t>(), static_cast<std::int64_t>(data.rows.size()),
                            whole.get<std::int64_t>()};
  const fp8_bits::Operand operand{some,
                                  input.get<std::uint16_t>(),
                                  Dtype::kE4M3,
                                  payload.get<std::uint8_t>(),
                                  values.get<std::uint16_t>(),
                                  kHeads,
                                  0,
                                  kHeads,
                                  kDim};
  std::vector<BitsTally> tallies;
  tallies.push_back(TallyOf(rank, {fp8_bits::ScaledOperand{operand, kScale, 1 / kScale}}));
  for (const MxAxis axis : {MxAxis::kDim, MxAxis::kTokens}) {
    tallies.push_back(TallyOf(
        rank, {fp8_bits::BlockOperand{operand, axis, exponents.get<std::uint8_t>(), blocks.get<RowTile>(),
                                      static_cast<std::int64_t>(data.blocks.size()), 2}}));
  }
  for (const bool same : {false, true}) {
    tallies.push_back(
        TallyOf(rank, {fp8_bits::Out{some, payload.get<std::uint8_t>(), values.get<std::uint16_t>(),
                                     kHeads * kDim, 1 / kScale, same}}));
  }
  tallies.push_back(TallyOf(rank, {fp8_bits::Delta{some,
                                                   {payload.get(), Dtype::kE4M3},
                                                   {values.get(), Dtype::kBf16},
                                                   0.1,
                                                   1,
                                                   delta.get<float>(),
                                                   kHeads,
                                                   kDim}}));
  tallies.push_back(TallyOf(rank, {fp8_bits::Amax{some, values.get<std::uint16_t>(), kHeads * kDim}}));
  return tallies;
}

}  // namespace

TEST_CASE("the comparison of bits finds on a GPU what it finds on the host") {
  if (!HaveDevices(1)) return;
  for (const bool blocks : {false, true}) {
    const Quantized data = MakeQuantized(blocks);
    const std::vector<BitsTally> got = TalliesOf(OnGpu(), data), want = TalliesOf(OnHost(), data);
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(blocks, i);
      CHECK(got[i].wrong == want[i].wrong);
      CHECK(got[i].count == want[i].count);
      CHECK(got[i].largest == want[i].largest);
    }
    CHECK(want[blocks ? 1 : 0].wrong > 0);
    if (!blocks) CHECK(want[0].wrong * 100 < want[0].count);
  }
}

}  // namespace cppool::kernels::test
