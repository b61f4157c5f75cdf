#include "kernels/attention/checks/host/check_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "kernels/attention/checks/digest.h"
#include "kernels/attention/checks/fp8_bits.h"
#include "kernels/error.h"
#include "kernels/numerics/half.h"
#include "kernels/numerics/philox.h"
#include "kernels/numerics/rounding.h"
#include "kernels/runtime.h"

namespace cppool::kernels {
namespace {

// Converts an input value to type T. The 16-bit types use the generator's own rounding, the same as in CUDA.
template <typename T>
typename T::Bits InputBits(float value) {
  if constexpr (T::kDtype == Dtype::kBf16) {
    return InputBf16(value);
  } else if constexpr (T::kDtype == Dtype::kFp16) {
    return InputFp16(value);
  } else {
    static_assert(T::kDtype == Dtype::kFp32 || T::kDtype == Dtype::kFp64);
    return value;
  }
}

template <typename T>
void GenerateRows(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim,
                  bool uneven, typename T::Bits* to) {
  const bool is_k = tensor == InputTensor::kK, is_v = tensor == InputTensor::kV;
  for (const Segment& segment : layout.segments) {
    for (std::int32_t i = 0; i < segment.length; ++i) {
      const std::int64_t row = segment.row + std::int64_t{i} * layout.row_step;
      for (int head = 0; head < heads; ++head) {
        typename T::Bits* values = to + (row * heads + head) * dim;
        for (int d = 0; d < dim; d += 4) {
          const PhiloxBlock words = InputWords(
              seed, static_cast<std::uint32_t>(tensor), static_cast<std::uint32_t>(segment.sequence),
              static_cast<std::uint32_t>(segment.position + i), static_cast<std::uint32_t>(head),
              static_cast<std::uint32_t>(d / 4));
          for (int e = 0; e < std::min(4, dim - d); ++e) {
            const float factor =
                uneven ? UnevenFactor(is_k, is_v, static_cast<std::uint32_t>(segment.sequence),
                                      static_cast<std::uint32_t>(segment.position + i),
                                      static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(d + e))
                       : 1.0f;
            values[d + e] = InputBits<T>(InputValue(words.word[e]) * factor);
          }
        }
      }
    }
  }
}

template <typename T>
void GenerateBiasRows(std::uint64_t seed, std::int64_t batch, int heads, std::int64_t seqlen_q,
                      std::int64_t seqlen_kv, typename T::Bits* to) {
  for (std::int64_t sequence = 0; sequence < batch; ++sequence) {
    for (int head = 0; head < heads; ++head) {
      for (std::int64_t query = 0; query < seqlen_q; ++query, to += seqlen_kv) {
        for (std::int64_t key = 0; key < seqlen_kv; key += 4) {
          const PhiloxBlock words =
              BiasWords(seed, static_cast<std::uint32_t>(InputTensor::kBias),
                        static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(query),
                        static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(key / 4));
          for (std::int64_t e = 0; e < std::min<std::int64_t>(4, seqlen_kv - key); ++e)
            to[key + e] = InputBits<T>(InputValue(words.word[e]));
        }
      }
    }
  }
}

std::uint64_t DigestOf(const void* data, std::size_t bytes) {
  std::uint64_t sum = DigestStart(bytes);
  for (std::size_t at = 0; at < bytes; at += sizeof sum) {
    std::uint64_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(data) + at, std::min(sizeof word, bytes - at));
    sum += DigestWord(at / sizeof word, word);
  }
  return sum;
}

struct Block {
  std::int64_t row, row_end, column, column_end;
};

template <typename A, typename B>
BlockStats CompareBlock(const CompareArgs& args, const Block& part, CompareStats& stats) {
  BlockStats block;
  block.count = static_cast<std::uint64_t>((part.row_end - part.row) * (part.column_end - part.column));
  for (std::int64_t i = part.row; i < part.row_end; ++i) {
    const auto* a = static_cast<const typename A::Bits*>(args.a.data) +
                    (args.a_rows ? args.a_rows[i] : i) * args.a_stride + args.a_offset;
    const auto* b = static_cast<const typename B::Bits*>(args.b.data) +
                    (args.b_rows ? args.b_rows[i] : i) * args.b_stride + args.b_offset;
    for (std::int64_t j = part.column; j < part.column_end; ++j) {
      const double x = A::ToFloat(a[j]);
      const double y = B::ToFloat(b[j]);
      const bool finite = std::isfinite(x) && std::isfinite(y);
      if (!finite && x == y) continue;  // equal infinities are no error; NaN equals nothing
      const double error = finite ? std::abs(x - y) : std::numeric_limits<double>::infinity();
      if (error > block.worst_err) {
        block.worst_err = error;
        block.worst = (i - part.row) * (part.column_end - part.column) + j - part.column;
        block.worst_a = x;
        block.worst_b = y;
      }
      if (!finite) {
        ++stats.mismatches;
        ++block.bad;
        continue;
      }
      double allowed = args.tolerance + args.relative * std::abs(y);
      stats.sum_err_ref += (x - y) * y;
      if (args.bound) {
        const double bound =
            args.bound[(args.b_rows ? args.b_rows[i] : i) * args.b_stride + args.b_offset + j];
        if (std::isfinite(args.tolerance)) allowed = bound;
        stats.max_of_bound = std::max(stats.max_of_bound, error / bound);
        stats.largest_bound = std::max(stats.largest_bound, bound);
      }
      if (error > allowed) ++block.bad;
      block.max_abs_err = std::max(block.max_abs_err, error);
      block.max_abs_ref = std::max(block.max_abs_ref, std::abs(y));
      stats.max_excess = std::max(stats.max_excess, error - args.relative * std::abs(y));
      block.sum_sq_err += error * error;
      block.sum_sq_ref += y * y;
    }
  }
  stats.max_abs_err = std::max(stats.max_abs_err, block.max_abs_err);
  stats.max_abs_ref = std::max(stats.max_abs_ref, block.max_abs_ref);
  stats.sum_sq_err += block.sum_sq_err;
  stats.sum_sq_ref += block.sum_sq_ref;
  stats.count += block.count;
  return block;
}

template <typename A, typename B>
CompareStats CompareRows(const CompareArgs& args) {
  CompareStats stats;
  BlockStats* to = args.blocks;
  for (std::int64_t r = 0; r < args.RowBlocks(); ++r) {
    const std::int64_t begin = args.row_blocks ? args.row_blocks[r] : r * kBlockRows;
    const std::int64_t end =
        args.row_blocks ? args.row_blocks[r + 1] : std::min(begin + kBlockRows, args.rows);
    for (std::int64_t column = 0; column < args.columns; column += args.block_columns) {
      const Block part{begin, end, column, std::min(column + args.block_columns, args.columns)};
      const BlockStats block = CompareBlock<A, B>(args, part, stats);
      if (to) *to++ = block;
    }
  }
  return stats;
}

class HostCheckKernels : public CheckKernels {
 public:
  explicit HostCheckKernels(cppool_runtime* runtime) : runtime_(runtime) {}

  void Load() override {}

  void Generate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim, Dtype dtype,
                void* to, cppool_stream stream, bool uneven) override {
    Enqueue(runtime_, stream, [=] {
      DispatchAnyDtype(dtype, [&](auto type) {
        using T = decltype(type);
        GenerateRows<T>(tensor, seed, layout, heads, dim, uneven, static_cast<typename T::Bits*>(to));
      });
    });
  }

  void GenerateBias(std::uint64_t seed, std::int64_t batch, int heads, std::int64_t seqlen_q,
                    std::int64_t seqlen_kv, Dtype dtype, void* to, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      DispatchAnyDtype(dtype, [&](auto type) {
        using T = decltype(type);
        GenerateBiasRows<T>(seed, batch, heads, seqlen_q, seqlen_kv, static_cast<typename T::Bits*>(to));
      });
    });
  }

  void Digest(const void* data, std::size_t bytes, std::uint64_t* result, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] { *result = DigestOf(data, bytes); });
  }

  void CopyRows(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay,
                cppool_stream stream) override {
    Enqueue(runtime_, stream, [copies, delay] {
      if (delay.count() > 0) std::this_thread::sleep_for(delay);
      for (const RowsCopy& copy : copies) {
        for (std::int64_t b = 0; b < copy.batch; ++b) {
          for (std::int64_t row = 0; row < copy.rows; ++row) {
            std::memcpy(static_cast<std::byte*>(copy.to) + b * copy.to_batch + row * copy.to_row,
                        static_cast<const std::byte*>(copy.from) + b * copy.from_batch + row * copy.from_row,
                        static_cast<std::size_t>(copy.bytes));
          }
        }
      }
    });
  }

  void RoundValues(Dtype dtype, double* values, std::int64_t count, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      for (std::int64_t i = 0; i < count; ++i) values[i] = RoundTo(dtype, values[i]);
    });
  }

  void FillValues(double* values, double value, std::int64_t count, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] { std::fill_n(values, count, value); });
  }

  void Compare(const CompareArgs& args, CompareStats* result, cppool_stream stream) override {
    Enqueue(runtime_, stream, [args, result] {
      DispatchAnyDtype(args.a.dtype, [&](auto a) {
        DispatchAnyDtype(args.b.dtype,
                         [&](auto b) { *result = CompareRows<decltype(a), decltype(b)>(args); });
      });
    });
  }

  void CheckBits(const BitsCheck& check, BitsTally* result, cppool_stream stream) override {
    Enqueue(runtime_, stream, [check, result] {
      *result = {};
      std::visit(
          [&](const auto& what) {
            for (std::int64_t i = 0, items = what.items(); i < items; ++i) what.Check(i, *result);
          },
          check.what);
    });
  }

  void Oracle(const OracleArgs& args, cppool_stream stream) override {
    Enqueue(runtime_, stream, [args] { HostOracle(args); });
  }

 private:
  cppool_runtime* runtime_;
};

}  // namespace

std::unique_ptr<CheckKernels> MakeHostCheckKernels(cppool_runtime* runtime) {
  return std::make_unique<HostCheckKernels>(runtime);
}

}  // namespace cppool::kernels
