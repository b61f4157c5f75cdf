// The kernels that cast P and dS to fp8 on a GPU, beside those of the host, whose casts other tests hold:
// every head dim, scales and casts in blocks, several calls, and what a bias and an offset add. P next to a
// rounding boundary may fall to either side, and the running maximum that P is relative to follows the tiles:
// so out agrees as two right ones do, and gradients, whose P is exact, better.
#include <cmath>
#include <random>

#include "kernels/attention/problem/transposed.h"
#include "kernels/half.h"
#include "kernels/numerics/fp8.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"
#include "tests/kernels/attention/families/cuda/two_runtimes.h"

namespace cppool::kernels::test {
namespace {

// Values of the format's grid, times `unit`, of which bf16 holds all.
std::vector<std::uint16_t> Payloads(std::mt19937& random, std::int64_t count, bool e5m2, float unit) {
  std::normal_distribution<float> normal(0, 40);
  std::vector<std::uint16_t> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = normal(random);
    values.push_back(FloatToBF16((e5m2 ? E5M2ToFloat(FloatToE5M2(x)) : E4M3ToFloat(FloatToE4M3(x))) * unit));
  }
  return values;
}

struct Fp8Case {
  Dims dims{128, 128};
  bool blocks = false;  // the recipe mxfp8; else current
  Band band{-kOpen, 0};
  std::size_t parts = 1;
  bool bias = false, max_logit = false;
  QkvFormat format = QkvFormat::kBshd;
  std::int64_t keys = 203;
  bool native = false;  // products of payloads, where the family has kernels for them
};

struct Results {
  std::vector<float> out, lse, dq, dk, dv, dbias, max_logit, amax_ds;
};

class Fp8Attention {
 public:
  explicit Fp8Attention(const Fp8Case& c) : c_(c) {
    shape_ = Shape(c.dims, Dtype::kBf16, 4, 2);
    queries_ = GlobalLayout(c.format, UniformSequences(kBatch, kQueries));
    keys_ = GlobalLayout(c.format, UniformSequences(kBatch, c.keys));
    std::mt19937 random(11);
    const float unit = c.blocks ? 0x1p-6f : 1;
    const auto tensor = [&](std::int64_t rows, int heads, int dim, bool e5m2) {
      return Payloads(random, rows * heads * dim, e5m2 && !c.blocks, unit);
    };
    q_ = tensor(queries_.rows, 4, c.dims.qk, false);
    k_ = tensor(keys_.rows, 2, c.dims.qk, false);
    v_ = tensor(keys_.rows, 2, c.dims.v, false);
    v_of_dp_ = tensor(keys_.rows, 2, c.dims.v, false);
    dout_ = tensor(queries_.rows, 4, c.dims.v, true);
    // Others than the ones above, so that no product can read the wrong one.
    q_of_dk_ = tensor(queries_.rows, 4, c.dims.qk, false);
    k_of_dq_ = tensor(keys_.rows, 2, c.dims.qk, false);
    dout_of_dv_ = tensor(queries_.rows, 4, c.dims.v, false);
    std::normal_distribution<float> normal(0, 1);
    bias_.resize(static_cast<std::size_t>(4 * kQueries * c.keys));
    for (std::uint16_t& each : bias_) each = FloatToBF16(normal(random));
    delta_.resize(static_cast<std::size_t>(queries_.rows * 4));
    for (float& each : delta_) each = 0.1f * normal(random);
    scales_ = c.blocks ? std::vector<float>(4, 1.0f) : std::vector<float>{0.0151f, 0.026f, 0.0031f, 0.041f};
    shape_.scale = 1 / std::sqrt(static_cast<float>(c.dims.qk));
  }

  // `scale_ds`: dS is cast; else its amax is wanted.
  Results Run(const Side& side, bool scale_ds) const {
    KernelRequest request;
    request.shape = shape_;
    request.fp8 = c_.blocks ? Fp8Recipe{ScalingMode::kMxfp8, true, false, true, true}
                            : Fp8Recipe{ScalingMode::kCurrent, true, false, true, true};
    request.fp8->products = Fp8Products::kNative;
    const bool native = c_.native && !side.family().Refusal(request);
    if (!native) request.fp8->products = Fp8Products::kBf16;
    request.max_logit = c_.max_logit;
    if (c_.bias) {
      request.bias = BiasType::kPostScale;
      request.bias_extent = {0, kQueries * c_.keys, c_.keys, kQueries, c_.keys, 4 * kQueries * c_.keys};
    }
    side.kernel().Load(request);
    const Buffer q = side.Upload(q_), k = side.Upload(k_), v = side.Upload(v_),
                 v_of_dp = side.Upload(v_of_dp_), dout = side.Upload(dout_), q_of_dk = side.Upload(q_of_dk_),
                 k_of_dq = side.Upload(k_of_dq_), dout_of_dv = side.Upload(dout_of_dv_),
                 bias = side.Upload(bias_), delta = side.Upload(delta_), scales = side.Upload(scales_),
                 ds_scale = side.Upload(std::vector<float>{700.0f, 1 / 700.0f}),
                 amax = side.Upload(std::vector<float>{0});
    const Buffer max_logit = side.Upload(std::vector<float>(4, -INFINITY)),
                 dbias = side.Upload(std::vector<float>(bias_.size(), 0));
    const std::size_t states = delta_.size() * sizeof(float);
    const Buffer out = side.Poisoned(dout_.size() * 2), lse = side.Poisoned(states);
    const Buffer dq = side.Poisoned(q_.size() * 2), dk = side.Poisoned(k_.size() * 2),
                 dv = side.Poisoned(v_.size() * 2);
    const Buffer out_sum = side.Poisoned(dout_.size() * 4), dq_sum = side.Poisoned(q_.size() * 4),
                 dk_sum = side.Poisoned(k_.size() * 4), dv_sum = side.Poisoned(v_.size() * 4);
    const auto ref = [&](const Buffer& buffer, int scale) {
      return TensorRef{buffer.get(), Dtype::kBf16, c_.blocks ? nullptr : scales.get<float>() + scale};
    };
    BiasArgs of_bias;
    if (c_.bias) of_bias = {{bias.get(), Dtype::kBf16}, 0, kQueries * c_.keys, c_.keys, nullptr};
    const Buffer q8 = side.Upload(PayloadsOf(q_)), k8 = side.Upload(PayloadsOf(k_)),
                 v8 = side.Upload(PayloadsOf(v_));
    std::vector<Buffer> transposed;
    std::vector<std::unique_ptr<TokenRows>> slots;
    const std::vector<Band> bands(kBatch, c_.band);
    std::vector<std::unique_ptr<BlockPlan>> plans;
    const std::vector<Layout> key_parts = Parts(keys_), query_parts = Parts(queries_);
    for (std::size_t i = 0; i < key_parts.size(); ++i) {
      plans.push_back(side.kernel().Plan(request, queries_, key_parts[i], bands, side.stream()));
      ForwardArgs args;
      args.plan = plans.back().get();
      args.q = ref(q, 0), args.k = ref(k, 1), args.v = ref(v, 2);
      if (native) {
        slots.push_back(side.ops().fp8().Slots(key_parts[i], side.stream()));
        transposed.push_back(side.Poisoned(static_cast<std::size_t>(SlotsOf(key_parts[i]) * 2 * c_.dims.v)));
        side.ops().fp8().Transpose(*slots.back(), 2, c_.dims.v, {v8.get(), Dtype::kE4M3},
                                   transposed.back().get<std::uint8_t>(), side.stream());
        args.q = {q8.get(), Dtype::kE4M3, args.q.scale}, args.k = {k8.get(), Dtype::kE4M3, args.k.scale};
        args.v = {transposed.back().get(), Dtype::kE4M3, args.v.scale};
      }
      args.accumulator = out_sum.get<float>();
      args.out = {out.get(), Dtype::kBf16}, args.lse = lse.get<float>();
      args.bias = of_bias, args.max_logit = c_.max_logit ? max_logit.get<float>() : nullptr;
      args.first = i == 0, args.last = i + 1 == key_parts.size();
      args.p_scale = c_.blocks ? 256 : 448;
      side.kernel().Forward(shape_, args, side.stream());
    }
    BackwardArgs args;
    args.q = ref(q, 0), args.k = ref(k, 1), args.v = ref(c_.blocks ? v_of_dp : v, 2),
    args.dout = ref(dout, 3);
    if (c_.blocks)
      args.q_of_dk = ref(q_of_dk, 0), args.k_of_dq = ref(k_of_dq, 1), args.dout_of_dv = ref(dout_of_dv, 3);
    args.casts.p_scale = c_.blocks ? 256 : 448;
    args.casts.ds_blocks = c_.blocks;
    if (!c_.blocks && scale_ds) args.casts.ds_scale = ds_scale.get<float>();
    if (!c_.blocks && !scale_ds) args.casts.amax_ds = amax.get<float>();
    args.lse = lse.get<float>(), args.delta = delta.get<float>(), args.bias = of_bias;
    args.dq_accumulator = dq_sum.get<float>(), args.dk_accumulator = dk_sum.get<float>(),
    args.dv_accumulator = dv_sum.get<float>();
    args.dq = {dq.get(), Dtype::kBf16}, args.dk = {dk.get(), Dtype::kBf16},
    args.dv = {dv.get(), Dtype::kBf16};
    const bool apart = side.family().capabilities(request).gradients_apart;
    const Buffer workspace =
        side.Poisoned(side.family().WorkspaceBytes(request, queries_.rows, keys_.rows) + 1);
    args.workspace = workspace.get();
    for (std::size_t i = 0; i < key_parts.size(); ++i) {
      plans.push_back(side.kernel().Plan(request, queries_, key_parts[i], bands, side.stream()));
      args.plan = plans.back().get();
      args.query = {true, i == 0, i + 1 == key_parts.size()}, args.key.wanted = !apart;
      side.kernel().Backward(shape_, args, side.stream());
      if (c_.bias)
        side.kernel().BackwardBias(shape_, args, {dbias.get<float>(), 0, kQueries * c_.keys, c_.keys},
                                   side.stream());
    }
    for (std::size_t i = 0; apart && i < query_parts.size(); ++i) {
      plans.push_back(side.kernel().Plan(request, query_parts[i], keys_, bands, side.stream()));
      args.plan = plans.back().get();
      args.key = {true, i == 0, i + 1 == query_parts.size()}, args.query.wanted = false;
      side.kernel().Backward(shape_, args, side.stream());
    }
    side.Wait();
    return {Halves(side, out),
            side.Download<float>(lse),
            Halves(side, dq),
            Halves(side, dk),
            Halves(side, dv),
            side.Download<float>(dbias),
            side.Download<float>(max_logit),
            side.Download<float>(amax)};
  }

 private:
  static constexpr std::int64_t kBatch = 2, kQueries = 150;

  static std::vector<float> Halves(const Side& side, const Buffer& buffer) {
    std::vector<float> values;
    for (const std::uint16_t bits : side.Download<std::uint16_t>(buffer)) values.push_back(BF16ToFloat(bits));
    return values;
  }
  static std::vector<std::uint8_t> PayloadsOf(const std::vector<std::uint16_t>& values) {
    std::vector<std::uint8_t> payloads;
    for (const std::uint16_t bits : values) payloads.push_back(FloatToE4M3(BF16ToFloat(bits)));
    return payloads;
  }
  // Pieces of 72 tokens by turns, so that blocks of 32 are cut.
  std::vector<Layout> Parts(const Layout& layout) const {
    std::vector<Layout> parts(c_.parts, {{}, layout.rows, layout.row_step});
    std::size_t next = 0;
    for (const Segment& segment : layout.segments) {
      for (std::int32_t at = 0; at < segment.length; at += 72) {
        parts[next++ % c_.parts].segments.push_back({segment.sequence, segment.position + at,
                                                     std::min(72, segment.length - at),
                                                     segment.row + std::int64_t{at} * layout.row_step});
      }
    }
    return parts;
  }

  Fp8Case c_;
  KernelShape shape_;
  Layout queries_, keys_;
  std::vector<std::uint16_t> q_, k_, v_, v_of_dp_, dout_, q_of_dk_, k_of_dq_, dout_of_dv_, bias_;
  std::vector<float> delta_, scales_;
};

// RMS of the difference over that of `want`; infinite where one is NaN or infinite and the other is not.
double Apart(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) {
      size += std::isfinite(want[i]) ? double{want[i]} * want[i] : 0;
      continue;
    }
    const double apart = double{got[i]} - want[i];
    if (!std::isfinite(apart)) return INFINITY;
    error += apart * apart;
    size += double{want[i]} * want[i];
  }
  return error == 0 ? 0 : std::sqrt(error / size);
}

// Of lse and of the largest logits. Sums of products of payloads have 13 bits of their largest term: on an
// H200 lse was off by less than 5e-5, and the largest logits, which are smaller, by up to 8e-5 with head dims
// 64 and 128 and 2.8e-4 with 192 and 256.
double LseLimit(const Fp8Case& c) { return c.native ? 5e-5 : 1e-5; }
double LogitLimit(const Fp8Case& c) { return c.native ? 4e-4 : 1e-5; }

void ExpectAsOnHost(const Side& cuda, const Side& host, const Fp8Case& c, bool scale_ds = true) {
  CAPTURE(cuda.family().name(), c.dims.qk, c.dims.v, c.blocks, c.parts, c.bias, c.band.low, c.band.high,
          scale_ds);
  const Fp8Attention attention(c);
  const Results got = attention.Run(cuda, scale_ds), want = attention.Run(host, scale_ds);
  CHECK(Apart(got.out, want.out) < 0.035);
  CHECK(Apart(got.lse, want.lse) < LseLimit(c));
  CHECK(Apart(got.dq, want.dq) < 0.015);
  CHECK(Apart(got.dk, want.dk) < 0.015);
  CHECK(Apart(got.dv, want.dv) < 0.015);
  CHECK(Apart(got.dbias, want.dbias) < 1e-3);
  CHECK(Apart(got.max_logit, want.max_logit) < LogitLimit(c));
  CHECK(Apart(got.amax_ds, want.amax_ds) < 1e-4);
}

// The same casts and sums of the same products, in another order, and with fewer bits between promotions.
// With head dim 256 blocks have 128 keys instead of 80: the running maximum, by which P is cast, is another
// one.
void ExpectNativeAsValues(const Side& cuda, Fp8Case c) {
  CAPTURE(cuda.family().name(), c.dims.qk, c.dims.v, c.parts, c.band.low, c.band.high);
  c.native = false;
  const Results want = Fp8Attention(c).Run(cuda, true);
  c.native = true;
  const Results got = Fp8Attention(c).Run(cuda, true);
  CHECK(Apart(got.out, want.out) < (c.dims.qk == 256 ? 0.025 : 0.008));
  CHECK(Apart(got.lse, want.lse) < LseLimit(c));
  CHECK(Apart(got.max_logit, want.max_logit) < LogitLimit(c));
}

bool HasNative(const Side& cuda, Dims dims) {
  KernelRequest request;
  request.shape = Shape(dims, Dtype::kBf16, 4, 2);
  request.fp8 = Fp8Recipe{ScalingMode::kCurrent, true, false, true, true, Fp8Products::kNative};
  return !cuda.family().Refusal(request);
}

constexpr Band kCausal{-kOpen, 0}, kAll{-kOpen, kOpen}, kWindow{-70, 20};

}  // namespace

TEST_CASE("fp8 attention on a GPU agrees with the host's for every head dim, with scales and in blocks") {
  if (!HaveDevice()) return;
  const Side host = HostSide();
  for (const AttentionFamily* family : AttentionFamilies("cuda")) {
    const Side cuda(CreateCudaBackend(1), *family);
    for (const Dims dims : kDims) {
      for (const bool blocks : {false, true}) ExpectAsOnHost(cuda, host, {.dims = dims, .blocks = blocks});
    }
  }
}

TEST_CASE("fp8 attention on a GPU agrees with the host's for windows, several calls and a bias") {
  if (!HaveDevice()) return;
  const Side host = HostSide();
  for (const AttentionFamily* family : AttentionFamilies("cuda")) {
    const Side cuda(CreateCudaBackend(1), *family);
    for (const bool blocks : {false, true}) {
      for (const Band band : {kAll, kWindow})
        ExpectAsOnHost(cuda, host,
                       {.blocks = blocks, .band = band, .max_logit = true, .format = QkvFormat::kSbhd});
      ExpectAsOnHost(cuda, host, {.dims = {64, 64}, .blocks = blocks, .parts = 3});
      ExpectAsOnHost(cuda, host,
                     {.dims = {192, 128}, .blocks = blocks, .band = kAll, .parts = 2, .bias = true});
    }
  }
}

TEST_CASE("fp8 attention on a GPU finds the amax of dS that the host finds, for every head dim") {
  if (!HaveDevice()) return;
  const Side host = HostSide();
  for (const AttentionFamily* family : AttentionFamilies("cuda")) {
    const Side cuda(CreateCudaBackend(1), *family);
    for (const Dims dims : kDims) {
      ExpectAsOnHost(cuda, host, {.dims = dims}, false);
      ExpectAsOnHost(cuda, host, {.dims = dims, .band = kWindow, .parts = 2}, false);
      ExpectAsOnHost(cuda, host, {.dims = dims, .bias = true, .keys = 200}, false);
    }
  }
}

TEST_CASE(
    "fp8 attention on a GPU: products of payloads agree with the host's and with products of their values") {
  if (!HaveDevice()) return;
  const Side host = HostSide();
  bool any = false;
  for (const AttentionFamily* family : AttentionFamilies("cuda")) {
    const Side cuda(CreateCudaBackend(1), *family);
    for (const Dims dims : kDims) {
      if (!HasNative(cuda, dims)) continue;
      any = true;
      for (const Band band : {kCausal, kAll, kWindow}) {
        const Fp8Case c{.dims = dims, .band = band, .max_logit = true, .native = true};
        ExpectAsOnHost(cuda, host, c);
        ExpectNativeAsValues(cuda, c);
      }
      ExpectNativeAsValues(cuda, {.dims = dims, .parts = 3, .format = QkvFormat::kSbhd, .keys = 1371});
      ExpectNativeAsValues(cuda, {.dims = dims, .band = kAll, .parts = 2, .keys = 2500});
    }
  }
  if (!any) WARN("no GPU here multiplies payloads");
}

TEST_CASE("fp8 attention on a GPU multiplies payloads where it can and is faster so, or is told to") {
  if (!HaveDevice()) return;
  for (const AttentionFamily* family : AttentionFamilies("cuda")) {
    CAPTURE(family->name());
    for (const Dims dims : kDims) {
      for (const BiasType bias : {BiasType::kNone, BiasType::kPostScale}) {
        KernelRequest request;
        request.shape = Shape(dims, Dtype::kBf16, 4, 2);
        request.bias = bias;
        request.fp8 = Fp8Recipe{ScalingMode::kCurrent, true, false, true, true, Fp8Products::kNative};
        const bool can = !family->Refusal(request);
        const auto form_of = [&](Fp8Products products) {
          request.fp8->products = products;
          REQUIRE_FALSE(family->Refusal(request));
          const Capabilities capabilities = family->capabilities(request);
          const bool payloads = capabilities.forward_qk == Fp8Form::kPayload;
          CHECK((capabilities.fp8_sum_keys > 0) == payloads);
          CHECK(capabilities.fp8_sum_keys <= 256);  // with 512 the test below would fail
          return capabilities.forward_qk;
        };
        CHECK(form_of(Fp8Products::kAuto) == (can && dims.qk > 64 ? Fp8Form::kPayload : Fp8Form::kValues));
        CHECK(form_of(Fp8Products::kBf16) == Fp8Form::kValues);
      }
    }
  }
}

// Sums of 8-bit products lose what their mantissas have no bits for: a gain of 0.6035 is left over 32K keys
// of one sign without sums in fp32 in between, and 0.9935 with one every 512 keys.
TEST_CASE("fp8 attention on a GPU: products of payloads lose nothing over 32K keys of one sign") {
  if (!HaveDevice()) return;
  constexpr std::int64_t kQueries = 16, kKeys = 32768;
  for (const AttentionFamily* family : AttentionFamilies("cuda")) {
    const Side cuda(CreateCudaBackend(1), *family);
    for (const Dims dims : kDims) {
      if (!HasNative(cuda, dims)) continue;
      CAPTURE(dims.qk, dims.v);
      std::mt19937 random(5);
      std::normal_distribution<float> normal(0, 1);
      std::uniform_real_distribution<float> positive(1, 2);
      const auto payloads = [&](std::int64_t count, auto& of) {
        std::vector<std::uint8_t> bytes;
        for (std::int64_t i = 0; i < count; ++i) bytes.push_back(FloatToE4M3(of(random)));
        return bytes;
      };
      const std::vector<std::uint8_t> q = payloads(kQueries * dims.qk, normal),
                                      k = payloads(kKeys * dims.qk, normal),
                                      v = payloads(kKeys * dims.v, positive);
      KernelRequest request;
      request.shape = Shape(dims, Dtype::kBf16, 1, 1);
      request.shape.scale = 1 / std::sqrt(static_cast<float>(dims.qk));
      request.training = false;
      request.fp8 = Fp8Recipe{ScalingMode::kCurrent, true, false, true, true, Fp8Products::kNative};
      cuda.kernel().Load(request);
      const Layout queries = GlobalLayout(QkvFormat::kBshd, UniformSequences(1, kQueries)),
                   keys = GlobalLayout(QkvFormat::kBshd, UniformSequences(1, kKeys));
      const Buffer q8 = cuda.Upload(q), k8 = cuda.Upload(k), v8 = cuda.Upload(v),
                   transposed = cuda.Poisoned(static_cast<std::size_t>(SlotsOf(keys) * dims.v)),
                   out = cuda.Poisoned(static_cast<std::size_t>(kQueries * dims.v) * 2),
                   lse = cuda.Poisoned(kQueries * sizeof(float));
      const auto slots = cuda.ops().fp8().Slots(keys, cuda.stream());
      cuda.ops().fp8().Transpose(*slots, 1, dims.v, {v8.get(), Dtype::kE4M3}, transposed.get<std::uint8_t>(),
                                 cuda.stream());
      const auto plan = cuda.kernel().Plan(request, queries, keys, {kAll}, cuda.stream());
      ForwardArgs args;
      args.plan = plan.get();
      args.q = {q8.get(), Dtype::kE4M3}, args.k = {k8.get(), Dtype::kE4M3};
      args.v = {transposed.get(), Dtype::kE4M3};
      args.out = {out.get(), Dtype::kBf16}, args.lse = lse.get<float>(), args.p_scale = 448;
      cuda.kernel().Forward(request.shape, args, cuda.stream());
      const std::vector<std::uint16_t> got = cuda.Download<std::uint16_t>(out);
      double both = 0, square = 0;
      for (std::int64_t i = 0; i < kQueries; ++i) {
        std::vector<double> want(static_cast<std::size_t>(dims.v));
        double sum = 0;
        for (std::int64_t j = 0; j < kKeys; ++j) {
          double logit = 0;
          for (std::int64_t d = 0; d < dims.qk; ++d)
            logit += double{E4M3ToFloat(q[static_cast<std::size_t>(i * dims.qk + d)])} *
                     E4M3ToFloat(k[static_cast<std::size_t>(j * dims.qk + d)]);
          const double p = std::exp(logit * request.shape.scale);
          sum += p;
          for (std::int64_t d = 0; d < dims.v; ++d)
            want[static_cast<std::size_t>(d)] += p * E4M3ToFloat(v[static_cast<std::size_t>(j * dims.v + d)]);
        }
        for (std::int64_t d = 0; d < dims.v; ++d) {
          const double exact = want[static_cast<std::size_t>(d)] / sum;
          both += exact * BF16ToFloat(got[static_cast<std::size_t>(i * dims.v + d)]);
          square += exact * exact;
        }
      }
      CAPTURE(both / square);
      CHECK(std::abs(both / square - 1) < 0.005);  // false for NaN
    }
  }
}

TEST_CASE("fp8 attention on a GPU agrees with the host's with a bias of aligned rows for every head dim") {
  if (!HaveDevice()) return;
  const Side host = HostSide();
  for (const AttentionFamily* family : AttentionFamilies("cuda")) {
    const Side cuda(CreateCudaBackend(1), *family);
    for (const Dims dims : kDims) {
      for (const bool blocks : {false, true})
        ExpectAsOnHost(cuda, host, {.dims = dims, .blocks = blocks, .bias = true, .keys = 200});
    }
  }
}

}  // namespace cppool::kernels::test
