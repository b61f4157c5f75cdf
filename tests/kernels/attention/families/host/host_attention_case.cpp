#include "tests/kernels/attention/families/host/host_attention_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "kernels/attention/families/host/family.h"
#include "kernels/attention/tensor_ops/host/tensor_ops.h"
#include "kernels/numerics/half.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/host/host_rank.h"
#include "tests/kernels/attention/families/host/naive_attention.h"
#include "tests/kernels/load_element.h"
#include "tests/sanitized.h"

namespace cppool::test {
namespace {

using namespace kernels;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint16_t kNanBits = 0x7fff;  // in both types
constexpr std::int64_t kFewPairs = 64 * 64;
constexpr float kBefore = 0.25f;  // initial value of dbias, to which the kernel adds

Dtype DtypeOf(const KernelShape& shape) { return shape.dtypes.q; }  // of all tensors

KernelRequest RequestFor(const Problem& problem) {
  KernelRequest request;
  request.shape = problem.shape;
  request.bias = problem.bias;
  request.max_logit = true;
  return request;
}

struct Half {
  Dtype dtype;
  std::vector<std::uint16_t> bits;

  // The tensor from an element on.
  TensorOut At(std::size_t element) { return {bits.data() + element, dtype}; }

  std::vector<double> Numbers() const {
    std::vector<double> numbers(bits.size());
    for (std::size_t i = 0; i < bits.size(); ++i) {
      numbers[i] = LoadElement(dtype, bits.data(), static_cast<std::int64_t>(i));
    }
    return numbers;
  }
};

Half RandomHalf(Dtype dtype, std::size_t count, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(-1.5, 1.5);
  Half half{dtype, std::vector<std::uint16_t>(count)};
  for (std::size_t i = 0; i < count; ++i) {
    StoreElement(dtype, half.bits.data(), static_cast<std::int64_t>(i), uniform(random));
  }
  return half;
}

std::vector<float> Nans(std::size_t count) { return std::vector<float>(count, kNan); }

Half Poisoned(Dtype dtype, std::size_t count) { return {dtype, std::vector<std::uint16_t>(count, kNanBits)}; }

// Half a unit in the last place of 1.
double UnitOf(Dtype dtype) { return dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11; }

// Checks that there is no NaN, then the RMS error relative to the reference's RMS, then the largest error.
void CheckClose(const std::string& name, Dtype dtype, const std::vector<double>& got,
                const std::vector<double>& want) {
  INFO(name);
  REQUIRE(got.size() == want.size());
  double error = 0, size = 0, largest_error = 0, largest = 0;
  std::size_t nans = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    nans += std::isnan(got[i]) ? 1 : 0;
    const double difference = std::abs(got[i] - want[i]);
    error += difference * difference;
    size += want[i] * want[i];
    largest_error = std::max(largest_error, difference);
    largest = std::max(largest, std::abs(want[i]));
  }
  REQUIRE(nans == 0);
  const double unit = UnitOf(dtype);
  // If a query sees one key, its gradients are differences of equal numbers, and the reference is zero.
  const double floor = 0.05 * unit;
  CHECK(std::sqrt(error) <=
        1.5 * unit * std::sqrt(size) + floor * std::sqrt(static_cast<double>(want.size())));
  CHECK(largest_error <= 4 * unit * largest + 4 * floor);
}

// The first row of a part in tensors that hold the parts one after another.
std::size_t RowsBefore(const std::vector<Layout>& parts, std::size_t part) {
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < part; ++i) rows += parts[i].rows;
  return static_cast<std::size_t>(rows);
}

// The strides of a bias tensor, and the index of an element (sequence, head, query, key).
struct BiasPlaces {
  // `gap` unused elements follow each row, and more follow each head and sequence.
  BiasPlaces(const Problem& problem, BiasShape shape, std::int64_t gap) {
    const std::int64_t rows =
        shape.queries ? *std::max_element(problem.length_q.begin(), problem.length_q.end()) : 1;
    columns = *std::max_element(problem.length_kv.begin(), problem.length_kv.end()) + gap;
    const std::int64_t head = rows * columns + 2 * gap;
    const std::int64_t sequence = (shape.heads ? problem.shape.heads : 1) * head + 3 * gap;
    query_stride = shape.queries ? columns : 0;
    head_stride = shape.heads ? head : 0;
    batch_stride = shape.batch ? sequence : 0;
    size = static_cast<std::size_t>(sequence) * (shape.batch ? problem.length_q.size() : 1);
  }
  std::size_t Index(std::size_t head, const Token& query, std::int64_t key) const {
    return static_cast<std::size_t>(query.sequence * batch_stride +
                                    static_cast<std::int64_t>(head) * head_stride +
                                    query.position * query_stride + key);
  }
  std::int64_t columns, batch_stride, head_stride, query_stride;
  std::size_t size;
};

class Run {
 public:
  Run(const Problem& problem, unsigned seed) : problem_(problem), random_(seed) {
    if (problem_.bias == BiasType::kPostScale) MakeBias();
    std::uniform_real_distribution<float> uniform(-2, 2);
    if (problem_.bias == BiasType::kAlibi) {
      slopes_.resize(heads_);
      for (float& slope : slopes_) slope = std::abs(uniform(random_)) / 8;
    }
    if (problem_.offset) {
      offset_.resize(heads_);
      // About as large as a row's lse, so that it is a large part of the denominator.
      for (float& offset : offset_) offset = uniform(random_) + 4;
    }
    const KernelRequest request = RequestFor(problem_);
    kernel_->Load(request);
    rows_ = ops_->Rows(query_, stream());
    for (const Layout& queries : problem_.query_parts) {
      for (const Layout& keys : problem_.key_parts) {
        plans_.push_back(kernel_->Plan(request, queries, keys, problem_.bands, stream()));
      }
    }
  }

  void Forward() {
    ops_->Fill(max_logit_.data(), -std::numeric_limits<float>::infinity(), shape_.heads, stream());
    ForEachCall([&](std::size_t i, std::size_t j) {
      ForwardArgs args;
      args.plan = PlanOf(i, j);
      args.q = q_.At(QueryRow(i) * dim_);
      args.k = k_.At(KeyRow(j) * dim_);
      args.v = v_.At(KeyRow(j) * dim_v_);
      args.accumulator = key_parts() == 1 ? nullptr : out_sum_.data() + QueryRow(i) * dim_v_;
      args.out = out_.At(QueryRow(i) * dim_v_);
      args.lse = lse_.data() + QueryRow(i);
      args.bias = Bias();
      args.softmax_offset = problem_.offset ? offset_.data() : nullptr;
      args.max_logit = max_logit_.data();
      args.first = j == 0;
      args.last = j + 1 == key_parts();
      kernel_->Forward(shape_, args, stream());
    });
    ops_->Delta(query_.rows * shape_.heads, shape_.dim_v, out_.At(0), dout_.At(0), delta_.data(), stream());
    rank_.Synchronize();
  }

  void Backward() {
    if (problem_.offset) {
      ops_->AddOffset(query_.rows, shape_.heads, lse_.data(), offset_.data(), total_.data(), stream());
    }
    if (problem_.offset) {
      ops_->OffsetGradient(*rows_, shape_.heads, total_.data(), delta_.data(), offset_.data(),
                           d_offset_.data(), stream());
    }
    const BiasGradient d_bias{d_bias_.data(), d_bias_places_.batch_stride, d_bias_places_.head_stride,
                              d_bias_places_.query_stride};
    ops_->Fill(d_bias_.data(), kBefore, static_cast<std::int64_t>(d_bias_.size()), stream());
    ForEachCall([&](std::size_t i, std::size_t j) {
      BackwardArgs args = BackwardArgsOf(i, j);
      args.query = {true, j == 0, j + 1 == key_parts()};
      args.key = {true, i == 0, i + 1 == query_parts()};
      kernel_->Backward(shape_, args, stream());
      if (problem_.bias == BiasType::kPostScale) kernel_->BackwardBias(shape_, args, d_bias, stream());
    });
    rank_.Synchronize();
  }

  std::int64_t Pairs() const { return query_.rows * key_.rows; }

  void Check() {
    NaiveProblem naive;
    naive.shape = shape_;
    naive.query = query_;
    naive.key = key_;
    naive.bands = problem_.bands;
    naive.q = q_.Numbers();
    naive.k = k_.Numbers();
    naive.v = v_.Numbers();
    naive.dout = dout_.Numbers();
    if (problem_.bias == BiasType::kPostScale) {
      naive.bias = [this](std::size_t head, const Token& query, const Token& key) {
        return LoadElement(DtypeOf(shape_), bias_.bits.data(),
                           static_cast<std::int64_t>(bias_places_.Index(head, query, key.position)));
      };
    } else if (problem_.bias == BiasType::kAlibi) {
      naive.bias = [this](std::size_t head, const Token& query, const Token& key) {
        const Band band = problem_.bands[static_cast<std::size_t>(query.sequence)];
        return -double{slopes_[head]} * std::abs(key.position - query.position - band.diagonal);
      };
    }
    naive.offset.assign(offset_.begin(), offset_.end());
    const NaiveResult want = NaiveAttention(naive);
    CheckOutput("out", query_, out_, want.out);
    CheckOutput("dq", query_, dq_, want.dq);
    CheckOutput("dk", key_, dk_, want.dk);
    CheckOutput("dv", key_, dv_, want.dv);
    CheckStatistics(want);
    if (problem_.offset) CheckOffsetGradient(want);
    if (problem_.bias == BiasType::kPostScale) CheckBiasGradient(want);
  }

 private:
  cppool_stream stream() const { return rank_.stream(); }
  std::size_t query_parts() const { return problem_.query_parts.size(); }
  std::size_t key_parts() const { return problem_.key_parts.size(); }
  const BlockPlan* PlanOf(std::size_t i, std::size_t j) const { return plans_[i * key_parts() + j].get(); }
  std::size_t QueryRow(std::size_t part) const { return RowsBefore(problem_.query_parts, part) * heads_; }
  std::size_t KeyRow(std::size_t part) const { return RowsBefore(problem_.key_parts, part) * kv_heads_; }

  template <typename Function>
  void ForEachCall(Function&& call) {
    for (std::size_t i = 0; i < query_parts(); ++i) {
      for (std::size_t j = 0; j < key_parts(); ++j) call(i, j);
    }
  }

  // Random values; NaN in rows without a token.
  Half Input(const Layout& layout, std::size_t row_size) {
    const std::vector<Token> tokens = TokensOf(layout);
    Half half = RandomHalf(DtypeOf(shape_), tokens.size() * row_size, random_);
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      if (tokens[row].sequence < 0) std::fill_n(&half.bits[row * row_size], row_size, kNanBits);
    }
    return half;
  }

  // Random values; NaN for pairs that do not exist.
  void MakeBias() {
    bias_ = Poisoned(DtypeOf(shape_), bias_places_.size);
    const Half numbers = RandomHalf(DtypeOf(shape_), bias_places_.size, random_);
    for (std::size_t h = 0; h < heads_; ++h) {
      for (std::int32_t b = 0; b < static_cast<std::int32_t>(problem_.length_q.size()); ++b) {
        for (std::int32_t i = 0; i < problem_.length_q[static_cast<std::size_t>(b)]; ++i) {
          for (std::int64_t j = 0; j < problem_.length_kv[static_cast<std::size_t>(b)]; ++j) {
            const std::size_t at = bias_places_.Index(h, {b, i}, j);
            bias_.bits[at] = numbers.bits[at];
          }
        }
      }
    }
  }

  BiasArgs Bias() {
    BiasArgs bias;
    if (problem_.bias == BiasType::kPostScale) {
      bias.tensor = bias_.At(0);
      bias.batch_stride = bias_places_.batch_stride;
      bias.head_stride = bias_places_.head_stride;
      bias.query_stride = bias_places_.query_stride;
    }
    if (problem_.bias == BiasType::kAlibi) bias.alibi_slopes = slopes_.data();
    return bias;
  }

  BackwardArgs BackwardArgsOf(std::size_t i, std::size_t j) {
    BackwardArgs args;
    args.plan = PlanOf(i, j);
    args.q = q_.At(QueryRow(i) * dim_);
    args.k = k_.At(KeyRow(j) * dim_);
    args.v = v_.At(KeyRow(j) * dim_v_);
    args.dout = dout_.At(QueryRow(i) * dim_v_);
    args.lse = (problem_.offset ? total_ : lse_).data() + QueryRow(i);
    args.bias = Bias();
    args.delta = delta_.data() + QueryRow(i);
    args.dq_accumulator = dq_sum_.data() + QueryRow(i) * dim_;
    args.dq = dq_.At(QueryRow(i) * dim_);
    args.dk_accumulator = dk_sum_.data() + KeyRow(j) * dim_;
    args.dv_accumulator = dv_sum_.data() + KeyRow(j) * dim_v_;
    args.dk = dk_.At(KeyRow(j) * dim_);
    args.dv = dv_.At(KeyRow(j) * dim_v_);
    return args;
  }

  void CheckOutput(const std::string& name, const Layout& layout, const Half& got,
                   const std::vector<double>& want) {
    const std::vector<Token> tokens = TokensOf(layout);
    const std::size_t row_size = got.bits.size() / tokens.size();
    std::vector<double> numbers = got.Numbers();
    std::size_t written = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (tokens[i / row_size].sequence >= 0) continue;
      written += got.bits[i] == kNanBits ? 0 : 1;
      numbers[i] = 0;
    }
    INFO(name << ": " << written << " elements written where there is no token");
    CHECK(written == 0);
    CheckClose(name, DtypeOf(shape_), numbers, want);
  }

  static bool SameLogit(float got, double want) {
    return std::isinf(want) ? got == want : std::abs(got - want) < 2e-5;
  }

  void CheckStatistics(const NaiveResult& want) {
    const std::vector<Token> tokens = TokensOf(query_);
    std::size_t wrong = 0, masked = 0, not_zero = 0, written = 0;
    const auto zero = [](std::uint16_t bits) { return (bits & 0x7fff) == 0; };
    for (std::size_t i = 0; i < lse_.size(); ++i) {
      if (tokens[i / heads_].sequence < 0) {
        written += std::isnan(lse_[i]) ? 0 : 1;
        continue;
      }
      wrong += SameLogit(lse_[i], want.lse[i]) ? 0 : 1;
      if (!std::isinf(want.lse[i])) continue;
      // For a query that sees no key, out and dq are exactly zero.
      ++masked;
      not_zero += std::all_of(&out_.bits[i * dim_v_], &out_.bits[i * dim_v_] + dim_v_, zero) ? 0 : 1;
      not_zero += std::all_of(&dq_.bits[i * dim_], &dq_.bits[i * dim_] + dim_, zero) ? 0 : 1;
    }
    INFO("of " << lse_.size() << " rows, " << masked << " see no key");
    CHECK(wrong == 0);
    CHECK(not_zero == 0);
    CHECK(written == 0);
    for (std::size_t h = 0; h < heads_; ++h) {
      INFO("max_logit of head " << h << ": " << max_logit_[h] << ", not " << want.max_logit[h]);
      CHECK(SameLogit(max_logit_[h], want.max_logit[h]));
    }
  }

  void CheckOffsetGradient(const NaiveResult& want) {
    for (std::size_t h = 0; h < heads_; ++h) {
      INFO("gradient of offset " << h << ": " << d_offset_[h] << ", not " << want.d_offset[h]);
      // The error comes from the rounding of out, from which delta is computed.
      CHECK(std::abs(d_offset_[h] - want.d_offset[h]) <= UnitOf(DtypeOf(shape_)) * want.d_offset_size[h]);
    }
  }

  void CheckBiasGradient(const NaiveResult& result) {
    const std::vector<Token> queries = TokensOf(query_), keys = TokensOf(key_);
    std::vector<double> want(d_bias_.size(), 0);
    for (std::size_t h = 0; h < heads_; ++h) {
      for (std::size_t i = 0; i < queries.size(); ++i) {
        for (std::size_t j = 0; j < keys.size(); ++j) {
          if (!Sees(queries[i], keys[j], problem_.bands)) continue;
          want[d_bias_places_.Index(h, queries[i], keys[j].position)] +=
              result.d_logit[(h * queries.size() + i) * keys.size() + j];
        }
      }
    }
    std::vector<double> got(d_bias_.begin(), d_bias_.end());
    for (double& x : got) x -= kBefore;
    CheckClose("dbias", DtypeOf(shape_), got, want);
  }

  const Problem& problem_;
  const KernelShape& shape_ = problem_.shape;
  const std::size_t heads_ = static_cast<std::size_t>(shape_.heads);
  const std::size_t kv_heads_ = static_cast<std::size_t>(shape_.kv_heads);
  const std::size_t dim_ = static_cast<std::size_t>(shape_.dim_qk);
  const std::size_t dim_v_ = static_cast<std::size_t>(shape_.dim_v);
  const Layout query_ = Concatenate(problem_.query_parts), key_ = Concatenate(problem_.key_parts);
  std::mt19937 random_;

  Half q_ = Input(query_, heads_*dim_), dout_ = Input(query_, heads_*dim_v_);
  Half k_ = Input(key_, kv_heads_*dim_), v_ = Input(key_, kv_heads_*dim_v_);
  const BiasPlaces bias_places_{problem_, problem_.bias_shape, 3};
  // If all queries share the bias, its gradient is summed over the queries of each sequence and head.
  const BiasPlaces d_bias_places_ =
      problem_.bias_shape.queries ? bias_places_
                                  : BiasPlaces(problem_, {.batch = true, .heads = true, .queries = false}, 0);
  Half bias_;
  std::vector<float> slopes_, offset_;

  Half out_ = Poisoned(DtypeOf(shape_), dout_.bits.size()), dq_ = Poisoned(DtypeOf(shape_), q_.bits.size());
  Half dk_ = Poisoned(DtypeOf(shape_), k_.bits.size()), dv_ = Poisoned(DtypeOf(shape_), v_.bits.size());
  std::vector<float> out_sum_ = Nans(out_.bits.size()), dq_sum_ = Nans(dq_.bits.size());
  std::vector<float> dk_sum_ = Nans(dk_.bits.size()), dv_sum_ = Nans(dv_.bits.size());
  std::vector<float> lse_ = Nans(static_cast<std::size_t>(query_.rows) * heads_), total_ = lse_,
                     delta_ = lse_;
  std::vector<float> max_logit_ = Nans(heads_), d_offset_ = Nans(heads_);
  std::vector<float> d_bias_ = Nans(d_bias_places_.size);

  const HostRank rank_;
  const std::unique_ptr<AttentionKernel> kernel_ = host::HostFamily().Open(rank_.seam());
  const std::unique_ptr<TensorOps> ops_ = host::MakeTensorOps(rank_.seam());
  std::unique_ptr<TokenRows> rows_;
  std::vector<std::unique_ptr<BlockPlan>> plans_;
};

}  // namespace

KernelShape Shape(Dtype dtype, int dim_qk, int dim_v, int heads, int kv_heads) {
  KernelShape shape;
  shape.dtypes = TensorDtypes(dtype);
  shape.dim_qk = dim_qk;
  shape.dim_v = dim_v;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.group = heads / kv_heads;
  return shape;
}

AttentionSpec Spec(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_kv, AttnMaskType mask,
                   std::int64_t left, std::int64_t right, QkvFormat format) {
  AttentionSpec spec;
  spec.batch = batch;
  spec.seqlen_q = seqlen_q;
  spec.seqlen_kv = seqlen_kv;
  spec.mask = mask;
  spec.window_left = left;
  spec.window_right = right;
  spec.format = format;
  spec.queries = UniformSequences(batch, seqlen_q);
  spec.keys = UniformSequences(batch, seqlen_kv);
  return spec;
}

Problem MakeProblem(KernelShape shape, const AttentionSpec& spec, int query_parts, int key_parts) {
  shape.scale = 1 / std::sqrt(static_cast<float>(shape.dim_qk));
  Problem problem;
  problem.shape = shape;
  problem.length_q = spec.queries.length;
  problem.length_kv = spec.keys.length;
  for (int r = 0; r < query_parts; ++r) {
    problem.query_parts.push_back(RankLayout(spec.format, spec.queries, query_parts, r));
  }
  for (int r = 0; r < key_parts; ++r) {
    problem.key_parts.push_back(RankLayout(spec.format, spec.keys, key_parts, r));
  }
  for (std::size_t i = 0; i < problem.length_q.size(); ++i) {
    problem.bands.push_back(BandOf(spec, problem.length_q[i], problem.length_kv[i]));
  }
  return problem;
}

void RunAndCheck(const Problem& problem, unsigned seed) {
  Run run(problem, seed);
  run.Forward();
  run.Backward();
  // A sanitizer is for the addresses in the kernels. Their values are compared where there is none: the
  // reference would take most of the time.
  if (!kSanitized || run.Pairs() <= kFewPairs) run.Check();
}

}  // namespace cppool::test
