// The attention kernels on a GPU against fp64 on the host: every head dim and dtype, bands, ragged lengths, head maps, layouts, and
// several calls in place of one.
#include <cmath>

#include "catch.h"
#include "reference.h"

namespace cppool::kernels::testing {
namespace {

constexpr Band kCausal{-kOpen, 0};
constexpr Band kAll{-kOpen, kOpen};

struct Dims {
  int qk, v;
};
constexpr Dims kDims[] = {{64, 64}, {128, 128}, {192, 128}, {128, 64}, {256, 256}};

KernelShape Shape(Dims dims, Dtype dtype, int heads, int kv_heads) {
  KernelShape shape;
  shape.dtype = dtype;
  shape.dim_qk = dims.qk;
  shape.dim_v = dims.v;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.group = heads / kv_heads;
  shape.scale = 1 / std::sqrt(static_cast<float>(dims.qk));
  return shape;
}

Problem Global(const KernelShape& shape, QkvFormat format, std::int64_t batch, std::int64_t seqlen_q,
               std::int64_t seqlen_kv, Band band) {
  return {shape, GlobalLayout(format, batch, seqlen_q), GlobalLayout(format, batch, seqlen_kv),
          std::vector<Band>(static_cast<std::size_t>(batch), band)};
}

// `layout` in parts of which each has every `count`th stretch of 48 tokens.
std::vector<Layout> Parts(const Layout& layout, std::size_t count) {
  std::vector<Layout> parts(count, {{}, layout.rows, layout.row_step});
  std::size_t next = 0;
  for (const Segment& segment : layout.segments) {
    for (std::int32_t at = 0; at < segment.length; at += 48) {
      parts[next++ % count].segments.push_back({segment.sequence, segment.position + at,
                                                std::min(48, segment.length - at),
                                                segment.row + std::int64_t{at} * layout.row_step});
    }
  }
  return parts;
}

// Forward and backward on the device. The keys are worked off in the given parts for out and dq, the queries for dk and dv.
Outputs Run(const Device& device, const Problem& problem, const Inputs& inputs,
            const std::vector<Layout>& key_parts, const std::vector<Layout>& query_parts) {
  const KernelShape& shape = problem.shape;
  AttentionKernels& kernels = device.kernels();
  kernels.Load(shape, true);
  const std::size_t rows_q = static_cast<std::size_t>(problem.query.rows),
                    rows_kv = static_cast<std::size_t>(problem.key.rows);
  const std::size_t states = rows_q * static_cast<std::size_t>(shape.heads);
  const Buffer q = ToDevice(device, inputs.q, shape.dtype), k = ToDevice(device, inputs.k, shape.dtype);
  const Buffer v = ToDevice(device, inputs.v, shape.dtype), dout = ToDevice(device, inputs.dout, shape.dtype);
  const Buffer out = Poisoned(device, inputs.dout.size(), shape.dtype),
               lse = Poisoned(device, states, Dtype::kFp32);
  const Buffer dq = Poisoned(device, inputs.q.size(), shape.dtype),
               dk = Poisoned(device, inputs.k.size(), shape.dtype);
  const Buffer dv = Poisoned(device, inputs.v.size(), shape.dtype),
               delta = Poisoned(device, states, Dtype::kFp32);
  const Buffer out_sum = Poisoned(device, inputs.dout.size(), Dtype::kFp32);
  const Buffer dq_sum = Poisoned(device, inputs.q.size(), Dtype::kFp32),
               dk_sum = Poisoned(device, inputs.k.size(), Dtype::kFp32);
  const Buffer dv_sum = Poisoned(device, inputs.v.size(), Dtype::kFp32);

  std::vector<std::unique_ptr<BlockPlan>> plans;  // until the work is done
  for (std::size_t i = 0; i < key_parts.size(); ++i) {
    plans.push_back(kernels.Plan(shape, problem.query, key_parts[i], problem.bands, false, device.stream()));
    ForwardArgs args;
    args.plan = plans.back().get();
    args.q = q.get(), args.k = k.get(), args.v = v.get();
    args.accumulator = key_parts.size() > 1 ? out_sum.get<float>() : nullptr;
    args.out = out.get(), args.lse = lse.get<float>();
    args.first = i == 0, args.last = i + 1 == key_parts.size();
    kernels.Forward(shape, args, device.stream());
  }
  kernels.Delta(shape, problem.query.rows, out.get(), dout.get(), delta.get<float>(), device.stream());
  BackwardArgs args;
  args.q = q.get(), args.k = k.get(), args.v = v.get(), args.dout = dout.get();
  args.lse = lse.get<float>(), args.delta = delta.get<float>();
  args.dq_accumulator = dq_sum.get<float>(), args.dk_accumulator = dk_sum.get<float>(),
  args.dv_accumulator = dv_sum.get<float>();
  args.dq = dq.get(), args.dk = dk.get(), args.dv = dv.get();
  for (std::size_t i = 0; i < key_parts.size(); ++i) {
    plans.push_back(kernels.Plan(shape, problem.query, key_parts[i], problem.bands, true, device.stream()));
    args.plan = plans.back().get();
    args.first = i == 0, args.last = i + 1 == key_parts.size();
    kernels.BackwardQuery(shape, args, device.stream());
  }
  for (std::size_t i = 0; i < query_parts.size(); ++i) {
    plans.push_back(kernels.Plan(shape, query_parts[i], problem.key, problem.bands, true, device.stream()));
    args.plan = plans.back().get();
    args.first = i == 0, args.last = i + 1 == query_parts.size();
    kernels.BackwardKey(shape, args, device.stream());
  }
  device.Wait();
  (void)rows_kv;
  return {ToHost(device, out, inputs.dout.size(), shape.dtype), ToHost(device, lse, states, Dtype::kFp32),
          ToHost(device, dq, inputs.q.size(), shape.dtype), ToHost(device, dk, inputs.k.size(), shape.dtype),
          ToHost(device, dv, inputs.v.size(), shape.dtype)};
}

void Expect(const Outputs& got, const Outputs& want, Dtype dtype) {
  const double unit = dtype == Dtype::kBf16 ? 1.0 / 256 : 1.0 / 2048;
  CHECK(Difference(got.out, want.out, unit) == "");
  CHECK(Difference(got.lse, want.lse, 1e-5) == "");
  CHECK(Difference(got.dq, want.dq, 2 * unit) == "");
  CHECK(Difference(got.dk, want.dk, 2 * unit) == "");
  CHECK(Difference(got.dv, want.dv, 2 * unit) == "");
}

void RunAndExpect(const Device& device, const Problem& problem, std::size_t parts = 1) {
  const Inputs inputs = MakeInputs(problem, 7);
  const bool whole = parts == 1;
  const Outputs got =
      Run(device, problem, inputs, whole ? std::vector{problem.key} : Parts(problem.key, parts),
          whole ? std::vector{problem.query} : Parts(problem.query, parts));
  Expect(got, Reference(problem, inputs), problem.shape.dtype);
}

}  // namespace

TEST_CASE("attention on a GPU agrees with fp64 for every head dim and dtype") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  for (const Dims dims : kDims) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
      for (const Band band : {kAll, kCausal}) {
        CAPTURE(dims.qk, dims.v, static_cast<int>(dtype), band.high);
        RunAndExpect(device, Global(Shape(dims, dtype, 4, 2), QkvFormat::kBshd, 2, 150, 200, band));
        RunAndExpect(device, Global(Shape(dims, dtype, 2, 1), QkvFormat::kSbhd, 2, 150, 200, band), 3);
      }
    }
  }
}

TEST_CASE("attention on a GPU handles ragged lengths") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  for (const Dims dims : {Dims{64, 64}, Dims{128, 128}, Dims{256, 256}}) {
    for (const int seqlen_q : {1, 7, 63, 64, 129, 257}) {
      for (const int seqlen_kv : {1, 15, 64, 65, 191}) {
        CAPTURE(dims.qk, seqlen_q, seqlen_kv);
        RunAndExpect(device,
                     Global(Shape(dims, Dtype::kBf16, 2, 1), QkvFormat::kBshd, 1, seqlen_q, seqlen_kv, kAll));
        // Bottom-right: with more queries than keys, the first see nothing.
        const Band band{-kOpen, seqlen_kv - seqlen_q};
        RunAndExpect(device,
                     Global(Shape(dims, Dtype::kFp16, 2, 1), QkvFormat::kSbhd, 2, seqlen_q, seqlen_kv, band));
      }
    }
  }
}

TEST_CASE("attention on a GPU sees exactly the band") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  for (const Band band : {Band{-1, 0}, Band{0, 0}, Band{-70, 3}, Band{-kOpen, -100}, Band{40, kOpen},
                          Band{100, 90}, Band{500, 600}}) {
    for (const Dims dims : {Dims{128, 128}, Dims{64, 64}}) {
      CAPTURE(band.low, band.high, dims.qk);
      RunAndExpect(device, Global(Shape(dims, Dtype::kBf16, 2, 2), QkvFormat::kBshd, 2, 260, 300, band));
      RunAndExpect(device, Global(Shape(dims, Dtype::kBf16, 2, 2), QkvFormat::kBshd, 2, 260, 300, band), 4);
    }
  }
}

TEST_CASE("attention on a GPU maps query heads to key/value heads") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  KernelShape shape = Shape({128, 128}, Dtype::kBf16, 6, 1);  // MQA
  RunAndExpect(device, Global(shape, QkvFormat::kBshd, 1, 130, 130, kCausal));
  shape = Shape({128, 128}, Dtype::kBf16, 8, 8);  // MHA
  RunAndExpect(device, Global(shape, QkvFormat::kBshd, 1, 130, 130, kCausal));
  // The middle of 12 query heads in groups of 4: heads 6 to 9 read key/value heads 1 and 2.
  shape = Shape({128, 128}, Dtype::kBf16, 4, 2);
  shape.group = 4;
  shape.head0 = 6;
  shape.kv_head0 = 1;
  RunAndExpect(device, Global(shape, QkvFormat::kSbhd, 2, 130, 130, kCausal));
}

TEST_CASE("attention on a GPU works on the chunks that a rank holds") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
    for (int rank = 0; rank < 2; ++rank) {
      CAPTURE(static_cast<int>(format), rank);
      Problem problem{Shape({128, 128}, Dtype::kBf16, 2, 1),
                      RankLayout(format, 2, 400, 2, rank),
                      RankLayout(format, 2, 400, 2, 0),
                      {kCausal, kCausal}};
      RunAndExpect(device, problem);
      // Both ranks' keys in one buffer, as an all-gather leaves them.
      problem.key = Concatenate({RankLayout(format, 2, 400, 2, 0), RankLayout(format, 2, 400, 2, 1)});
      RunAndExpect(device, problem);
    }
  }
}

TEST_CASE("attention on a GPU leaves rows of no segment alone and tells sequences apart") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  Problem problem{Shape({128, 128}, Dtype::kBf16, 2, 1), {}, {}, {kCausal, kAll, Band{-20, 0}}};
  problem.query = {{{0, 0, 70, 5}, {1, 30, 1, 80}, {2, 0, 140, 90}}, 240, 1};
  problem.key = {{{0, 0, 50, 3}, {0, 50, 20, 60}, {2, 10, 150, 90}}, 250, 1};  // sequence 1 has no keys
  RunAndExpect(device, problem);
}

TEST_CASE("attention on a GPU gives the same bits twice") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  const Problem problem =
      Global(Shape({128, 128}, Dtype::kBf16, 8, 2), QkvFormat::kBshd, 2, 300, 300, kCausal);
  const Inputs inputs = MakeInputs(problem, 3);
  const Outputs first = Run(device, problem, inputs, {problem.key}, {problem.query});
  const Outputs second = Run(device, problem, inputs, {problem.key}, {problem.query});
  CHECK(first.out == second.out);
  CHECK(first.lse == second.lse);
  CHECK(first.dq == second.dq);
  CHECK(first.dk == second.dk);
  CHECK(first.dv == second.dv);
}

TEST_CASE("attention on a GPU does not overflow on large logits, nor hide NaN") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  Problem problem = Global(Shape({64, 64}, Dtype::kBf16, 1, 1), QkvFormat::kBshd, 1, 100, 300, kAll);
  problem.shape.scale = 20;
  Inputs inputs = MakeInputs(problem, 11);
  const Outputs got = Run(device, problem, inputs, {problem.key}, {problem.query});
  CHECK(Difference(got.out, Reference(problem, inputs).out, 1.0 / 128) == "");
  inputs.q[5 * 64] = std::nanf("");
  const Outputs poisoned = Run(device, problem, inputs, {problem.key}, {problem.query});
  CHECK(std::isnan(poisoned.out[5 * 64]));
  CHECK(std::isnan(poisoned.dq[5 * 64]));
  CHECK(!std::isnan(poisoned.out[6 * 64]));
}

TEST_CASE("head dims without a CUDA kernel are unsupported") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  try {
    device.kernels().Load(Shape({96, 96}, Dtype::kBf16, 2, 2), true);
    FAIL("loaded");
  } catch (const RuntimeError& error) {
    CHECK(error.status() == CPPOOL_UNSUPPORTED);
    CHECK(std::string(error.what()).find("96") != std::string::npos);
  }
}

}  // namespace cppool::kernels::testing
