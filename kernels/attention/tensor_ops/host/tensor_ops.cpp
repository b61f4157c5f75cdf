#include "kernels/attention/tensor_ops/host/tensor_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "kernels/attention/tensor_ops/host/token_rows.h"
#include "kernels/numerics/half.h"
#include "kernels/runtime.h"

namespace cppool::kernels::host {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// log(exp(a) + exp(b)); NaN if a or b is NaN.
float AddedLogarithms(float a, float b) {
  const float top = std::isnan(b) ? b : std::max(a, b);
  if (top == kMinusInfinity) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

void SumOffsetGradient(const HostTokenRows::Table& table, int heads, const float* total, const float* delta,
                       const float* offset, float* gradient) {
  // In fp64, because the sum has a term for each query, and the terms cancel.
  std::vector<double> sums(static_cast<std::size_t>(heads));
  ForEachRow(table, [&](std::int64_t row) {
    for (int h = 0; h < heads; ++h) {
      const std::int64_t at = row * heads + h;
      sums[static_cast<std::size_t>(h)] -= double{std::exp(offset[h] - total[at])} * double{delta[at]};
    }
  });
  for (const double sum : sums) *gradient++ = static_cast<float>(sum);
}

template <typename Part, typename Out>
void MergeVector(const MergeArgs& args, std::int64_t vector, int head) {
  const auto* part = static_cast<const typename Part::Bits*>(args.part.data) + vector * args.dim;
  float* const accumulator = args.accumulator ? args.accumulator + vector * args.dim : nullptr;
  const float part_lse = args.part_lse[vector], old_lse = args.first ? kMinusInfinity : args.lse[vector];
  const float lse = AddedLogarithms(old_lse, part_lse);
  float old_weight = old_lse == kMinusInfinity ? 0 : std::exp(old_lse - lse);
  float part_weight = part_lse == kMinusInfinity ? 0 : std::exp(part_lse - lse);
  args.lse[vector] = lse;
  if (args.last && args.softmax_offset && lse != kMinusInfinity) {
    const float share = 1 / (1 + std::exp(args.softmax_offset[head] - lse));
    old_weight *= share;
    part_weight *= share;
  }
  // A side with weight 0 is not read, because it may be uninitialized.
  for (int d = 0; d < args.dim; ++d) {
    const float value = (old_weight != 0 ? old_weight * accumulator[d] : 0.0f) +
                        (part_weight != 0 ? part_weight * Part::ToFloat(part[d]) : 0.0f);
    if (args.last) {
      static_cast<typename Out::Bits*>(args.out.data)[vector * args.dim + d] = Out::FromFloat(value);
    } else {
      accumulator[d] = value;
    }
  }
}

void Split(std::size_t element, std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
           const void* from, void* to) {
  const std::size_t head = element * static_cast<std::size_t>(dim);
  auto* out = static_cast<std::byte*>(to);
  for (const HeadRange& range : ranges) {
    const auto* in = static_cast<const std::byte*>(from) + static_cast<std::size_t>(range.begin) * head;
    const std::size_t bytes = static_cast<std::size_t>(range.count) * head;
    for (std::int64_t row = 0; row < rows;
         ++row, in += static_cast<std::size_t>(heads) * head, out += bytes) {
      std::memcpy(out, in, bytes);
    }
  }
}

template <typename From, typename To>
void MergeParts(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, const void* from,
                void* to) {
  std::vector<float> sums(static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim));
  std::vector<bool> held(static_cast<std::size_t>(heads));
  auto* out = static_cast<typename To::Bits*>(to);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::fill(held.begin(), held.end(), false);
    const auto* part = static_cast<const typename From::Bits*>(from);
    for (const HeadRange& range : ranges) {
      const auto* in = part + row * range.count * dim;
      for (int h = 0; h < range.count; ++h, in += dim) {
        const auto head = static_cast<std::size_t>(range.begin) + static_cast<std::size_t>(h);
        float* sum = sums.data() + head * static_cast<std::size_t>(dim);
        if (held[head]) {
          for (int d = 0; d < dim; ++d) sum[d] += From::ToFloat(in[d]);
        } else {
          for (int d = 0; d < dim; ++d) sum[d] = From::ToFloat(in[d]);
        }
        held[head] = true;
      }
      part += rows * range.count * dim;
    }
    for (const float sum : sums) *out++ = To::FromFloat(sum);
  }
}

template <typename A, typename B>
void DotVectors(std::int64_t vectors, int dim, const TensorRef& out, const TensorRef& dout, float* delta) {
  constexpr int kLanes = 8;  // partial sums, so that the loop over them is vectorized
  const auto* a = static_cast<const typename A::Bits*>(out.data);
  const auto* b = static_cast<const typename B::Bits*>(dout.data);
  for (std::int64_t i = 0; i < vectors; ++i, a += dim, b += dim) {
    float sums[kLanes] = {};
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane)
        sums[lane] += A::ToFloat(a[d + lane]) * B::ToFloat(b[d + lane]);
    }
    for (; d < dim; ++d) sums[0] += A::ToFloat(a[d]) * B::ToFloat(b[d]);
    float sum = 0;
    for (const float lane : sums) sum += lane;
    delta[i] = sum;
  }
}

void CheckRanges(int heads, const std::vector<HeadRange>& ranges, bool all) {
  std::vector<bool> held(static_cast<std::size_t>(heads));
  for (const HeadRange& range : ranges) {
    if (range.begin < 0 || range.count < 0 || range.begin + range.count > heads)
      Misused("heads out of range");
    std::fill_n(held.begin() + range.begin, range.count, true);
  }
  for (const bool one : held) {
    if (all && !one) Misused("a head is in no range");
  }
}

class HostTensorOps : public TensorOps {
 public:
  explicit HostTensorOps(cppool_runtime* runtime) : runtime_(runtime), fp8_(MakeFp8Ops(runtime)) {}

  void Load() override {}
  Fp8Ops& fp8() override { return *fp8_; }

  std::unique_ptr<TokenRows> Rows(const Layout& layout, cppool_stream stream) override {
    return std::make_unique<HostTokenRows>(runtime_, stream, RowTilesOf(layout), layout.row_step);
  }

  void SplitHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
                  void* to, cppool_stream stream) override {
    CheckRanges(heads, ranges, false);
    Enqueue(runtime_, stream, [=] { Split(SizeOf(from.dtype), rows, heads, dim, ranges, from.data, to); });
  }

  void MergeHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
                  TensorOut to, cppool_stream stream) override {
    CheckRanges(heads, ranges, true);
    Enqueue(runtime_, stream, [=] {
      DispatchDtype(from.dtype, [&](auto source) {
        DispatchDtype(to.dtype, [&](auto target) {
          MergeParts<decltype(source), decltype(target)>(rows, heads, dim, ranges, from.data, to.data);
        });
      });
    });
  }

  void Fill(float* to, float value, std::int64_t count, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] { std::fill_n(to, count, value); });
  }

  void Accumulate(TensorRef from, float* to, std::int64_t count, bool first, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      DispatchDtype(from.dtype, [&](auto type) {
        const auto* in = static_cast<const typename decltype(type)::Bits*>(from.data);
        if (first) {
          for (std::int64_t i = 0; i < count; ++i) to[i] = decltype(type)::ToFloat(in[i]);
        } else {
          for (std::int64_t i = 0; i < count; ++i) to[i] += decltype(type)::ToFloat(in[i]);
        }
      });
    });
  }

  void SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      std::fill_n(to, columns, 0.0f);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < columns; ++i) to[i] += from[row * columns + i];
      }
    });
  }

  void MaxRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < columns; ++i) {
          const float value = from[row * columns + i];
          if (value > to[i] || std::isnan(value)) to[i] = value;
        }
      }
    });
  }

  void AddStrided(const StridedSum& sum, cppool_stream stream) override {
    Enqueue(runtime_, stream, [sum] {
      DispatchDtype(sum.from.dtype, [&](auto type) {
        const auto* in = static_cast<const typename decltype(type)::Bits*>(sum.from.data);
        const auto at = [](const std::int64_t* strides, std::int64_t a, std::int64_t b, std::int64_t c) {
          return a * strides[0] + b * strides[1] + c * strides[2];
        };
        for (std::int64_t a = 0; a < sum.extent[0]; ++a) {
          for (std::int64_t b = 0; b < sum.extent[1]; ++b) {
            for (std::int64_t c = 0; c < sum.extent[2]; ++c) {
              const std::int64_t source = at(sum.from_strides, a, b, c), target = at(sum.to_strides, a, b, c);
              for (std::int64_t d = 0; d < sum.extent[3]; ++d)
                sum.to[target + d * sum.to_strides[3]] +=
                    decltype(type)::ToFloat(in[source + d * sum.from_strides[3]]);
            }
          }
        }
      });
    });
  }

  void CopyStrided(const StridedCopy& copy, cppool_stream stream) override {
    Enqueue(runtime_, stream, [copy] {
      const auto& [extent, from, from_strides, to, to_strides, factor] = copy;
      for (std::int64_t a = 0; a < extent[0]; ++a) {
        for (std::int64_t b = 0; b < extent[1]; ++b) {
          for (std::int64_t c = 0; c < extent[2]; ++c) {
            to[a * to_strides[0] + b * to_strides[1] + c * to_strides[2]] =
                factor * from[a * from_strides[0] + b * from_strides[1] + c * from_strides[2]];
          }
        }
      }
    });
  }

  void RoundSum(const std::vector<const float*>& parts, TensorOut to, std::int64_t count,
                cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      DispatchDtype(to.dtype, [&](auto type) {
        auto* out = static_cast<typename decltype(type)::Bits*>(to.data);
        for (std::int64_t i = 0; i < count; ++i) {
          float sum = parts[0][i];
          for (std::size_t part = 1; part < parts.size(); ++part) sum += parts[part][i];
          out[i] = decltype(type)::FromFloat(sum);
        }
      });
    });
  }

  void Merge(const MergeArgs& args, cppool_stream stream) override {
    Enqueue(runtime_, stream, [args, &table = TableOf(*args.rows)] {
      DispatchDtype(args.part.dtype, [&](auto part) {
        DispatchDtype(args.out.dtype, [&](auto out) {
          ForEachRow(table, [&](std::int64_t row) {
            for (int h = 0; h < args.heads; ++h)
              MergeVector<decltype(part), decltype(out)>(args, row * args.heads + h, h);
          });
        });
      });
    });
  }

  void Delta(std::int64_t vectors, int dim, TensorRef out, TensorRef dout, float* delta,
             cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      DispatchDtype(out.dtype, [&](auto a) {
        DispatchDtype(dout.dtype,
                      [&](auto b) { DotVectors<decltype(a), decltype(b)>(vectors, dim, out, dout, delta); });
      });
    });
  }

  void AddOffset(std::int64_t rows, int heads, const float* lse, const float* offset, float* total,
                 cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      for (std::int64_t i = 0; i < rows * heads; ++i) total[i] = AddedLogarithms(lse[i], offset[i % heads]);
    });
  }

  void OffsetGradient(const TokenRows& rows, int heads, const float* total, const float* delta,
                      const float* offset, float* gradient, cppool_stream stream) override {
    Enqueue(runtime_, stream,
            [=, &table = TableOf(rows)] { SumOffsetGradient(table, heads, total, delta, offset, gradient); });
  }

 private:
  cppool_runtime* runtime_;
  std::unique_ptr<Fp8Ops> fp8_;
};

}  // namespace

std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime) {
  return std::make_unique<HostTensorOps>(runtime);
}

}  // namespace cppool::kernels::host
