#include "kernels/host/check_kernels.h"

#include <algorithm>
#include <cmath>

#include "kernels/attention/philox.h"
#include "kernels/error.h"
#include "kernels/host/half.h"
#include "kernels/runtime.h"

namespace cppool::kernels {
namespace {

// Bits of one input value; which type they are in does not matter to the caller.
template <typename Bits>
Bits InputBits(Dtype dtype, float value) {
  if constexpr (std::is_same_v<Bits, std::uint16_t>) {
    return dtype == Dtype::kBf16 ? InputBf16(value) : InputFp16(value);
  } else {
    return value;
  }
}

template <typename Bits>
void GenerateRows(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim,
                  Dtype dtype, Bits* to) {
  for (const Segment& segment : layout.segments) {
    for (std::int32_t i = 0; i < segment.length; ++i) {
      const std::int64_t row = segment.row + std::int64_t{i} * layout.row_step;
      for (int head = 0; head < heads; ++head) {
        Bits* values = to + (row * heads + head) * dim;
        for (int d = 0; d < dim; d += 4) {
          const PhiloxBlock words = InputWords(
              seed, static_cast<std::uint32_t>(tensor), static_cast<std::uint32_t>(segment.sequence),
              static_cast<std::uint32_t>(segment.position + i), static_cast<std::uint32_t>(head),
              static_cast<std::uint32_t>(d / 4));
          for (int e = 0; e < std::min(4, dim - d); ++e)
            values[d + e] = InputBits<Bits>(dtype, InputValue(words.word[e]));
        }
      }
    }
  }
}

void GenerateAll(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim,
                 Dtype dtype, void* to) {
  if (dtype == Dtype::kFp64) {
    GenerateRows(tensor, seed, layout, heads, dim, dtype, static_cast<double*>(to));
  } else if (dtype == Dtype::kFp32) {
    GenerateRows(tensor, seed, layout, heads, dim, dtype, static_cast<float*>(to));
  } else {
    GenerateRows(tensor, seed, layout, heads, dim, dtype, static_cast<std::uint16_t*>(to));
  }
}

struct FP64 {
  using Bits = double;
  static double ToFloat(Bits bits) { return bits; }
};

template <typename Function>
void DispatchAny(Dtype dtype, const Function& function) {
  if (dtype == Dtype::kFp64) {
    function(FP64{});
  } else {
    DispatchDtype(dtype, function);
  }
}

template <typename A, typename B>
CompareStats CompareRows(const CompareArgs& args) {
  CompareStats stats;
  stats.count = static_cast<std::uint64_t>(args.rows * args.columns);
  for (std::int64_t i = 0; i < args.rows; ++i) {
    const auto* a = static_cast<const typename A::Bits*>(args.a) +
                    (args.a_rows ? args.a_rows[i] : i) * args.a_stride + args.a_offset;
    const auto* b = static_cast<const typename B::Bits*>(args.b) +
                    (args.b_rows ? args.b_rows[i] : i) * args.b_stride + args.b_offset;
    for (std::int64_t j = 0; j < args.columns; ++j) {
      const double x = A::ToFloat(a[j]);
      const double y = B::ToFloat(b[j]);
      if (!std::isfinite(x) || !std::isfinite(y)) {
        if (!(x == y)) ++stats.mismatches;  // equal infinities are no error; NaN equals nothing
        continue;
      }
      const double error = std::abs(x - y);
      stats.max_abs_err = std::max(stats.max_abs_err, error);
      stats.max_abs_ref = std::max(stats.max_abs_ref, std::abs(y));
      stats.max_excess = std::max(stats.max_excess, error - args.relative * std::abs(y));
      stats.sum_sq_err += error * error;
      stats.sum_sq_ref += y * y;
    }
  }
  return stats;
}

class HostCheckKernels : public CheckKernels {
 public:
  explicit HostCheckKernels(cppool_runtime* runtime) : runtime_(runtime) {}

  void Load() override {}

  void Generate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim, Dtype dtype,
                void* to, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] { GenerateAll(tensor, seed, layout, heads, dim, dtype, to); });
  }

  void Compare(const CompareArgs& args, CompareStats* result, cppool_stream stream) override {
    Enqueue(runtime_, stream, [args, result] {
      DispatchAny(args.a_dtype, [&](auto a) {
        DispatchAny(args.b_dtype, [&](auto b) { *result = CompareRows<decltype(a), decltype(b)>(args); });
      });
    });
  }

  std::size_t OracleWorkspace(const OracleArgs& args) const override { return HostOracleWorkspace(args); }

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
