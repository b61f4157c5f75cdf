// The oracle's matrix product on fp64 tensor cores: a block of 4 warps computes a 64 x 64 tile of C = A B in
// steps of 16 along k.
//
// Each warp computes 32 x 32 of the tile as 2 x 4 products of 16 x 8 x 16. Operands are read from global
// memory into registers one step ahead, converted to fp64 and stored in shared memory, which holds two steps:
// 2 * (10 + 10) KiB. The pitch of its rows is 20 (or 68) doubles, so that the 16 lanes of a half-warp, which
// read 4 rows by 4 columns, access different banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/checks/oracle_workspace.h"  // kOracleTile
#include "kernels/numerics/fp8.h"

namespace cppool::kernels::cuda {

inline constexpr int kOracleStep = 16;
inline constexpr int kOracleThreads = 128;

// The payloads of fp8.
struct E4M3 {
  std::uint8_t bits;
};
struct E5M2 {
  std::uint8_t bits;
};

// A matrix in global memory: element (r, c) is data[r * stride + c].
template <typename T>
struct Matrix {
  const T* data;
  std::int64_t stride;
  bool magnitudes = false;  // absolute values are read

  // Whether rows can be read four elements at a time.
  __device__ bool Fours() const {
    return stride % 4 == 0 &&
           reinterpret_cast<std::uintptr_t>(data) % (sizeof(T) < 8 ? 4 * sizeof(T) : 16) == 0;
  }
};

__device__ inline double ToDouble(double value) { return value; }
__device__ inline double ToDouble(__half value) { return __half2float(value); }
__device__ inline double ToDouble(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline double ToDouble(E4M3 value) { return E4M3ToFloat(value.bits); }
__device__ inline double ToDouble(E5M2 value) { return E5M2ToFloat(value.bits); }

// Loads the 64 x 16 tile of one operand. `kAlongRows`: k is the column index of the matrix in memory (A[m, k]
// or B[n, k]), and the tile has 64 rows of 16 elements; otherwise k is the row index (A[k, m] or B[k, n]),
// and the tile has 16 rows of 64.
template <typename T, bool kAlongRows>
class OracleOperand {
 public:
  static constexpr int kPitch = kAlongRows ? 20 : 68;
  static constexpr int kDoubles = kAlongRows ? 64 * 20 : 16 * 68;

  // Reads indices from `outer` (of m or n) and from `k`; elements at or beyond outer_end or k_end read as 0.
  __device__ void Fetch(const Matrix<T>& matrix, bool fours, std::int64_t outer, std::int64_t outer_end,
                        std::int64_t k, std::int64_t k_end) {
    magnitudes_ = matrix.magnitudes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = Row(i);
      const std::int64_t r = (kAlongRows ? outer : k) + row;
      const std::int64_t c = (kAlongRows ? k : outer) + Column(i);
      const bool row_there = r < (kAlongRows ? outer_end : k_end);
      const std::int64_t there = row_there ? (kAlongRows ? k_end : outer_end) - c : 0;
      const T* from = matrix.data + r * matrix.stride + c;
      if (there >= 4 && fours) {
        if constexpr (sizeof(T) == 8) {
          reinterpret_cast<double2*>(values_[i])[0] = reinterpret_cast<const double2*>(from)[0];
          reinterpret_cast<double2*>(values_[i])[1] = reinterpret_cast<const double2*>(from)[1];
        } else if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<uint2*>(values_[i]) = *reinterpret_cast<const uint2*>(from);
        } else {
          *reinterpret_cast<unsigned*>(values_[i]) = *reinterpret_cast<const unsigned*>(from);
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) values_[i][e] = e < there ? from[e] : T{};
      }
    }
  }

  __device__ void Store(double* shared) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      double2* to = reinterpret_cast<double2*>(shared + Row(i) * kPitch + Column(i));
      const double2 low = make_double2(Value(i, 0), Value(i, 1)),
                    high = make_double2(Value(i, 2), Value(i, 3));
      // Every second group of four threads writes its two halves in reverse order, so that eight threads
      // cover all banks.
      const bool swap = threadIdx.x & 4;
      to[swap] = swap ? high : low;
      to[!swap] = swap ? low : high;
    }
  }

  // Returns element (outer, k) of the tile.
  __device__ static double At(const double* shared, int outer, int k) {
    return kAlongRows ? shared[outer * kPitch + k] : shared[k * kPitch + outer];
  }

 private:
  __device__ static int Row(int i) { return (threadIdx.x + i * kOracleThreads) / (kAlongRows ? 4 : 16); }
  __device__ static int Column(int i) {
    return (threadIdx.x + i * kOracleThreads) % (kAlongRows ? 4 : 16) * 4;
  }

  __device__ double Value(int i, int e) const {
    const double value = ToDouble(values_[i][e]);
    return magnitudes_ ? fabs(value) : value;
  }

  alignas(16) T values_[2][4];
  bool magnitudes_;
};

// c += a b for a 16 x 16 and b 16 x 8, over the warp. Lane l holds a(l / 4 + 8 * (i % 2), l % 4 + 4 * (i /
// 2)), b(l % 4 + 4 * i, l / 4) and c(l / 4 + 8 * (i / 2), l % 4 * 2 + i % 2): PTX ISA, "Matrix fragments for
// mma with .f64".
__device__ inline void MultiplyAdd(const double (&a)[8], const double (&b)[4], double (&c)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, "
      "%11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};\n"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
        "d"(b[1]), "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};\n"
                   : "+d"(c[2 * half]), "+d"(c[2 * half + 1])
                   : "d"(a[2 * k + half]), "d"(b[k]));
    }
  }
#endif
}

// A tile of C, distributed over the registers of the block's threads.
template <typename TA, bool kAAlongRows, typename TB, bool kBAlongRows>
class OracleProduct {
  using A = OracleOperand<TA, kAAlongRows>;
  using B = OracleOperand<TB, kBAlongRows>;

 public:
  struct Shared {
    alignas(16) double a[2][A::kDoubles];
    alignas(16) double b[2][B::kDoubles];
  };

  // Adds the product over k .. k_end to the tile at (m, n) of C, which has m_end rows and n_end columns. All
  // threads of the block must call it.
  __device__ void Accumulate(Shared& shared, const Matrix<TA>& a, const Matrix<TB>& b, std::int64_t m,
                             std::int64_t m_end, std::int64_t n, std::int64_t n_end, std::int64_t k,
                             std::int64_t k_end) {
    if (k >= k_end) return;
    A next_a;
    B next_b;
    const bool a_fours = a.Fours();
    const bool b_fours = b.Fours();
    next_a.Fetch(a, a_fours, m, m_end, k, k_end);
    next_b.Fetch(b, b_fours, n, n_end, k, k_end);
    __syncthreads();  // other warps may still read the shared memory of an earlier call
    next_a.Store(shared.a[0]);
    next_b.Store(shared.b[0]);
    __syncthreads();
    for (int stage = 0; k < k_end; stage ^= 1) {
      k += kOracleStep;
      if (k < k_end) {
        next_a.Fetch(a, a_fours, m, m_end, k, k_end);
        next_b.Fetch(b, b_fours, n, n_end, k, k_end);
      }
      Multiply(shared.a[stage], shared.b[stage]);
      if (k < k_end) {
        next_a.Store(shared.a[stage ^ 1]);
        next_b.Store(shared.b[stage ^ 1]);
        __syncthreads();
      }
    }
  }

  // Calls use(row, column, value) for the thread's elements within the tile.
  template <typename Use>
  __device__ void ForEach(const Use& use) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          use(WarpRow() + i * 16 + e / 2 * 8 + Lane() / 4, WarpColumn() + j * 8 + Lane() % 4 * 2 + e % 2,
              c_[i][j][e]);
        }
      }
    }
  }

 private:
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int WarpRow() { return threadIdx.x / 64 * 32; }
  __device__ static int WarpColumn() { return threadIdx.x / 32 % 2 * 32; }

  __device__ void Multiply(const double* shared_a, const double* shared_b) {
    double b[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        b[j][e] = B::At(shared_b, WarpColumn() + j * 8 + Lane() / 4, e * 4 + Lane() % 4);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      double a[8];
#pragma unroll
      for (int e = 0; e < 8; ++e)
        a[e] = A::At(shared_a, WarpRow() + i * 16 + e % 2 * 8 + Lane() / 4, e / 2 * 4 + Lane() % 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) MultiplyAdd(a, b[j], c_[i][j]);
    }
  }

  double c_[2][4][4] = {};
};

}  // namespace cppool::kernels::cuda
