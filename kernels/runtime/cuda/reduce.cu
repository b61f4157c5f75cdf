#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/runtime/cuda/launch.h"
#include "kernels/runtime/cuda/reduce.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kMostRanks = 64;
constexpr unsigned kThreads = 256;
constexpr std::size_t kMostBlocks = 1024;

struct Inputs {
  const void* at[kMostRanks];
  int count;
};

// How a type is kept in memory (Storage) and reduced (Value). Integers are added unsigned: they wrap.
template <typename T>
struct Plain {
  using Storage = T;
  using Value = T;
  static __device__ Value Load(Storage x) { return x; }
  static __device__ Storage Store(Value x) { return x; }
};
struct Half {
  using Storage = __half;
  using Value = float;
  static __device__ Value Load(Storage x) { return __half2float(x); }
  static __device__ Storage Store(Value x) { return __float2half_rn(x); }
};
struct Bfloat {
  using Storage = __nv_bfloat16;
  using Value = float;
  static __device__ Value Load(Storage x) { return __bfloat162float(x); }
  static __device__ Storage Store(Value x) { return __float2bfloat16_rn(x); }
};

template <typename T, bool kSum>
__device__ T Combine(T a, T b) {
  if constexpr (!kSum) {
    return a != a || a > b ? a : b;  // NaN where either is
  } else if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

template <typename Storage, int kPack>
struct alignas(sizeof(Storage) * kPack) Pack {
  Storage element[kPack];
};

// kPack elements a thread at a time; the last few one by one.
template <typename Type, bool kSum, int kPack>
__global__ void ReduceKernel(Inputs in, std::size_t count, void* out) {
  using Storage = typename Type::Storage;
  using Value = typename Type::Value;
  using Packed = Pack<Storage, kPack>;
  const std::size_t first = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = first; i < count / kPack; i += stride) {
    Value sum[kPack];
    for (int rank = 0; rank < in.count; ++rank) {
      const Packed next = static_cast<const Packed*>(in.at[rank])[i];
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const Value value = Type::Load(next.element[k]);
        sum[k] = rank == 0 ? value : Combine<Value, kSum>(sum[k], value);
      }
    }
    Packed result;
#pragma unroll
    for (int k = 0; k < kPack; ++k) result.element[k] = Type::Store(sum[k]);
    static_cast<Packed*>(out)[i] = result;
  }
  const std::size_t i = count / kPack * kPack + first;
  if (i >= count) return;
  Value sum = Type::Load(static_cast<const Storage*>(in.at[0])[i]);
  for (int rank = 1; rank < in.count; ++rank)
    sum = Combine<Value, kSum>(sum, Type::Load(static_cast<const Storage*>(in.at[rank])[i]));
  static_cast<Storage*>(out)[i] = Type::Store(sum);
}

using Kernel = void (*)(Inputs, std::size_t, void*);

template <typename Type>
Kernel KernelOf(cppool_reduce reduce, bool packed) {
  constexpr int kPack = 16 / sizeof(typename Type::Storage);
  if (reduce == CPPOOL_SUM) return packed ? ReduceKernel<Type, true, kPack> : ReduceKernel<Type, true, 1>;
  return packed ? ReduceKernel<Type, false, kPack> : ReduceKernel<Type, false, 1>;
}

Kernel KernelOf(cppool_dtype dtype, cppool_reduce reduce, bool packed) {
  switch (dtype) {
    case CPPOOL_FLOAT16:
      return KernelOf<Half>(reduce, packed);
    case CPPOOL_BFLOAT16:
      return KernelOf<Bfloat>(reduce, packed);
    case CPPOOL_FLOAT32:
      return KernelOf<Plain<float>>(reduce, packed);
    case CPPOOL_FLOAT64:
      return KernelOf<Plain<double>>(reduce, packed);
    case CPPOOL_INT32:
      return KernelOf<Plain<std::int32_t>>(reduce, packed);
    case CPPOOL_INT64:
      return KernelOf<Plain<std::int64_t>>(reduce, packed);
    case CPPOOL_UINT8:
      return KernelOf<Plain<std::uint8_t>>(reduce, packed);
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such dtype: " + std::to_string(static_cast<int>(dtype)));
}

bool IsAligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

}  // namespace

void LaunchReduce(cppool_dtype dtype, cppool_reduce reduce, const std::vector<const void*>& in,
                  std::size_t count, void* out, cudaStream_t stream) {
  if (count == 0) return;
  if (in.empty() || in.size() > kMostRanks)
    throw RuntimeError(CPPOOL_INTERNAL, "a reduction over " + std::to_string(in.size()) + " ranks");
  Inputs inputs{};
  std::copy(in.begin(), in.end(), inputs.at);
  inputs.count = static_cast<int>(in.size());
  const bool packed = IsAligned(out) && std::all_of(in.begin(), in.end(), IsAligned);
  const auto blocks = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
  LaunchKernel(KernelOf(dtype, reduce, packed), blocks, kThreads, 0, stream, "reducing", inputs, count, out);
}

void LoadReduce() {
  for (const cppool_dtype dtype : {CPPOOL_FLOAT16, CPPOOL_BFLOAT16, CPPOOL_FLOAT32, CPPOOL_FLOAT64,
                                   CPPOOL_INT32, CPPOOL_INT64, CPPOOL_UINT8}) {
    for (const cppool_reduce reduce : {CPPOOL_SUM, CPPOOL_MAX})
      LoadKernels("loading reductions", KernelOf(dtype, reduce, false), KernelOf(dtype, reduce, true));
  }
}

}  // namespace cppool::kernels::cuda
