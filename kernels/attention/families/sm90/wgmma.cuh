// Products of a warpgroup: wgmma on 64 rows, its operands in shared memory, and what it means for registers.
//
// A tile in shared memory is [dim / 64][rows][64] 16-bit elements, each 128-byte row swizzled by the tensor
// copy: its 16-byte chunk c lies at c ^ (row % 8). Tiles begin at multiples of 1024 bytes.
//
// Accumulator of 64 x n: lane l of warp w holds, at [4 i + j], row 16 w + l / 4 + 8 (j / 2) and column 8 i +
// 2 (l % 4) + j % 2. Rounded and packed in pairs it is a left operand in registers.
//
// wgmma runs on after its issue. Until WaitForProducts its accumulator and its operands in registers belong
// to it; Settle tells the compiler so.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace cppool::kernels::cuda::sm90 {

inline constexpr int kRowBytes = 128;  // of a tile's row

// Tag of products of 8-bit operands. A tile of theirs is [dim / line][rows][line] bytes with lines of 128
// bytes, or of 64 (swizzled by as many) where 128 do not divide the dims. Both operands are contracted over a
// line.
struct E4M3;

// Describes an operand in shared memory; fields in units of 16 bytes. Addresses are added to it.
class Operand {
 public:
  // A tile [dim / 64][rows][64], contracted over dim.
  static __device__ __forceinline__ Operand OverDim(std::uint32_t tile) { return Operand(tile, 1); }
  // The same tile, contracted over its rows.
  static __device__ __forceinline__ Operand OverRows(std::uint32_t tile, int rows) {
    return Operand(tile, rows * (kRowBytes / 16));
  }
  // A tile of E4M3 with lines of `kLine` bytes.
  template <int kLine>
  static __device__ __forceinline__ Operand OverLines(std::uint32_t tile) {
    static_assert(kLine == 128 || kLine == 64);
    return Operand(tile, 1, kLine);
  }
  __device__ __forceinline__ std::uint64_t At(int bytes) const {
    return bits_ + static_cast<std::uint64_t>(bytes >> 4);
  }

 private:
  __device__ __forceinline__ Operand(std::uint32_t tile, int leading, int line = kRowBytes)
      : bits_(std::uint64_t{(tile & 0x3ffff) >> 4} | static_cast<std::uint64_t>(leading) << 16 |
              static_cast<std::uint64_t>(8 * line / 16) << 32 | std::uint64_t{line == 128 ? 1u : 2u} << 62) {
  }  // 1: swizzled by 128 bytes, 2: by 64
  std::uint64_t bits_;
};

// Before the first product after registers that it uses were written.
__device__ __forceinline__ void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most the last kPending commits are under way.
template <int kPending>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void Settle(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void Settle(std::uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// One wgmma, 64 x kN x 16. Fresh: c = a b^T with both in shared memory. Add: c += a b with a in registers and
// b contracted over its rows, or c += a b^T. FreshOverRows and AddOverRows: a b with a in shared memory and b
// contracted over its rows. AddOverBothRows: c += a^T b with both in shared memory, contracted over their
// rows.
template <typename T, int kN>
struct Wgmma;

// clang-format off
#define WG_TEXT_2 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WG_TEXT_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WG_TEXT_5 WG_TEXT_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WG_TEXT_6 WG_TEXT_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WG_TEXT_7 WG_TEXT_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WG_TEXT_8 WG_TEXT_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WG_TEXT_9 WG_TEXT_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WG_TEXT_10 WG_TEXT_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WG_TEXT_11 WG_TEXT_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WG_TEXT_12 WG_TEXT_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WG_TEXT_16 WG_TEXT_12 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WG_8(how, i) how(c[i]), how(c[i + 1]), how(c[i + 2]), how(c[i + 3]), how(c[i + 4]), how(c[i + 5]), \
  how(c[i + 6]), how(c[i + 7])
#define WG_REGISTERS_2(how) WG_8(how, 0), WG_8(how, 8)
#define WG_REGISTERS_4(how) WG_8(how, 0), WG_8(how, 8), WG_8(how, 16), WG_8(how, 24)
#define WG_REGISTERS_5(how) WG_REGISTERS_4(how), WG_8(how, 32)
#define WG_REGISTERS_6(how) WG_REGISTERS_5(how), WG_8(how, 40)
#define WG_REGISTERS_7(how) WG_REGISTERS_6(how), WG_8(how, 48)
#define WG_REGISTERS_8(how) WG_REGISTERS_7(how), WG_8(how, 56)
#define WG_REGISTERS_9(how) WG_REGISTERS_8(how), WG_8(how, 64)
#define WG_REGISTERS_10(how) WG_REGISTERS_9(how), WG_8(how, 72)
#define WG_REGISTERS_11(how) WG_REGISTERS_10(how), WG_8(how, 80)
#define WG_REGISTERS_12(how) WG_REGISTERS_11(how), WG_8(how, 88)
#define WG_REGISTERS_16(how) WG_REGISTERS_12(how), WG_8(how, 96), WG_8(how, 104), WG_8(how, 112), WG_8(how, 120)

// kN = 16 * eighths; the operands after the accumulator's registers are numbered from p0.
#define WG_INSTANCE(T, type, kN, eighths, p0, p1, p2, p3, p4)                                                     \
  template <>                                                                                                     \
  struct Wgmma<T, kN> {                                                                                           \
    static __device__ __forceinline__ void Fresh(float (&c)[kN / 2], std::uint64_t a, std::uint64_t b) {          \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." type         \
          " {" WG_TEXT_##eighths "}, %" #p0 ", %" #p1 ", p, 1, 1, 0, 0;\n}"                                       \
          : WG_REGISTERS_##eighths("=f") : "l"(a), "l"(b));                                                       \
    }                                                                                                             \
    static __device__ __forceinline__ void Add(float (&c)[kN / 2], std::uint64_t a, std::uint64_t b) {            \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." type         \
          " {" WG_TEXT_##eighths "}, %" #p0 ", %" #p1 ", p, 1, 1, 0, 0;\n}"                                       \
          : WG_REGISTERS_##eighths("+f") : "l"(a), "l"(b));                                                       \
    }                                                                                                             \
    static __device__ __forceinline__ void FreshOverRows(float (&c)[kN / 2], std::uint64_t a, std::uint64_t b) {  \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." type         \
          " {" WG_TEXT_##eighths "}, %" #p0 ", %" #p1 ", p, 1, 1, 0, 1;\n}"                                       \
          : WG_REGISTERS_##eighths("=f") : "l"(a), "l"(b));                                                       \
    }                                                                                                             \
    static __device__ __forceinline__ void AddOverRows(float (&c)[kN / 2], std::uint64_t a, std::uint64_t b) {    \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." type         \
          " {" WG_TEXT_##eighths "}, %" #p0 ", %" #p1 ", p, 1, 1, 0, 1;\n}"                                       \
          : WG_REGISTERS_##eighths("+f") : "l"(a), "l"(b));                                                       \
    }                                                                                                             \
    static __device__ __forceinline__ void AddOverBothRows(float (&c)[kN / 2], std::uint64_t a, std::uint64_t b) { \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." type         \
          " {" WG_TEXT_##eighths "}, %" #p0 ", %" #p1 ", p, 1, 1, 1, 1;\n}"                                       \
          : WG_REGISTERS_##eighths("+f") : "l"(a), "l"(b));                                                       \
    }                                                                                                             \
    static __device__ __forceinline__ void Add(float (&c)[kN / 2], const std::uint32_t* a, std::uint64_t b) {     \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." type         \
          " {" WG_TEXT_##eighths "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1, 1;\n}"          \
          : WG_REGISTERS_##eighths("+f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
    }                                                                                                             \
  };
#define WG_INSTANCES(kN, eighths, p0, p1, p2, p3, p4)                                \
  WG_INSTANCE(__nv_bfloat16, "bf16.bf16", kN, eighths, p0, p1, p2, p3, p4)           \
  WG_INSTANCE(__half, "f16.f16", kN, eighths, p0, p1, p2, p3, p4)
WG_INSTANCES(32, 2, 16, 17, 18, 19, 20)
WG_INSTANCES(64, 4, 32, 33, 34, 35, 36)
WG_INSTANCES(80, 5, 40, 41, 42, 43, 44)
WG_INSTANCES(96, 6, 48, 49, 50, 51, 52)
WG_INSTANCES(112, 7, 56, 57, 58, 59, 60)
WG_INSTANCES(128, 8, 64, 65, 66, 67, 68)
WG_INSTANCES(144, 9, 72, 73, 74, 75, 76)
WG_INSTANCES(160, 10, 80, 81, 82, 83, 84)
WG_INSTANCES(176, 11, 88, 89, 90, 91, 92)
WG_INSTANCES(192, 12, 96, 97, 98, 99, 100)
WG_INSTANCES(256, 16, 128, 129, 130, 131, 132)
#undef WG_INSTANCES
#undef WG_INSTANCE
// 64 x kN x 32 of E4M3. Fresh and Add: c = a b^T and c += a b^T, with a in shared memory or in registers.
#define WG_INSTANCE(kN, eighths, p0, p1, p2, p3, p4)                                                              \
  template <>                                                                                                     \
  struct Wgmma<E4M3, kN> {                                                                                        \
    static __device__ __forceinline__ void Fresh(float (&c)[kN / 2], std::uint64_t a, std::uint64_t b) {          \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k32.f32.e4m3.e4m3"     \
          " {" WG_TEXT_##eighths "}, %" #p0 ", %" #p1 ", p, 1, 1;\n}"                                             \
          : WG_REGISTERS_##eighths("=f") : "l"(a), "l"(b));                                                       \
    }                                                                                                             \
    static __device__ __forceinline__ void Add(float (&c)[kN / 2], std::uint64_t a, std::uint64_t b) {            \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k32.f32.e4m3.e4m3"     \
          " {" WG_TEXT_##eighths "}, %" #p0 ", %" #p1 ", p, 1, 1;\n}"                                             \
          : WG_REGISTERS_##eighths("+f") : "l"(a), "l"(b));                                                       \
    }                                                                                                             \
    static __device__ __forceinline__ void Add(float (&c)[kN / 2], const std::uint32_t* a, std::uint64_t b) {     \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k32.f32.e4m3.e4m3"     \
          " {" WG_TEXT_##eighths "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1;\n}"             \
          : WG_REGISTERS_##eighths("+f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
    }                                                                                                             \
    static __device__ __forceinline__ void Fresh(float (&c)[kN / 2], const std::uint32_t* a, std::uint64_t b) {   \
      asm volatile(                                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #kN "k32.f32.e4m3.e4m3"     \
          " {" WG_TEXT_##eighths "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1;\n}"             \
          : WG_REGISTERS_##eighths("=f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
    }                                                                                                             \
  };
WG_INSTANCE(64, 4, 32, 33, 34, 35, 36)
WG_INSTANCE(128, 8, 64, 65, 66, 67, 68)
#undef WG_INSTANCE
// clang-format on

// c = a b^T with a [64, kDim] and b [kN, kDim] in shared memory, rows of tiles of kRowsA and kRowsB. Starts
// it only.
template <typename T, int kDim, int kN, int kRowsA = 64, int kRowsB = kN>
__device__ __forceinline__ void StartTransposed(float (&c)[kN / 2], const Operand& a, const Operand& b) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const std::uint64_t left = a.At(k / 4 * kRowsA * kRowBytes + k % 4 * 32);
    const std::uint64_t right = b.At(k / 4 * kRowsB * kRowBytes + k % 4 * 32);
    if (k == 0) {
      Wgmma<T, kN>::Fresh(c, left, right);
    } else {
      Wgmma<T, kN>::Add(c, left, right);
    }
  }
}

// The same of E4M3, whose tiles have lines of kLine bytes.
template <int kDim, int kN, int kLine>
__device__ __forceinline__ void StartTransposedE4M3(float (&c)[kN / 2], const Operand& a, const Operand& b) {
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
    const int chunk = k * 32 / kLine, within = k * 32 % kLine;
    const std::uint64_t left = a.At(chunk * 64 * kLine + within), right = b.At(chunk * kN * kLine + within);
    if (k == 0) {
      Wgmma<E4M3, kN>::Fresh(c, left, right);
    } else {
      Wgmma<E4M3, kN>::Add(c, left, right);
    }
  }
}

// c = a b of E4M3, with a [64, kRows] in registers and b^T [kN, kRows], kRows <= 128, in shared memory.
template <int kRows, int kN>
__device__ __forceinline__ void StartProductE4M3(float (&c)[kN / 2], const std::uint32_t (&a)[kRows / 8],
                                                 const Operand& b) {
#pragma unroll
  for (int k = 0; k < kRows / 32; ++k) {
    if (k == 0) {
      Wgmma<E4M3, kN>::Fresh(c, &a[0], b.At(0));
    } else {
      Wgmma<E4M3, kN>::Add(c, &a[k * 4], b.At(k * 32));
    }
  }
}

// c = a b, or c += a b, with a [64, kDim], rows of a tile of kRowsA, and b [kDim, kN] in shared memory.
// Starts it only.
template <typename T, int kDim, int kN, int kRowsA, bool kAdd = false>
__device__ __forceinline__ void StartProductOverRows(float (&c)[kN / 2], const Operand& a, const Operand& b) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const std::uint64_t left = a.At(k / 4 * kRowsA * kRowBytes + k % 4 * 32);
    const std::uint64_t right = b.At(k * 16 * kRowBytes);
    if (k == 0 && !kAdd) {
      Wgmma<T, kN>::FreshOverRows(c, left, right);
    } else {
      Wgmma<T, kN>::AddOverRows(c, left, right);
    }
  }
}

// c += a b with a [64, kRows] in registers and b [kRows, kN] in shared memory. Starts it only.
template <typename T, int kRows, int kN>
__device__ __forceinline__ void StartProduct(float (&c)[kN / 2], const std::uint32_t (&a)[kRows / 4],
                                             const Operand& b) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) Wgmma<T, kN>::Add(c, &a[k * 4], b.At(k * 16 * kRowBytes));
}

// c += a^T b with a [kRows, 64] and b [kRows, kN] in shared memory. Starts it only.
template <typename T, int kRows, int kN>
__device__ __forceinline__ void StartProductOverBothRows(float (&c)[kN / 2], const Operand& a,
                                                         const Operand& b) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k)
    Wgmma<T, kN>::AddOverBothRows(c, a.At(k * 16 * kRowBytes), b.At(k * 16 * kRowBytes));
}

}  // namespace cppool::kernels::cuda::sm90
