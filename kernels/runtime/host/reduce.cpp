#include "kernels/runtime/host/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/numerics/half.h"

namespace cppool::kernels::host {
namespace {

// How a type is kept in memory (Storage) and added (Value). Integers are added unsigned, where overflow is
// defined.
template <typename T>
struct Plain {
  using Storage = T;
  using Value = T;
  static Value Load(Storage x) { return x; }
  static Storage Store(Value x) { return x; }
};
struct Half {
  using Storage = std::uint16_t;
  using Value = float;
  static Value Load(Storage x) { return FP16ToFloat(x); }
  static Storage Store(Value x) { return FloatToFP16(x); }
};
struct Bfloat {
  using Storage = std::uint16_t;
  using Value = float;
  static Value Load(Storage x) { return BF16ToFloat(x); }
  static Storage Store(Value x) { return FloatToBF16(x); }
};

template <typename T>
T Add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  } else {
    return a + b;
  }
}

template <typename T>
T Max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return a;
    if (std::isnan(b)) return b;
  }
  return std::max(a, b);
}

template <typename Type, bool kSum>
void ReduceAs(const std::vector<const void*>& in, std::size_t count, void* out) {
  using Storage = typename Type::Storage;
  constexpr std::size_t kBlock = 512;  // all inputs of a block are read before any of it is written
  typename Type::Value sum[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    const auto* first = static_cast<const Storage*>(in[0]) + begin;
    for (std::size_t i = 0; i < n; ++i) sum[i] = Type::Load(first[i]);
    for (std::size_t rank = 1; rank < in.size(); ++rank) {
      const auto* next = static_cast<const Storage*>(in[rank]) + begin;
      for (std::size_t i = 0; i < n; ++i)
        sum[i] = kSum ? Add(sum[i], Type::Load(next[i])) : Max(sum[i], Type::Load(next[i]));
    }
    auto* to = static_cast<Storage*>(out) + begin;
    for (std::size_t i = 0; i < n; ++i) to[i] = Type::Store(sum[i]);
  }
}

template <typename Type>
void ReduceBy(cppool_reduce reduce, const std::vector<const void*>& in, std::size_t count, void* out) {
  reduce == CPPOOL_SUM ? ReduceAs<Type, true>(in, count, out) : ReduceAs<Type, false>(in, count, out);
}

}  // namespace

void Reduce(cppool_dtype dtype, cppool_reduce reduce, const std::vector<const void*>& in, std::size_t count,
            void* out) {
  switch (dtype) {
    case CPPOOL_FLOAT16:
      return ReduceBy<Half>(reduce, in, count, out);
    case CPPOOL_BFLOAT16:
      return ReduceBy<Bfloat>(reduce, in, count, out);
    case CPPOOL_FLOAT32:
      return ReduceBy<Plain<float>>(reduce, in, count, out);
    case CPPOOL_FLOAT64:
      return ReduceBy<Plain<double>>(reduce, in, count, out);
    case CPPOOL_INT32:
      return ReduceBy<Plain<std::int32_t>>(reduce, in, count, out);
    case CPPOOL_INT64:
      return ReduceBy<Plain<std::int64_t>>(reduce, in, count, out);
    case CPPOOL_UINT8:
      return ReduceBy<Plain<std::uint8_t>>(reduce, in, count, out);
  }
}

}  // namespace cppool::kernels::host
