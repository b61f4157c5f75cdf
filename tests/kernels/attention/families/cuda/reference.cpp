#include "tests/kernels/attention/families/cuda/reference.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace cppool::kernels::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float Rounded(float x, Dtype dtype) {
  if (dtype == Dtype::kBf16) return __bfloat162float(__float2bfloat16_rn(x));
  if (dtype == Dtype::kFp16) return __half2float(__float2half_rn(x));
  return x;
}

std::size_t Size(std::int64_t count) { return static_cast<std::size_t>(count); }

struct Token {
  std::int64_t row;
  std::int32_t sequence;
  std::int32_t position;
};

std::vector<Token> Tokens(const Layout& layout) {
  std::vector<Token> tokens;
  for (const Segment& segment : layout.segments) {
    for (std::int32_t i = 0; i < segment.length; ++i) {
      tokens.push_back(
          {segment.row + std::int64_t{i} * layout.row_step, segment.sequence, segment.position + i});
    }
  }
  return tokens;
}

// A tensor with NaN in the rows that hold no token.
Values RandomRows(std::mt19937& random, const Layout& layout, int heads, int dim, Dtype dtype) {
  const std::size_t row = Size(std::int64_t{heads} * dim);
  Values values(Size(layout.rows) * row, kNan);
  const std::vector<Token> tokens = Tokens(layout);
  const Values drawn = Random(random, tokens.size() * row, dtype);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::copy_n(drawn.begin() + static_cast<std::ptrdiff_t>(i * row), row,
                values.begin() + static_cast<std::ptrdiff_t>(Size(tokens[i].row) * row));
  }
  return values;
}

double Dot(const float* a, const float* b, int dim) {
  double sum = 0;
  for (int i = 0; i < dim; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

void AddScaled(std::vector<double>& to, std::size_t at, double factor, const float* from, int dim) {
  for (int i = 0; i < dim; ++i) to[at + static_cast<std::size_t>(i)] += factor * from[i];
}

bool Visible(const Problem& problem, const Token& query, const Token& key) {
  const Band band = problem.bands[Size(query.sequence)];
  const std::int64_t apart = std::int64_t{key.position} - query.position;
  return key.sequence == query.sequence && apart >= band.low && apart <= band.high;
}

// The index of a pair's bias.
std::size_t BiasIndex(const BiasDims& dims, const Token& query, const Token& key, int head) {
  return Size(query.sequence * dims.batch_stride + head * dims.head_stride +
              query.position * dims.query_stride + key.position);
}

double BiasOf(const Problem& problem, const Inputs& inputs, const Token& query, const Token& key, int head) {
  if (problem.bias == BiasType::kPostScale)
    return inputs.bias[BiasIndex(BiasDims(problem), query, key, head)];
  if (problem.bias == BiasType::kNone) return 0;
  const double distance = key.position - query.position - problem.bands[Size(query.sequence)].diagonal;
  return -inputs.alibi_slopes[Size(head)] * std::abs(distance);
}

bool SameBits(const Values& a, const Values& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

Values ToFloats(const std::vector<double>& values) { return Values(values.begin(), values.end()); }

// Converts the rows of `layout` to floats; the other rows are NaN.
Values InRows(const std::vector<double>& values, const Layout& layout, std::size_t row_size) {
  Values to(values.size(), kNan);
  for (const Token& token : Tokens(layout)) {
    const std::size_t at = Size(token.row) * row_size;
    for (std::size_t i = at; i < at + row_size; ++i) to[i] = static_cast<float>(values[i]);
  }
  return to;
}

}  // namespace

Device::Device(const AttentionFamily& family)
    : backend_(CreateCudaBackend(1)),
      rank_(backend_->OpenRank(0)),
      kernels_(std::make_unique<RankKernels>(rank_->seam(), family)) {
  kernels_->ops->Load();
  rank_->BeginCase();
}

KernelRequest RequestOf(const Problem& problem) {
  KernelRequest request;
  request.shape = problem.shape;
  request.bias = problem.bias;
  if (problem.bias == BiasType::kPostScale) {
    const BiasDims dims(problem);
    request.bias_extent = {dims.batch_stride, dims.head_stride, dims.query_stride,
                           dims.queries,      dims.keys,        static_cast<std::int64_t>(dims.count())};
  }
  request.max_logit = problem.max_logit;
  request.deterministic = problem.deterministic;
  return request;
}

Device::~Device() {
  kernels_.reset();
  rank_.reset();
}

Values Random(std::mt19937& random, std::size_t count, Dtype dtype) {
  // Drawn from a table to save time, because tensors of attention_speed have millions of elements.
  std::normal_distribution<float> normal;
  Values table(std::size_t{1} << 16), values(count);
  for (float& value : table) value = Rounded(normal(random), dtype);
  for (float& value : values) value = table[random() >> 16];
  return values;
}

Buffer ToDevice(const Device& device, const Values& values, Dtype dtype) {
  cppool_runtime* rt = device.rt();
  const std::size_t bytes = values.size() * SizeOf(dtype);
  std::vector<std::byte> raw(bytes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == Dtype::kBf16)
      reinterpret_cast<__nv_bfloat16*>(raw.data())[i] = __float2bfloat16_rn(values[i]);
    if (dtype == Dtype::kFp16) reinterpret_cast<__half*>(raw.data())[i] = __float2half_rn(values[i]);
    if (dtype == Dtype::kFp32) reinterpret_cast<float*>(raw.data())[i] = values[i];
  }
  Buffer buffer(rt, bytes, device.stream());
  Check(rt, rt->copy(rt, buffer.get(), raw.data(), bytes, device.stream()));
  device.Wait();
  return buffer;
}

Buffer Poisoned(const Device& device, std::size_t count, Dtype dtype) {
  cppool_runtime* rt = device.rt();
  Buffer buffer(rt, count * SizeOf(dtype), device.stream());
  Check(rt, rt->fill(rt, buffer.get(), 0xff, buffer.bytes(), device.stream()));  // NaN in every dtype
  return buffer;
}

Values ToHost(const Device& device, const Buffer& buffer, std::size_t count, Dtype dtype) {
  cppool_runtime* rt = device.rt();
  std::vector<std::byte> raw(count * SizeOf(dtype));
  Check(rt, rt->copy(rt, raw.data(), buffer.get(), raw.size(), device.stream()));
  device.Wait();
  Values values(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (dtype == Dtype::kBf16)
      values[i] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(raw.data())[i]);
    if (dtype == Dtype::kFp16) values[i] = __half2float(reinterpret_cast<const __half*>(raw.data())[i]);
    if (dtype == Dtype::kFp32) values[i] = reinterpret_cast<const float*>(raw.data())[i];
  }
  return values;
}

BiasDims::BiasDims(const Problem& problem) {
  const auto positions = [](const Layout& layout) {
    std::int64_t most = 1;
    for (const Segment& s : layout.segments) most = std::max<std::int64_t>(most, s.position + s.length);
    return most;
  };
  const BiasShape shape = problem.bias_shape;
  batch = shape.batch ? static_cast<std::int64_t>(problem.bands.size()) : 1;
  heads = shape.heads ? problem.shape.heads : 1;
  queries = shape.queries ? positions(problem.query) : 1;
  keys = positions(problem.key);
  batch_stride = shape.batch ? heads * queries * keys : 0;
  head_stride = shape.heads ? queries * keys : 0;
  query_stride = shape.queries ? keys : 0;
}

bool Outputs::operator==(const Outputs& other) const {
  return SameBits(out, other.out) && SameBits(lse, other.lse) && SameBits(dq, other.dq) &&
         SameBits(dk, other.dk) && SameBits(dv, other.dv) && SameBits(max_logit, other.max_logit) &&
         SameBits(dbias, other.dbias) && SameBits(doffset, other.doffset);
}

Inputs MakeInputs(const Problem& problem, unsigned seed) {
  const KernelShape& shape = problem.shape;
  std::mt19937 random(seed);
  Inputs inputs;
  inputs.q = RandomRows(random, problem.query, shape.heads, shape.dim_qk, DtypeOf(shape));
  inputs.k = RandomRows(random, problem.key, shape.kv_heads, shape.dim_qk, DtypeOf(shape));
  inputs.v = RandomRows(random, problem.key, shape.kv_heads, shape.dim_v, DtypeOf(shape));
  inputs.dout = RandomRows(random, problem.query, shape.heads, shape.dim_v, DtypeOf(shape));
  if (problem.bias == BiasType::kPostScale) {
    const BiasDims dims(problem);
    const Values drawn = Random(random, dims.count(), DtypeOf(shape));
    inputs.bias.assign(drawn.size(), kNan);
    const std::vector<Token> keys = Tokens(problem.key);
    for (const Token& query : Tokens(problem.query)) {
      for (const Token& key : keys) {
        for (int head = 0; Visible(problem, query, key) && head < dims.heads; ++head) {
          const std::size_t at = BiasIndex(dims, query, key, head);
          inputs.bias[at] = drawn[at];
        }
      }
    }
  }
  if (problem.bias == BiasType::kAlibi) {
    for (int head = 0; head < shape.heads; ++head)
      inputs.alibi_slopes.push_back(std::exp2(-1.0f - static_cast<float>(head)));
  }
  if (problem.softmax_offset) inputs.softmax_offset = Random(random, Size(shape.heads), Dtype::kFp32);
  return inputs;
}

Outputs Reference(const Problem& problem, const Inputs& inputs) {
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  const KernelShape& shape = problem.shape;
  const std::size_t heads = Size(shape.heads), kv_heads = Size(shape.kv_heads);
  const std::size_t dim_qk = Size(shape.dim_qk), dim_v = Size(shape.dim_v);
  const BiasDims dims(problem);
  std::vector<double> out(inputs.dout.size()), lse(Size(problem.query.rows) * heads);
  std::vector<double> dq(inputs.q.size()), dk(inputs.k.size()), dv(inputs.v.size());
  std::vector<double> max_logit(problem.max_logit ? heads : 0, kMinusInfinity), dbias(inputs.bias.size()),
      doffset(inputs.softmax_offset.size());
  const std::vector<Token> queries = Tokens(problem.query), keys = Tokens(problem.key);
  std::vector<double> weight(keys.size());
  for (const Token& query : queries) {
    for (int head = 0; head < shape.heads; ++head) {
      const std::size_t kv_head = Size((shape.head0 + head) / shape.group - shape.kv_head0);
      const std::size_t q_at = Size(query.row) * heads + Size(head);
      const double offset = problem.softmax_offset ? inputs.softmax_offset[Size(head)] : kMinusInfinity;
      double most = kMinusInfinity;
      for (std::size_t j = 0; j < keys.size(); ++j) {
        weight[j] = kMinusInfinity;
        if (!Visible(problem, query, keys[j])) continue;
        const std::size_t kv_at = Size(keys[j].row) * kv_heads + kv_head;
        weight[j] = shape.scale * Dot(&inputs.q[q_at * dim_qk], &inputs.k[kv_at * dim_qk], shape.dim_qk) +
                    BiasOf(problem, inputs, query, keys[j], head);
        most = std::max(most, weight[j]);
      }
      if (problem.max_logit) max_logit[Size(head)] = std::max(max_logit[Size(head)], most);
      double sum = 0;
      for (double& w : weight) sum += w = std::isinf(w) ? 0 : std::exp(w - most);
      lse[q_at] = sum > 0 ? most + std::log(sum) : most;
      if (sum == 0) continue;
      const double of_offset = std::exp(offset - most);
      sum += of_offset;
      double delta = 0;
      for (std::size_t j = 0; j < keys.size(); ++j) {
        if (weight[j] == 0) continue;
        weight[j] /= sum;
        const std::size_t kv_at = Size(keys[j].row) * kv_heads + kv_head;
        AddScaled(out, q_at * dim_v, weight[j], &inputs.v[kv_at * dim_v], shape.dim_v);
        AddScaled(dv, kv_at * dim_v, weight[j], &inputs.dout[q_at * dim_v], shape.dim_v);
      }
      // delta of the rounded `out`, like the kernels'; otherwise single elements of dbias would differ too
      // much.
      for (std::size_t i = q_at * dim_v; i < (q_at + 1) * dim_v; ++i)
        delta += Rounded(static_cast<float>(out[i]), DtypeOf(shape)) * static_cast<double>(inputs.dout[i]);
      if (problem.softmax_offset) doffset[Size(head)] -= of_offset / sum * delta;
      for (std::size_t j = 0; j < keys.size(); ++j) {
        if (weight[j] == 0) continue;
        const std::size_t kv_at = Size(keys[j].row) * kv_heads + kv_head;
        const double dp = Dot(&inputs.dout[q_at * dim_v], &inputs.v[kv_at * dim_v], shape.dim_v);
        const double ds = weight[j] * (dp - delta);
        if (!dbias.empty()) dbias[BiasIndex(dims, query, keys[j], head)] += ds;
        AddScaled(dq, q_at * dim_qk, shape.scale * ds, &inputs.k[kv_at * dim_qk], shape.dim_qk);
        AddScaled(dk, kv_at * dim_qk, shape.scale * ds, &inputs.q[q_at * dim_qk], shape.dim_qk);
      }
    }
  }
  return {InRows(out, problem.query, heads * dim_v),
          InRows(lse, problem.query, heads),
          InRows(dq, problem.query, heads * dim_qk),
          InRows(dk, problem.key, kv_heads * dim_qk),
          InRows(dv, problem.key, kv_heads * dim_v),
          ToFloats(max_logit),
          ToFloats(dbias),
          ToFloats(doffset)};
}

std::string Difference(const Values& got, const Values& want, double relative, double outlier) {
  if (got.size() != want.size()) return "the sizes differ";
  double sum_sq_err = 0, sum_sq = 0, most = 0;
  std::size_t count = 0, most_at = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    if (std::isinf(want[i]) && got[i] == want[i]) continue;
    if (!std::isfinite(want[i]) || !std::isfinite(got[i])) {
      return "element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
             std::to_string(want[i]);
    }
    const double error = std::abs(static_cast<double>(got[i]) - want[i]);
    if (error > most) most = error, most_at = i;
    if (want[i] == 0) continue;  // a row that sees nothing
    sum_sq_err += error * error;
    sum_sq += static_cast<double>(want[i]) * want[i];
    ++count;
  }
  // The lower bound is for rows that see one key, whose dq and dk are 0 by cancellation.
  const double scale = std::max(count ? std::sqrt(sum_sq / static_cast<double>(count)) : 0, 0.01);
  const double rms = count ? std::sqrt(sum_sq_err / static_cast<double>(count)) : 0;
  if (rms <= relative * scale && most <= outlier * relative * scale) return {};
  return "RMS error " + std::to_string(rms) + ", greatest " + std::to_string(most) + " at element " +
         std::to_string(most_at) + ", RMS of the values " + std::to_string(scale);
}

}  // namespace cppool::kernels::test
