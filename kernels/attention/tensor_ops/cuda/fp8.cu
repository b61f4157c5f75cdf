// Kernels for 8-bit payloads and their scales. Memory-bound: every tensor is read once and written once,
// eight elements at a time where alignment allows. The element types are arguments, not template parameters:
// a branch on them costs nothing beside the memory.
//
// Casts have the same bits as on the host: the products are __fmul_rn, so that no compiler flag makes them
// anything else, and NaN keeps its sign, which a multiplication on a GPU would drop.
#include "kernels/attention/problem/transposed.h"
#include "kernels/attention/tensor_ops/cuda/element.cuh"
#include "kernels/attention/tensor_ops/cuda/tensor_ops.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/error.h"
#include "kernels/half.h"
#include "kernels/numerics/fp8.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowSlices = 8;  // thread blocks that share a tile of rows

template <typename T, int kCount, typename Convert>
__device__ __forceinline__ void LoadAs(const void* from, std::int64_t index, float (&to)[kCount],
                                       Convert convert) {
  const auto some = *reinterpret_cast<const Packed<T, kCount>*>(static_cast<const T*>(from) + index);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = convert(some.at[i]);
}

// Loads kCount elements from `index` on, which is a multiple of kCount.
template <int kCount>
__device__ __forceinline__ void Load(Dtype dtype, const void* from, std::int64_t index, float (&to)[kCount]) {
  switch (dtype) {
    case Dtype::kBf16:
      return LoadAs<std::uint16_t>(from, index, to, [](std::uint16_t x) { return BF16ToFloat(x); });
    case Dtype::kFp16:
      return LoadAs<std::uint16_t>(from, index, to, [](std::uint16_t x) { return FP16ToFloat(x); });
    case Dtype::kE4M3:
      return LoadAs<std::uint8_t>(from, index, to, [](std::uint8_t x) { return E4M3ToFloat(x); });
    case Dtype::kE5M2:
      return LoadAs<std::uint8_t>(from, index, to, [](std::uint8_t x) { return E5M2ToFloat(x); });
    case Dtype::kFp32:
    case Dtype::kFp64:  // refused before the launch
      return LoadAs<float>(from, index, to, [](float x) { return x; });
  }
}

template <typename T, int kCount, typename Convert>
__device__ __forceinline__ void StoreAs(void* to, std::int64_t index, const float (&from)[kCount],
                                        Convert convert) {
  Packed<T, kCount> some;
#pragma unroll
  for (int i = 0; i < kCount; ++i) some.at[i] = convert(from[i]);
  *reinterpret_cast<Packed<T, kCount>*>(static_cast<T*>(to) + index) = some;
}

// Stores kCount elements, rounded to nearest even.
template <int kCount>
__device__ __forceinline__ void Store(Dtype dtype, void* to, std::int64_t index,
                                      const float (&from)[kCount]) {
  switch (dtype) {
    case Dtype::kBf16:
      return StoreAs<std::uint16_t>(to, index, from, [](float x) { return FloatToBF16(x); });
    case Dtype::kFp16:
      return StoreAs<std::uint16_t>(to, index, from, [](float x) { return FloatToFP16(x); });
    case Dtype::kE4M3:
      return StoreAs<std::uint8_t>(to, index, from, [](float x) { return FloatToE4M3(x); });
    case Dtype::kE5M2:
      return StoreAs<std::uint8_t>(to, index, from, [](float x) { return FloatToE5M2(x); });
    case Dtype::kFp32:
    case Dtype::kFp64:  // refused before the launch
      return StoreAs<float>(to, index, from, [](float x) { return x; });
  }
}

// x * factor in one fp32 product; NaN as it is.
__device__ __forceinline__ float Times(float x, float factor) { return x != x ? x : __fmul_rn(x, factor); }

// Returns the magnitude's bits, which increase with it; 0 for NaN.
__device__ __forceinline__ unsigned SizeOfNumber(float x) {
  const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0 : bits;
}

// Calls visit(index of the first element) for the elements of a thread block, kCount at a time: the rows
// blockIdx.y, blockIdx.y + gridDim.y, ... of tile blockIdx.x.
template <int kCount, typename Visit>
__device__ __forceinline__ void ForEachElement(const RowView& rows, std::int64_t columns, Visit visit) {
  const RowTile tile = rows.tiles[blockIdx.x];
  for (std::int64_t i = blockIdx.y; i < tile.length; i += gridDim.y) {
    const std::int64_t first = (tile.row + i * rows.step) * columns;
    for (std::int64_t column = threadIdx.x * kCount; column < columns; column += kThreads * kCount)
      visit(first + column);
  }
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    AmaxKernel(RowView rows, std::int64_t columns, Dtype dtype, const void* from, unsigned* amax) {
  unsigned most = 0;
  ForEachElement<kCount>(rows, columns, [&](std::int64_t at) {
    float some[kCount];
    Load(dtype, from, at, some);
#pragma unroll
    for (int i = 0; i < kCount; ++i) most = max(most, SizeOfNumber(some[i]));
  });
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0 && most > 0) atomicMax(amax, most);
}

__global__ void MakeScaleKernel(float most, const float* amax, Fp8Scale* to) {
  const float scale = CurrentScale(most, *amax);
  *to = {scale, __fdiv_rn(1.0f, scale)};
}

// to = from * *factor, in one fp32 product, rounded once.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    ConvertKernel(RowView rows, std::int64_t columns, Dtype from_dtype, const void* from, const float* factor,
                  Dtype to_dtype, void* to) {
  const float by = factor ? *factor : 1.0f;
  ForEachElement<kCount>(rows, columns, [&](std::int64_t at) {
    float some[kCount];
    Load(from_dtype, from, at, some);
#pragma unroll
    for (int i = 0; i < kCount; ++i) some[i] = Times(some[i], by);
    Store(to_dtype, to, at, some);
  });
}

// Eight lanes per vector, kCount elements each at a time; a warp's four vectors are of consecutive heads.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    DeltaKernel(RowView rows, int heads, int dim, TensorRef out, TensorRef dout, float* delta) {
  const RowTile tile = rows.tiles[blockIdx.x];
  const float out_scale = out.scale ? *out.scale : 1.0f, dout_scale = dout.scale ? *dout.scale : 1.0f;
  const int lane = threadIdx.x % 8;
  const unsigned lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
  for (std::int64_t i = blockIdx.y; i < tile.length; i += gridDim.y) {
    for (int head = threadIdx.x / 8; head < heads; head += kThreads / 8) {
      const std::int64_t vector = (tile.row + i * rows.step) * heads + head;
      float sum = 0;
      for (int d = lane * kCount; d < dim; d += 8 * kCount) {
        float a[kCount], b[kCount];
        Load(out.dtype, out.data, vector * dim + d, a);
        Load(dout.dtype, dout.data, vector * dim + d, b);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum = fmaf(a[j], b[j], sum);
      }
      for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(lanes, sum, apart);
      if (lane == 0) delta[vector] = __fmul_rn(__fmul_rn(sum, out_scale), dout_scale);
    }
  }
}

// Blocks along the dims: the 32 / kCount lanes that hold a block agree on its amax.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    CastDimBlocksKernel(RowView rows, std::int64_t columns, Dtype dtype, const void* from, MxTensor to) {
  constexpr int kLanes = kMxBlock / kCount;
  const unsigned lanes = (kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1)
                         << (threadIdx.x % 32 / kLanes * kLanes);
  ForEachElement<kCount>(rows, columns, [&](std::int64_t at) {
    float some[kCount];
    Load(dtype, from, at, some);
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) most = max(most, SizeOfNumber(some[i]));
#pragma unroll
    for (int apart = kLanes / 2; apart > 0; apart /= 2) most = max(most, __shfl_xor_sync(lanes, most, apart));
    const std::uint8_t exponent = E8M0Of(__uint_as_float(most));
    const float factor = E8M0Reciprocal(exponent);
#pragma unroll
    for (int i = 0; i < kCount; ++i) some[i] = Times(some[i], factor);
    Store(Dtype::kE4M3, to.payload, at, some);
    if (threadIdx.x % kLanes == 0) to.exponents[at / kMxBlock] = exponent;
  });
}

// Blocks along the tokens: kCount columns of a tile per thread, held in registers. blockIdx.y: slabs of
// columns.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    CastTokenBlocksKernel(RowView rows, std::int64_t columns, Dtype dtype, const void* from, MxTensor to) {
  const std::int64_t column = (blockIdx.y * static_cast<std::int64_t>(kThreads) + threadIdx.x) * kCount;
  if (column >= columns) return;
  const RowTile tile = rows.tiles[blockIdx.x];
  const std::int64_t first = tile.row * columns + column, step = rows.step * columns;
  float block[kMxBlock][kCount];
  unsigned most[kCount] = {};
#pragma unroll
  for (int i = 0; i < kMxBlock; ++i) {
    if (i >= tile.length) continue;
    Load(dtype, from, first + i * step, block[i]);
#pragma unroll
    for (int j = 0; j < kCount; ++j) most[j] = max(most[j], SizeOfNumber(block[i][j]));
  }
  float factor[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const std::uint8_t exponent = E8M0Of(__uint_as_float(most[j]));
    factor[j] = E8M0Reciprocal(exponent);
    to.exponents[blockIdx.x * columns + column + j] = exponent;
  }
#pragma unroll
  for (int i = 0; i < kMxBlock; ++i) {
    if (i >= tile.length) continue;
#pragma unroll
    for (int j = 0; j < kCount; ++j) block[i][j] = Times(block[i][j], factor[j]);
    Store(Dtype::kE4M3, to.payload, first + i * step, block[i]);
  }
}

// kCount elements along a row share an exponent if blocks are along the dims, and have one each if along the
// tokens.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    DequantizeBlocksKernel(RowView rows, MxAxis axis, std::int64_t columns, MxTensor from, void* to) {
  const std::int64_t row_of_exponents = blockIdx.x * columns;
  ForEachElement<kCount>(rows, columns, [&](std::int64_t at) {
    float some[kCount];
    Load(Dtype::kE4M3, from.payload, at, some);
    const std::int64_t column = at % columns;
    const auto of_block = static_cast<std::uint8_t>(axis == MxAxis::kDim ? from.exponents[at / kMxBlock] : 0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::uint8_t exponent =
          axis == MxAxis::kDim ? of_block : from.exponents[row_of_exponents + column + i];
      some[i] = Times(some[i], E8M0ToFloat(exponent));
    }
    Store(Dtype::kBf16, to, at, some);
  });
}

// Returns byte i of each of four words, for i from 0 to 3.
__device__ __forceinline__ uint4 Transposed(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                            std::uint32_t d) {
  const std::uint32_t ab01 = __byte_perm(a, b, 0x5140), ab23 = __byte_perm(a, b, 0x7362);
  const std::uint32_t cd01 = __byte_perm(c, d, 0x5140), cd23 = __byte_perm(c, d, 0x7362);
  return {__byte_perm(ab01, cd01, 0x5410), __byte_perm(ab01, cd01, 0x7632), __byte_perm(ab23, cd23, 0x5410),
          __byte_perm(ab23, cd23, 0x7632)};
}

// A thread block moves 64 slots of 256 columns, x and y of the grid, through shared memory; a row has all
// heads' dims. A thread reads 16 columns of the tokens of four slots, and writes 16 slots of a column.
constexpr int kTransposedColumns = 256;
__global__ void __launch_bounds__(kThreads)
    TransposeKernel(RowView slots, int columns, const std::uint8_t* from, std::uint8_t* to) {
  constexpr int kFours = kSlotTile / 4, kSixteens = kTransposedColumns / 16;
  static_assert(kFours == 16 && kSixteens == 16);
  // Four slots of a column, which are stored in another order for every 16 columns: threads that write the
  // same slots of neighbouring 16 columns use different banks.
  __shared__ std::uint32_t fours[kTransposedColumns][kFours];
  const RowTile tile = slots.tiles[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * kTransposedColumns;
  for (int i = static_cast<int>(threadIdx.x); i < kFours * kSixteens; i += kThreads) {
    const int sixteen = i % kSixteens, four = i / kSixteens, column = first + sixteen * 16;
    if (column >= columns) continue;
    uint4 of_slot[4];
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
      const int token = four / 4 * 16 + TokenOfSlot(four % 4 * 4 + slot);
      of_slot[slot] = {};
      if (token < tile.length) {
        const std::int64_t row = tile.row + std::int64_t{token} * slots.step;
        of_slot[slot] = *reinterpret_cast<const uint4*>(from + row * columns + column);
      }
    }
    const auto put = [&](int at, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
      const uint4 words = Transposed(a, b, c, d);
      std::uint32_t(*const line)[kFours] = &fours[sixteen * 16 + at];
      line[0][four ^ sixteen] = words.x;
      line[1][four ^ sixteen] = words.y;
      line[2][four ^ sixteen] = words.z;
      line[3][four ^ sixteen] = words.w;
    };
    put(0, of_slot[0].x, of_slot[1].x, of_slot[2].x, of_slot[3].x);
    put(4, of_slot[0].y, of_slot[1].y, of_slot[2].y, of_slot[3].y);
    put(8, of_slot[0].z, of_slot[1].z, of_slot[2].z, of_slot[3].z);
    put(12, of_slot[0].w, of_slot[1].w, of_slot[2].w, of_slot[3].w);
  }
  __syncthreads();
  const std::int64_t all = std::int64_t{slots.count} * kSlotTile;
  for (int i = static_cast<int>(threadIdx.x); i < kTransposedColumns * (kFours / 4); i += kThreads) {
    const int column = i / (kFours / 4), four = i % (kFours / 4) * 4, order = column / 16;
    if (first + column >= columns) continue;
    const std::uint32_t* const line = fours[column];
    *reinterpret_cast<uint4*>(to + (first + column) * all + std::int64_t{blockIdx.x} * kSlotTile +
                              four * 4) = {line[four ^ order], line[(four + 1) ^ order],
                                           line[(four + 2) ^ order], line[(four + 3) ^ order]};
  }
}

// Whether `count` elements at a time can be read from (or written to) each of these tensors, whose rows have
// `columns` elements.
bool Fits(int count, std::int64_t columns, std::initializer_list<TensorRef> tensors) {
  return columns % count == 0 && std::all_of(tensors.begin(), tensors.end(), [&](const TensorRef& tensor) {
           return Aligned(tensor.data, std::min<std::size_t>(16, SizeOf(tensor.dtype) * count));
         });
}

void Expect(bool expected, Dtype dtype) {
  if (!expected)
    throw RuntimeError(CPPOOL_INTERNAL, std::string("tensor operations: fp8 with ") + NameOf(dtype));
}
void ExpectWide(Dtype dtype) { Expect(!IsFp8(dtype) && dtype != Dtype::kFp64, dtype); }
void ExpectPayload(Dtype dtype) { Expect(IsFp8(dtype), dtype); }

dim3 GridOf(const RowView& rows) { return {static_cast<unsigned>(rows.count), kRowSlices}; }

class CudaFp8Ops : public Fp8Ops {
 public:
  explicit CudaFp8Ops(cppool_runtime* rt) : rt_(rt) {}

  void Amax(const TokenRows& of, std::int64_t columns, TensorRef from, float* amax,
            cppool_stream stream) override {
    const RowView& rows = ViewOf(of);
    ExpectWide(from.dtype);
    if (rows.count == 0 || columns == 0) return;
    const auto kernel = Fits(8, columns, {from}) ? &AmaxKernel<8> : &AmaxKernel<1>;
    LaunchKernel(kernel, GridOf(rows), kThreads, 0, AsCuda(stream), "launching amax", rows, columns,
                 from.dtype, from.data, reinterpret_cast<unsigned*>(amax));
  }

  void MakeScale(Dtype format, const float* amax, Fp8Scale* to, cppool_stream stream) override {
    ExpectPayload(format);
    const float most = format == Dtype::kE4M3 ? kE4M3Max : kE5M2Max;
    LaunchKernel(MakeScaleKernel, 1, 1, 0, AsCuda(stream), "launching the making of a scale", most, amax, to);
  }

  void Cast(const TokenRows& rows, std::int64_t columns, TensorRef from, const Fp8Scale* scale,
            TensorOut payload, cppool_stream stream) override {
    ExpectWide(from.dtype);
    ExpectPayload(payload.dtype);
    Convert(ViewOf(rows), columns, from, &scale->scale, payload, stream);
  }

  void Dequantize(const TokenRows& rows, std::int64_t columns, TensorRef payload, TensorOut to,
                  cppool_stream stream) override {
    ExpectPayload(payload.dtype);
    ExpectWide(to.dtype);
    Convert(ViewOf(rows), columns, payload, payload.scale, to, stream);
  }

  void Delta(const TokenRows& of, int heads, int dim, TensorRef out, TensorRef dout, float* delta,
             cppool_stream stream) override {
    const RowView& rows = ViewOf(of);
    for (const Dtype dtype : {out.dtype, dout.dtype}) Expect(dtype != Dtype::kFp64, dtype);
    if (rows.count == 0 || heads == 0) return;
    const auto kernel = Fits(8, dim, {out, dout}) ? &DeltaKernel<8> : &DeltaKernel<1>;
    LaunchKernel(kernel, GridOf(rows), kThreads, 0, AsCuda(stream), "launching delta", rows, heads, dim, out,
                 dout, delta);
  }

  std::unique_ptr<TokenRows> Blocks(const Layout& layout, const std::vector<std::int64_t>& chunk,
                                    cppool_stream stream) override {
    std::vector<RowTile> tiles;
    for (const Segment& block : MxBlocks(layout, chunk)) tiles.push_back({block.row, block.length});
    return std::make_unique<CudaTokenRows>(rt_, std::move(tiles), layout.row_step, stream);
  }

  // `of` has tiles of at most kMxBlock rows, and dim is a multiple of kMxBlock.
  void CastBlocks(const TokenRows& of, MxAxis axis, int heads, int dim, TensorRef from, const MxTensor& to,
                  cppool_stream stream) override {
    const RowView& blocks = ViewOf(of);
    ExpectWide(from.dtype);
    const std::int64_t columns = std::int64_t{heads} * dim;
    if (blocks.count == 0 || columns == 0) return;
    const TensorRef payload{to.payload, Dtype::kE4M3};
    const bool eight = Fits(8, columns, {from, payload}), two = Fits(2, columns, {from, payload});
    const bool along_dims = axis == MxAxis::kDim;
    const auto kernel = along_dims ? (eight ? &CastDimBlocksKernel<8> : &CastDimBlocksKernel<1>)
                                   : (two ? &CastTokenBlocksKernel<2> : &CastTokenBlocksKernel<1>);
    const dim3 grid =
        along_dims ? GridOf(blocks)
                   : dim3(static_cast<unsigned>(blocks.count), BlocksFor(columns, kThreads * (two ? 2 : 1)));
    LaunchKernel(kernel, grid, kThreads, 0, AsCuda(stream), "launching a cast in blocks", blocks, columns,
                 from.dtype, from.data, to);
  }

  void DequantizeBlocks(const TokenRows& of, MxAxis axis, int heads, int dim, const MxTensor& from,
                        TensorOut to, cppool_stream stream) override {
    const RowView& blocks = ViewOf(of);
    Expect(to.dtype == Dtype::kBf16, to.dtype);
    const std::int64_t columns = std::int64_t{heads} * dim;
    if (blocks.count == 0 || columns == 0) return;
    const auto kernel = Fits(8, columns, {{from.payload, Dtype::kE4M3}, to}) ? &DequantizeBlocksKernel<8>
                                                                             : &DequantizeBlocksKernel<1>;
    LaunchKernel(kernel, GridOf(blocks), kThreads, 0, AsCuda(stream),
                 "launching the dequantization of blocks", blocks, axis, columns, from, to.data);
  }

  std::unique_ptr<TokenRows> Slots(const Layout& layout, cppool_stream stream) override {
    return std::make_unique<CudaTokenRows>(rt_, SlotTilesOf(layout), layout.row_step, stream);
  }

  // `of` has a tile for each kSlotTile slots.
  void Transpose(const TokenRows& of, int heads, int dim, TensorRef payload, std::uint8_t* to,
                 cppool_stream stream) override {
    const RowView& slots = ViewOf(of);
    ExpectPayload(payload.dtype);
    const int columns = heads * dim;
    if (columns % 16 != 0 || !Aligned(payload.data, 16) || !Aligned(to, 16))
      throw RuntimeError(CPPOOL_INTERNAL, "tensor operations: a payload that cannot be transposed");
    if (slots.count == 0) return;
    const dim3 grid(static_cast<unsigned>(slots.count),
                    static_cast<unsigned>((columns + kTransposedColumns - 1) / kTransposedColumns));
    LaunchKernel(TransposeKernel, grid, kThreads, 0, AsCuda(stream),
                 "launching the transposition of a payload", slots, columns,
                 static_cast<const std::uint8_t*>(payload.data), to);
  }

 private:
  static void Convert(const RowView& rows, std::int64_t columns, TensorRef from, const float* factor,
                      TensorOut to, cppool_stream stream) {
    if (rows.count == 0 || columns == 0) return;
    const auto kernel = Fits(8, columns, {from, to}) ? &ConvertKernel<8> : &ConvertKernel<1>;
    LaunchKernel(kernel, GridOf(rows), kThreads, 0, AsCuda(stream), "launching a cast", rows, columns,
                 from.dtype, from.data, factor, to.dtype, to.data);
  }

  cppool_runtime* rt_;
};

}  // namespace

std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime) { return std::make_unique<CudaFp8Ops>(runtime); }

void LoadFp8Kernels() {
  LoadKernels("cudaFuncGetAttributes", AmaxKernel<1>, AmaxKernel<8>, MakeScaleKernel, ConvertKernel<1>,
              ConvertKernel<8>, DeltaKernel<1>, DeltaKernel<8>, CastDimBlocksKernel<1>,
              CastDimBlocksKernel<8>, CastTokenBlocksKernel<1>, CastTokenBlocksKernel<2>,
              DequantizeBlocksKernel<1>, DequantizeBlocksKernel<8>, TransposeKernel);
}

}  // namespace cppool::kernels::cuda
